"""Tells how much device memory vLLM has planned for and not allocated. If others take it, the next large batch ends the engine.

vLLM sizes its KV cache so that the peak of its activations, which it has measured, stays free. PyTorch allocates that memory
when a batch needs it, and keeps it from then on. The rejection sampler's scores in float32 come on top: vLLM doesn't measure
them.
"""

from __future__ import annotations

import logging
from typing import Any
from uuid import UUID

import torch

logger = logging.getLogger("honed.attach")

UNMEASURED_BYTES = 1 << 30
"""For what vLLM doesn't measure, the rejection sampler's scores above all."""


class DeviceReserve:
    """What one rank of an engine will still want of its device; nothing on a CPU. No method raises.

    Args:
        worker: vLLM's.
    """

    def __init__(self, worker: Any) -> None:
        self.gpu = ""
        """The GPU's UUID; "" if there is none, or it isn't known."""
        self._planned = self._cached_then = 0
        self._device: torch.device | None = None
        try:
            device = torch.device(worker.device)
            if device.type != "cuda":
                return
            self._planned = UNMEASURED_BYTES + max(int(getattr(worker, "peak_activation_memory", 0)), 0)
            self._device, self._cached_then = device, _cached_bytes(device)
            self.gpu = str(UUID(str(torch.cuda.get_device_properties(device).uuid)))
        except Exception as error:
            logger.warning("honed: what vLLM reserves on its GPU isn't known in full: %s: %s", type(error).__name__, error)

    def num_bytes(self, staged: int = 0) -> int:
        """Bytes that must stay free: what was planned, but for what the allocator has come to hold unused since the start.

        Args:
            staged: most bytes that honed has staged at once, which may be among the unused ones.
        """
        if self._device is None:
            return self._planned
        try:
            held = _cached_bytes(self._device) - self._cached_then - staged
        except Exception:
            held = 0
        return max(self._planned - max(held, 0), 0)


def _cached_bytes(device: torch.device) -> int:
    """Bytes that PyTorch's allocator holds and nobody uses."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
