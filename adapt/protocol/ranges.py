"""Allowed values of settings: a dataclass of settings names each field's range and is checked when it is made.

    @dataclass(frozen=True)
    class Some:
        share: float = 0.1
        RANGES: ClassVar[Ranges] = {"share": SHARE}

        def __post_init__(self) -> None:
            check_ranges(self)

The daemon reads the same tables, so it can name every wrong setting at once, with its source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers from `low` to `high`, ends included unless excluded. In a tuple, every number must be in the range."""

    low: float
    high: float = math.inf
    excludes_low: bool = False
    excludes_high: bool = False

    def holds(self, value: Any) -> bool:
        """Whether a value is allowed."""
        if isinstance(value, tuple | list):
            return all(self.holds(one) for one in value)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return False
        is_above = value > self.low if self.excludes_low else value >= self.low
        return is_above and (value < self.high if self.excludes_high else value <= self.high)

    def __str__(self) -> str:
        low = f"{'above' if self.excludes_low else 'at least'} {_number(self.low)}"
        if math.isinf(self.high):
            return low
        if not self.excludes_low and not self.excludes_high:
            return f"from {_number(self.low)} to {_number(self.high)}"
        return f"{low} and {'below' if self.excludes_high else 'at most'} {_number(self.high)}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few words."""

    words: tuple[str, ...]

    def holds(self, value: Any) -> bool:
        """Whether a value is allowed."""
        return value in self.words

    def __str__(self) -> str:
        return f"one of {', '.join(self.words)}"


Ranges = Mapping[str, Range | OneOf]
"""Field -> its allowed values."""

SHARE = Range(0, 1)
PROBABILITY = Range(0, 1, excludes_low=True, excludes_high=True)
COUNT = Range(1)
SECONDS = Range(0, 1e9, excludes_low=True)
DRAFT_TOKENS = Range(-1, 1024)
"""−1: as many as the engine was configured for."""


def check_ranges(settings: Any) -> None:
    """Raise a ValueError that names every field whose value is out of its range."""
    wrong = [
        f"{name} must be {allowed}, not {getattr(settings, name)!r}"
        for name, allowed in settings.RANGES.items()
        if not allowed.holds(getattr(settings, name))
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def _number(value: float) -> str:
    return f"{int(value):,}".replace(",", "_") if value == int(value) and abs(value) < 1e15 else f"{value:g}"
