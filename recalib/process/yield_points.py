"""Yielding in the midst of a unit: on a CPU, before every single operation on tensors, forward and backward.

Between two units is soon enough on a GPU, where a unit is queued in one piece and runs as fast as it does. On cores that
serving uses as well, a unit that was begun when there was no work gets what serving leaves of them, with a `nice` trainer
next to nothing: 20 ms of computing take as long as the burst of requests does. So there it stops where it is, and goes on
when the burst is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class YieldPoints(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, `stand_by` is called before each operation of the thread, autograd's included.

    Args:
        stand_by: returns when the operation may run, so mostly at once; what it raises breaks the computation off.
    """

    def __init__(self, stand_by: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stand_by = stand_by

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._stand_by()
        return func(*args, **(kwargs or {}))
