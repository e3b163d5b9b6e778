"""The operator's overrides. Each has a time to live, survives restarts and ends when its time is over.

While the daemon runs, the monotonic clock measures that time, so setting the wall clock changes none.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from honed.adapt.control.settings import MODES, ControllerSettings, Override
from honed.daemon.errors import RequestError, UnknownError, there_are
from honed.daemon.store.journal import Journal
from honed.daemon.store.store import Store

log = structlog.get_logger("honed.overrides")

MAX_TTL_S = 30 * 86400.0
MAX_DRAFT_TOKENS = 1024
NAMES = ("draft_tokens", "capture_share", "policy")


@dataclass(frozen=True, slots=True)
class SetOverride:
    """An override as set."""

    name: str
    value: Any
    until_unix_s: float
    reason: str
    actor: str
    created_unix_s: float


class Overrides:
    """Overrides in force. Guarded by the service's lock."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        settings: ControllerSettings,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._store, self._journal, self._settings = store, journal, settings
        self._clock, self._monotonic = clock, monotonic
        self._by_name: dict[str, SetOverride] = {}
        self._ends_s: dict[str, float] = {}
        """Ends, by the monotonic clock."""
        self.changes: Counter[tuple[str, str]] = Counter()
        """(name, "set", "cleared" or "expired") -> count since the daemon started."""
        self._number = 0
        """Number of the override that was set last."""

    def load(self) -> None:
        """Load those in force when the daemon stopped, except values that the settings no longer allow."""
        for row in self._store.read("SELECT * FROM overrides ORDER BY number"):
            name, self._number = row["name"], row.pop("number")
            if row["until_unix_s"] <= self._clock():
                continue
            left_s = row["until_unix_s"] - max(self._clock(), row["created_unix_s"])  # a clock that is behind adds nothing
            self._by_name[name], self._ends_s[name] = SetOverride(**row), self._monotonic() + left_s
            try:
                row["value"] = json.loads(row["value"])
                self._by_name[name] = SetOverride(**row)
                check(name, row["value"], self._settings)
            except (RequestError, UnknownError, ValueError, TypeError, RecursionError) as error:
                log.warning("an override is dropped", name=name, value=row["value"], error=str(error))
                self._remove(name)
                self._journal.audit("honed", "override.clear", name, str(error))
                self._journal.mark("override", f"{name} dropped: {error}")

    def set(
        self, name: str, value: Any, ttl_s: float, reason: str, actor: str, drafts_most: Mapping[str, int] | None = None
    ) -> SetOverride:
        """Put an override in force.

        Args:
            drafts_most: connected engine -> its configured draft tokens. A number that none of them can draft is refused
                as a mistake. If only some can, it is accepted, and the others draft their most.

        Raises:
            RequestError, UnknownError
        """
        check(name, value, self._settings, drafts_most)
        if not 0 < ttl_s <= MAX_TTL_S:
            raise RequestError(f"ttl_s must be above 0 and at most {MAX_TTL_S:g}, not {ttl_s:g}")
        now = self._clock()
        made = SetOverride(name, value, now + ttl_s, reason, actor, now)
        self._by_name.pop(name, None)  # the latest stands last
        self._by_name[name], self._ends_s[name] = made, self._monotonic() + ttl_s
        self.changes[name, "set"] += 1
        self._number += 1
        row = {field: getattr(made, field) for field in SetOverride.__slots__}
        self._journal.insert("overrides", row | {"value": json.dumps(value), "number": self._number}, key="name")
        self._journal.audit(actor, "override.set", name, reason, f"{value!r} for {ttl_s:g} s")
        self._journal.mark("override", f"{name} = {value!r}")
        return made

    def clear(self, name: str, reason: str, actor: str) -> None:
        """End an override. Raises UnknownError if it isn't in force."""
        if name not in self._by_name:
            why = f"no override {name!r} is in force; {there_are(self._by_name)}"
            raise UnknownError(why, cure="`honed override list` shows them.")
        self._remove(name)
        self.changes[name, "cleared"] += 1
        self._journal.audit(actor, "override.clear", name, reason)
        self._journal.mark("override", f"{name} cleared")

    def expire(self) -> None:
        """Drop expired overrides."""
        now_s = self._monotonic()
        for name in [name for name, end_s in self._ends_s.items() if end_s <= now_s]:
            self._remove(name)
            self.changes[name, "expired"] += 1
            self._journal.audit("honed", "override.clear", name, "time to live is over")
            self._journal.mark("override", f"{name} expired")

    def active(self, extra: Override | None = None) -> list[Override]:
        """Overrides for the controllers, on their clock; an operator's override replaces an `extra` of the same name.

        They are in the order of setting: of `draft_tokens` and `policy` the later one counts.
        """
        found = [Override(o.name, o.value, self._ends_s[o.name]) for o in self._by_name.values()]
        if extra is not None and extra.name not in self._by_name:
            found.append(extra)
        return found

    def listing(self) -> list[dict[str, Any]]:
        """Documents for the API."""
        now, now_s = self._clock(), self._monotonic()
        left_s = {name: max(0.0, end_s - now_s) for name, end_s in self._ends_s.items()}
        return [
            {field: getattr(o, field) for field in SetOverride.__slots__}
            | {"ttl_s": left_s[o.name], "until_unix_s": now + left_s[o.name]}
            for o in self._by_name.values()
        ]

    def _remove(self, name: str) -> None:
        del self._by_name[name], self._ends_s[name]
        sql = "DELETE FROM overrides WHERE name = ?"
        done = self._store.keep(("overrides", name), lambda db: db.conn.execute(sql, (name,)) and None)
        done.add_done_callback(lambda done: self._note_left(name, done.exception()))

    @staticmethod
    def _note_left(name: str, error: BaseException | None) -> None:
        if error is not None:
            log.error("an override that has ended is still stored: a restart brings it back", name=name, error=str(error))


def check(name: str, value: Any, settings: ControllerSettings, drafts_most: Mapping[str, int] | None = None) -> None:
    """Raise UnknownError for an unknown name, RequestError for an invalid value."""
    if name not in NAMES:
        raise UnknownError(f"no override {name!r}; there are {', '.join(NAMES)}", cure="`honed override set --help`")
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if name == "draft_tokens":
        most = max((drafts_most or {}).values(), default=MAX_DRAFT_TOKENS)
        if not (is_number and value == int(value) and 0 <= value <= MAX_DRAFT_TOKENS):
            raise RequestError(f"draft_tokens takes a whole number from 0 to {most}, not {value!r}")
        if value > most:
            able = ", ".join(f"{engine_id} {k}" for engine_id, k in sorted((drafts_most or {}).items()))
            raise RequestError(
                f"draft_tokens {value:g} is more than any connected engine can draft ({able})",
                cure=f"Give 0 to {most}; more needs num_speculative_tokens in vLLM's --speculative-config, and a restart.",
            )
    if name == "capture_share" and not (is_number and 0 <= value <= 1):
        raise RequestError(f"capture_share takes a number from 0 to 1, not {value!r}")
    if name == "policy" and value not in MODES:
        raise RequestError(f"policy takes one of {', '.join(MODES)}, not {value!r}")
    if name == "policy" and value == "table" and not settings.table:
        raise RequestError(
            'policy "table" needs a table, and the settings have none',
            cure="Set controller.table, e.g. `table = [[4, 5], [16, 2]]`, and restart the daemon; `honed replay` tests tables.",
        )
