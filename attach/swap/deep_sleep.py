"""Keeps the parameters of a drafter that vLLM discards in a sleep of level 2 and that no swap brings back.

vLLM discards all weights then, and keeps the buffers only. The daemon has a version swapped in after the wake-up. A swap leaves
some of the drafter's own parameters alone: an embedding and a head that aren't the target's, the table of a reduced vocabulary,
a mask's embedding, and DSpark's confidence head. These are kept in host memory, and copied back as soon as the memory is there.

vLLM's `sleep_preserve_parameter_names = ["draft.*"]` does so for all of the drafter's parameters, and would replace this as its
default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def keep_through_sleep(
    worker: Any, draft_model: torch.nn.Module, swapped: Callable[[], Iterable[torch.Tensor]], note_error: Callable[[str], None]
) -> None:
    """Make vLLM's worker keep such parameters.

    Args:
        swapped: returns what a swap sets, as views of the parameters.
        note_error: called with the place while an exception is handled; vLLM sleeps and wakes up all the same.

    Raises:
        AttributeError: honed doesn't support this worker.
    """
    sleep, wake_up, kept = worker.sleep, worker.wake_up, list[tuple[torch.Tensor, torch.Tensor]]()

    def sleeping(level: int = 1) -> None:
        try:
            if level > 1:
                kept[:] = [(live, live.to("cpu", copy=True)) for live in _own(worker, draft_model, swapped())]
        except Exception:
            kept.clear()
            note_error("keeping the drafter's own parameters in vLLM's sleep")
        sleep(level=level)

    def waking(tags: list[str] | None = None) -> None:
        wake_up(tags=tags)
        if tags is not None and "weights" not in tags:
            return
        try:
            with torch.inference_mode():
                for live, value in kept:
                    live.copy_(value)
        except Exception:
            note_error("bringing the drafter's own parameters back after vLLM's sleep")
        kept.clear()

    worker.sleep, worker.wake_up = sleeping, waking


def _own(worker: Any, draft_model: torch.nn.Module, swapped: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The drafter's parameters that are neither the target's nor set by a swap."""
    others = {_place(part) for part in swapped} | {_place(one.data) for one in worker.model_runner.get_model().parameters()}
    return [one.data for one in draft_model.parameters() if _place(one.data) not in others]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
