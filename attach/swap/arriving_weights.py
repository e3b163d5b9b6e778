"""A DFlash drafter's weights that arrive through vLLM's own endpoints, copied in place as honed does its own.

vLLM loads them as at a start. It rebuilds the fused context-K/V projection each time something arrives, at an address that no
captured graph knows. On a CPU, where weights are packed away, it can't load them. So during an update of the drafter, vLLM's
weight-transfer engine gets a module of honed's in place of the model. It keeps what arrives, and copies it in place when the
update is finished: all or nothing. Tensors that don't arrive stay as they were. So do embedding, head and words, which no swap
changes; where they arrive, a warning says so.

A `load_weights` of `DFlashQwen3ForCausalLM` that fills the fused buffers in place would replace this.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from honed.attach.swap.swap import Swapper

logger = logging.getLogger("honed.attach")

_DIRECT = ("SparseNCCLWeightTransferEngine", "ShardedRDTWeightTransferEngine")
"""vLLM's weight-transfer engines that write into the model's parameters, without calling its `load_weights`."""


class ArrivingWeights(torch.nn.Module):
    """Replaces the drafter during an update; each rank keeps its own part of them, in host memory."""

    def __init__(self, swapper: Swapper) -> None:
        super().__init__()
        self._swapper = swapper
        self._arrived: dict[str, torch.Tensor] = {}
        self._left: list[str] = []
        """Names of what arrived and is left as it was."""

    def begin(self) -> None:
        """Forget an abandoned update's weights."""
        self._arrived, self._left = {}, []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take in whole tensors by their checkpoint names, like vLLM's models; they may be overwritten afterwards.

        Raises:
            SwapError: the drafter has no such tensor, or its shape differs, or it isn't finite.
        """
        loaded = set()
        for name, tensor in weights:
            loaded.add(name)
            parts = self._swapper.part_of(name.removeprefix("model."), tensor)
            self._arrived |= parts
            self._left += [] if parts else [name]
        return loaded

    def finish(self) -> None:
        """Copy what arrived into the live parameters."""
        arrived, left, self._arrived, self._left = self._arrived, self._left, {}, []
        self._swapper.overwrite(arrived)
        if left:
            logger.warning("honed: %s came with the drafter's new weights, and stay as vLLM loaded them", ", ".join(left))


def take_updates(worker: Any, swapper: Swapper) -> None:
    """Make vLLM's worker use `ArrivingWeights`.

    Raises:
        AttributeError: honed doesn't support this worker.
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
