"""An override that a command holds while it works; afterwards the earlier override is in force again.

What somebody else sets or clears meanwhile stays.

A killed command leaves it in force for at most `TTL_S`.
"""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import Any, Self

from honed.daemon.client.client import AdminClient, Refused, Unreachable, part

TTL_S = 600.0
ARRIVES_S, POLL_S = 5.0, 0.25
"""The daemon sends a policy at once; engines report once a second which one they follow."""
_LATER_COUNTS = ("draft_tokens", "policy")
"""Of these, the one that was set last is in force."""


class Held:
    """An override in force inside a `with`; raises AdminError if the daemon refuses it."""

    def __init__(self, client: AdminClient, name: str, value: float, reason: str) -> None:
        self._client, self._name, self._value, self._reason = client, name, value, reason
        self._earlier: dict[str, Any] | None = None
        self._began_s = self._put_s = 0.0
        self._put_unix_s = 0.0
        """Time of the latest put by the daemon's clock, which tells ours from another of the name."""

    def __enter__(self) -> Self:
        self._earlier = next((one for one in self._client.get("/v1/overrides") if one["name"] == self._name), None)
        before = self._generations()
        self._began_s = time.monotonic()
        self._put()
        while time.monotonic() < self._began_s + ARRIVES_S:
            now = self._generations()
            if now and all(now[engine_id] != before.get(engine_id) for engine_id in now):
                break
            time.sleep(POLL_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self._is_in_force():
            return
        earlier, path = self._earlier, f"/v1/overrides/{part(self._name)}"
        left_s = earlier["ttl_s"] - (time.monotonic() - self._began_s) if earlier else 0.0
        if earlier and left_s > 0:
            self._client.put(path, {"value": earlier["value"], "ttl_s": left_s, "reason": earlier["reason"]})
        else:
            with contextlib.suppress(Refused):  # it has just been cleared
                self._client.delete(path)

    def renew(self) -> None:
        """Keep it in force; call this regularly while the command runs."""
        if time.monotonic() - self._put_s > TTL_S / 3:
            self._put_s = time.monotonic()
            with contextlib.suppress(Unreachable):  # a restarted daemon keeps it for a while
                if self._is_in_force():
                    self._put()

    def _is_in_force(self) -> bool:
        """False if somebody has set another one, or cleared ours."""
        names = _LATER_COUNTS if self._name in _LATER_COUNTS else (self._name,)
        found = [one for one in self._client.get("/v1/overrides") if one["name"] in names]
        return bool(found) and (found[-1]["name"], found[-1]["created_unix_s"]) == (self._name, self._put_unix_s)

    def _put(self) -> None:
        body = {"value": self._value, "ttl_s": TTL_S, "reason": self._reason}
        self._put_unix_s = self._client.put(f"/v1/overrides/{part(self._name)}", body)["created_unix_s"]
        self._put_s = time.monotonic()

    def _generations(self) -> dict[str, int]:
        """The policy that each connected engine follows."""
        engines = self._client.get("/v1/engines")
        return {one["engine_id"]: one["policy"]["generation"] for one in engines if one["connected"]}
