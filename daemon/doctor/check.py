"""What `honed doctor` finds: one `Check` for each thing looked at, with the cause of what is wrong and the cure.

The checks are functions of values that others gathered (settings, processes, answers), so each can be shown to fail. `level`
is "ok", "warning", "error", or "unknown" where it could not be looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error", "unknown"]
ORDER: tuple[Level, ...] = ("error", "warning", "unknown", "ok")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    subject: str
    level: Level
    text: str
    cure: str = ""


def worst_first(checks: Iterable[Check]) -> list[Check]:
    """Errors, warnings, what couldn't be seen, and what is well; each in the order it was found."""
    return sorted(checks, key=lambda check: ORDER.index(check.level))


def exit_code(checks: Iterable[Check]) -> int:
    """0: nothing is wrong; 1: something is; 4: only warnings. What couldn't be seen counts as neither."""
    levels = {check.level for check in checks}
    return 1 if "error" in levels else 4 if "warning" in levels else 0
