"""Memory in which new weights wait to be copied into the running drafter: on the device if it has room, else in host memory.

vLLM plans the device's memory for itself, and takes some of it only when a large batch comes. It leaves little, and a trainer
may want that, too. So staging always leaves on the device what vLLM will still want, `RESERVE_BYTES` at least. From pinned host
memory the copy takes some tens of milliseconds for each gigabyte, instead of one.

Weights reach the device through one small pinned buffer: while the driver pins memory, a step may wait to launch its kernels.
Only where the device has no room is a whole drafter pinned.
"""

from __future__ import annotations

import logging

import torch

from honed.attach.swap.device_reserve import DeviceReserve

logger = logging.getLogger("honed.attach")

RESERVE_BYTES = 1 << 29
BUFFER_BYTES = 32 << 20
Tensors = dict[str, torch.Tensor]


class Staging:
    """Copies weights to a device, on its own stream.

    There is one for the worker's whole life: PyTorch keeps freed memory for the stream that had it.

    Args:
        reserve: what vLLM will still want of the device; None: nothing is known.
    """

    def __init__(self, device: torch.device, reserve: DeviceReserve | None = None) -> None:
        self._device, self._reserve = device, reserve
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.most_bytes = 0
        """Most bytes that were staged at once: PyTorch's allocator has kept as many."""
        self._buffer: torch.Tensor | None = None
        """Pinned, made for the first weights and kept."""
        self.is_device_away = False
        """vLLM sleeps: it needs the device's free memory to wake up."""

    def rest(self, is_asleep: bool) -> None:
        """vLLM falls asleep, or is awake again. Either time its allocator gives back what it had kept."""
        self.is_device_away, self.most_bytes = is_asleep, 0

    def bring(self, tensors: Tensors, held_bytes: int = 0) -> Tensors:
        """Copy tensors to the device, or pin them in host memory; on a CPU return them unchanged.

        Args:
            held_bytes: bytes staged already.
        """
        if self._stream is None:
            return tensors
        wanted = held_bytes + num_bytes(tensors)
        free, _ = torch.cuda.mem_get_info(self._device)
        reserved = self._reserve.num_bytes(self.most_bytes) if self._reserve is not None else 0
        if not self.is_device_away and has_room(free, wanted, self.most_bytes, reserved):
            try:
                moved = self._move(tensors)
            except torch.OutOfMemoryError:
                pass  # another process was quicker
            else:
                self.most_bytes = max(self.most_bytes, wanted)
                return moved
        logger.warning(
            "honed: new weights (%d MiB) wait in host memory, since only %d MiB are free on the device, where vLLM may still "
            "want %d MiB: the swap takes longer; lower --gpu-memory-utilization a little to have them on the device",
            num_bytes(tensors) >> 20,
            free >> 20,
            max(reserved, RESERVE_BYTES) >> 20,
        )
        return {name: tensor.pin_memory() for name, tensor in tensors.items()}

    def _move(self, tensors: Tensors) -> Tensors:
        """Copy tensors to the device through the buffer, which isn't written while a copy reads it."""
        assert self._stream is not None
        if self._buffer is None:
            self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self._stream.synchronize()  # an earlier call may have failed half way
        used, size = 0, len(self._buffer)
        with torch.cuda.stream(self._stream):
            moved = {name: torch.empty(one.shape, dtype=one.dtype, device=self._device) for name, one in tensors.items()}
            for name, tensor in tensors.items():
                for source, target in zip(_pieces(tensor, size), _pieces(moved[name], size), strict=True):
                    if used + len(source) > size:
                        self._stream.synchronize()
                        used = 0
                    part = self._buffer[used : used + len(source)]
                    target.copy_(part.copy_(source), non_blocking=True)
                    used += len(source)
        self._stream.synchronize()
        return moved


def _pieces(tensor: torch.Tensor, num_bytes: int) -> list[torch.Tensor]:
    """A contiguous tensor's bytes, in pieces of at most so many."""
    whole = tensor.view(-1).view(torch.uint8)
    return [whole[begin : begin + num_bytes] for begin in range(0, len(whole), num_bytes)]


def has_room(free: int, wanted: int, most: int, reserved: int = 0) -> bool:
    """Whether so many bytes may be staged on a device.

    Args:
        free: free bytes on the device.
        wanted: bytes in all, including those staged already.
        most: most bytes ever staged at once: the allocator has kept as much.
        reserved: bytes that vLLM will still want.
    """
    return free - max(wanted - most, 0) >= max(RESERVE_BYTES, reserved)


def use_device(device: torch.device) -> None:
    """Use this device in a new thread. Else CUDA makes a context on the first one, hundreds of megabytes a rank."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def num_bytes(tensors: Tensors) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())
