"""A DFlash drafter's weights that come through vLLM's own endpoints, put in place as honed puts its own.

vLLM loads them as at a start: it builds the fused context-K/V projection anew each time that something arrives, at an address
that no captured graph knows; and on a CPU, where weights are packed away, it can't. So for an update of the drafter vLLM's
weight-transfer engine is given a module of ours in the model's place. What arrives is kept, and copied in place when the update
is finished: all or nothing. What doesn't arrive stays as it was.

What would replace it: a `load_weights` of `DFlashQwen3ForCausalLM` that fills the fused buffers in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from honed.attach.swap.swap import Swapper

_DIRECT = ("SparseNCCLWeightTransferEngine", "ShardedRDTWeightTransferEngine")
"""vLLM's weight-transfer engines that write into the model's parameters, rather than calling its `load_weights`."""


class ArrivingWeights(torch.nn.Module):
    """Stands for the drafter while its weights arrive; each rank keeps its own part of them, in host memory."""

    def __init__(self, swapper: Swapper) -> None:
        super().__init__()
        self._swapper = swapper
        self._arrived: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Forget what came of an update that was given up."""
        self._arrived = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take in whole tensors by their checkpoint names; they may be overwritten afterwards. As vLLM's models have it.

        Raises:
            SwapError: the drafter has no such tensor, or it is of another shape, or not finite.
        """
        loaded = set()
        for name, tensor in weights:
            loaded.add(name)
            self._arrived |= self._swapper.part_of(name.removeprefix("model."), tensor)
        return loaded

    def finish(self) -> None:
        """Copy what arrived into the live parameters."""
        arrived, self._arrived = self._arrived, {}
        self._swapper.overwrite(arrived)


def take_updates(worker: Any, swapper: Swapper) -> None:
    """Have vLLM's worker use it.

    Raises:
        AttributeError: this worker isn't one that honed knows.
    """
    arriving = ArrivingWeights(swapper)
    set_target, finish = worker._set_draft_weight_update_target, worker.finish_weight_update

    def set_draft_target() -> None:
        set_target()
        engine = worker.weight_transfer_engine
        arriving.begin()
        if type(engine).__name__ not in _DIRECT:
            engine.set_weight_update_target(arriving, engine.model_config)

    def finish_update() -> None:
        finish()
        if worker._weight_update_is_draft:
            arriving.finish()

    worker._set_draft_weight_update_target, worker.finish_weight_update = set_draft_target, finish_update
