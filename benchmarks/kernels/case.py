"""Cases for `kernel_bench.py`, each one op at one shape, and the goals set for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

Run = Callable[[], object]
"""Does the work once, on existing inputs; the result is dropped."""


@dataclass(frozen=True)
class Work:
    """A case with its inputs made.

    Args:
        run: the op.
        bytes_moved: bytes that any implementation must move, each input and output once.
        flops: likewise, of matrix products.
        alternatives: other ways to the same result, by name; the op is compared with the fastest.
        yardsticks: a necessary part of the op, by name ("matmuls alone"), to show the cost of the rest.
        is_graphed: time the op and the yardsticks from a CUDA graph on a GPU, as an engine would run them.
        has_peak: measure peak memory as well, of the op and of the alternatives.
    """

    run: Run
    bytes_moved: int = 0
    flops: int = 0
    alternatives: Mapping[str, Run] = field(default_factory=dict)
    yardsticks: Mapping[str, Run] = field(default_factory=dict)
    is_graphed: bool = False
    has_peak: bool = False


@dataclass(frozen=True)
class Goal:
    """A bound for one figure of a row.

    Args:
        figure: "time_us", "ceiling_share", "ratio" (the best alternative's time over the op's), "ratio:NAME", "cost:NAME"
            (the op's time over a yardstick's) or "peak_share:NAME" (the op's peak memory over an alternative's).
    """

    figure: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def text(self) -> str:
        """The bound in words."""
        return f"{self.figure} ≥ {self.at_least:g}" if self.at_least is not None else f"{self.figure} ≤ {self.at_most:g}"

    def is_met(self, value: float) -> bool:
        """Return whether the figure keeps within the bound."""
        return value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0.0)


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    Args:
        on: device of the shape: a GPU's is too large for a CPU, a CPU's says nothing about a GPU.
        make: makes the inputs on a device.
        goals: required figures of the op there.
    """

    op: str
    shape: str
    on: Literal["cuda", "cpu"]
    make: Callable[[torch.device], Work]
    goals: tuple[Goal, ...] = ()
