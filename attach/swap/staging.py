"""Where new weights wait to be copied into the running drafter: on the device while it has room to spare, else in host memory.

vLLM plans the device's memory for itself, and takes some of it only when a large batch comes. What it leaves is small, and a
trainer may want it, too; so no more is staged there than leaves `RESERVE_BYTES`. From pinned host memory the copy takes some
tens of milliseconds for each gigabyte, instead of one.
"""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger("honed.attach")

RESERVE_BYTES = 1 << 29
Tensors = dict[str, torch.Tensor]


class Staging:
    """Brings weights to a device, on a stream of its own.

    One for as long as the worker lives: PyTorch keeps freed memory for the stream that had it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._most_bytes = 0
        self.is_device_away = False
        """vLLM sleeps: what is free on the device now is what it wakes up in."""

    def bring(self, tensors: Tensors, held_bytes: int = 0) -> Tensors:
        """Copy tensors to the device, or pin them where they are; on a CPU they stay what they are.

        Args:
            held_bytes: what waits there already.
        """
        if self._stream is None:
            return tensors
        pinned = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        wanted = held_bytes + num_bytes(pinned)
        free, _ = torch.cuda.mem_get_info(self._device)
        if not self.is_device_away and has_room(free, wanted, self._most_bytes):
            try:
                with torch.cuda.stream(self._stream):
                    moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in pinned.items()}
                self._stream.synchronize()
            except torch.OutOfMemoryError:
                pass  # somebody was quicker
            else:
                self._most_bytes = max(self._most_bytes, wanted)
                return moved
        logger.warning(
            "honed: new weights (%d MiB) wait in host memory, since %d MiB are free on the device: the swap takes longer; "
            "lower --gpu-memory-utilization a little to have them on the device",
            num_bytes(pinned) >> 20,
            free >> 20,
        )
        return pinned


def has_room(free: int, wanted: int, most: int) -> bool:
    """Whether so many bytes may be staged on a device.

    Args:
        free: on the device.
        wanted: in all, what waits there already included.
        most: that were ever staged at once: the allocator has kept as much.
    """
    return free - max(wanted - most, 0) >= RESERVE_BYTES


def use_device(device: torch.device) -> None:
    """In a thread of its own: work on this device. Else CUDA makes a context on the first one, hundreds of megabytes a rank."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def num_bytes(tensors: Tensors) -> int:
    """Of all together."""
    return sum(tensor.nbytes for tensor in tensors.values())
