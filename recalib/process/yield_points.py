"""Yielding within a unit: on a CPU, before every single tensor operation, forward and backward.

On a GPU it is enough to yield between units: a unit is queued in one piece and runs at full speed. On cores that serving also
uses, a unit that has begun gets only the time that serving leaves, and a `nice` trainer gets almost none. Then 20 ms of
computing take as long as the burst of requests. So the unit stops at once, and continues after the burst.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class YieldPoints(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, `stand_by` is called before each operation of the thread, autograd's included.

    Args:
        stand_by: returns when the operation may run, usually at once; an exception from it ends the computation.
    """

    def __init__(self, stand_by: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stand_by = stand_by

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._stand_by()
        return func(*args, **(kwargs or {}))
