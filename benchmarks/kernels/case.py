"""What `kernel_bench.py` measures: cases, each one op at one shape, and the goals that are set for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

Run = Callable[[], object]
"""Does the work once, on inputs that are there already; the result is dropped."""


@dataclass(frozen=True)
class Work:
    """A case with its inputs made.

    Args:
        run: the op.
        bytes_moved: what has to be moved whoever does it, each input and output once.
        flops: likewise, of matrix products.
        alternatives: other ways to the same result, by name; the fastest is the one to compare with.
        yardsticks: something that the op can't do without, by name ("matmuls alone"), to say what the rest costs.
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
        """Whether the figure keeps within the bound."""
        return value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0.0)


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    Args:
        on: where the shape makes sense: a GPU's are too large for a CPU, a CPU's say nothing of a GPU.
        make: makes the inputs on a device.
        goals: what the op is to reach there.
    """

    op: str
    shape: str
    on: Literal["cuda", "cpu"]
    make: Callable[[torch.device], Work]
    goals: tuple[Goal, ...] = ()
