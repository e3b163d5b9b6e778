"""Idempotency keys: the same request twice under one key is one change; another request under that key is refused.

At most `MOST` keys are kept in memory, for a day. Operations are stored with their keys, which therefore survive a restart. The
other changes (pausing, overrides) give the same state when repeated.

Source: draft-ietf-httpapi-idempotency-key-header, sections 2.4 to 2.7.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from honed.daemon.errors import ReusedKeyError

MOST = 10_000
KEPT_S = 86_400.0


def fingerprint(*parts: Any) -> str:
    """Identity of a request: its route, its path's names, its body."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class Replies:
    """Answers by key. Guarded by the service's lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_key: OrderedDict[str, tuple[float, str, Any]] = OrderedDict()

    def find(self, key: str | None, asked: str) -> Any | None:
        """The earlier answer to this request; None if the key is new.

        Raises:
            ReusedKeyError: the key was used for another request.
        """
        self._forget()
        if key is None or key not in self._by_key:
            return None
        _, before, reply = self._by_key[key]
        check_same(key, before, asked)
        return reply

    def keep(self, key: str | None, asked: str, reply: Any) -> None:
        """Store an answer."""
        if key is not None:
            self._by_key[key] = (self._clock(), asked, reply)

    def _forget(self) -> None:
        oldest = self._clock() - KEPT_S
        while self._by_key and (len(self._by_key) > MOST or next(iter(self._by_key.values()))[0] < oldest):
            self._by_key.popitem(last=False)


def check_same(key: str, before: str, asked: str) -> None:
    """Raise ReusedKeyError if a key's earlier request differs. An unknown one counts as the same."""
    if before and before != asked:
        raise ReusedKeyError(
            f"the idempotency key {key!r} was used for another request", cure="Use a fresh key for each change (a UUID)."
        )
