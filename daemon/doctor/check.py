"""Results of `honed doctor`: one `Check` for each item, with the cause of a problem and its cure.

The checks are functions of values gathered elsewhere (settings, processes, answers), so tests can make each fail. `level`
is "ok", "warning", "error", or "unknown" if the check was impossible.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error", "unknown"]
ORDER: tuple[Level, ...] = ("error", "warning", "unknown", "ok")


@dataclass(frozen=True, slots=True)
class Check:
    """Result of checking one item."""

    subject: str
    level: Level
    text: str
    cure: str = ""


def worst_first(checks: Iterable[Check]) -> list[Check]:
    """Errors, warnings, unknowns, then passed checks; each group in the order found."""
    return sorted(checks, key=lambda check: ORDER.index(check.level))


def exit_code(checks: Iterable[Check]) -> int:
    """Exit code. 0: no problem; 1: errors; 4: only warnings. Unknowns don't count."""
    levels = {check.level for check in checks}
    return 1 if "error" in levels else 4 if "warning" in levels else 0
