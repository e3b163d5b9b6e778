"""Parts of honed that fail now and then inside a running engine."""

from __future__ import annotations

from typing import Any

import pytest


def fail_sometimes(patch: pytest.MonkeyPatch, owner: Any, name: str, *, every: int, at: int) -> list[int]:
    """Let a method raise in each `every`-th call, first in call `at`; return a list that holds the numbers of its calls."""
    works, calls = getattr(owner, name), list[int]()

    def fails_sometimes(*args: Any) -> Any:
        calls.append(len(calls) + 1)
        if calls[-1] % every == at:
            raise RuntimeError("broken on purpose")
        return works(*args)

    patch.setattr(owner, name, fails_sometimes)
    return calls
