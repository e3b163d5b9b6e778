"""Checksum of the serving weights, a tensor at a time: no step waits while gigabytes are copied to the host and hashed.

SHA-256 over name, shape and float32 bytes of every tensor, whole, in the order of the names. What may fail on one rank
alone, a thread or memory, is had before any rank waits for the others' parts.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterable

import torch

from honed.attach.swap.shard import AllGather, Shard
from honed.attach.swap.staging import use_device

MOST_UNHASHED = 4
"""Most tensors that wait to be copied to the host and hashed."""


class LiveChecksum:
    """One checksum under way.

    Args:
        parts: name, this rank's part of the tensor and its shard; views are read when their turn comes.
        all_gather: joins the ranks' parts.
        device: the parts' device.
    """

    def __init__(self, parts: Iterable[tuple[str, torch.Tensor, Shard]], all_gather: AllGather, device: torch.device) -> None:
        self._parts = sorted(parts, key=lambda part: part[0])
        self._all_gather, self._device = all_gather, device
        shards = [(tensor, shard) for _, tensor, shard in self._parts if not shard.is_whole]
        # PyTorch keeps this memory for the joined tensors, of which one at a time is on the device.
        torch.empty(max((shard.joining_bytes(tensor) for tensor, shard in shards), default=0), dtype=torch.uint8, device=device)
        self._coming: queue.SimpleQueue[_Coming | None] = queue.SimpleQueue()
        self._num_parts, self._num_taken, self._num_hashed = len(self._parts), 0, 0
        self._digest = hashlib.sha256()
        self._result = self._error = ""
        self._is_stopped, self._reading = False, threading.Lock()
        """The lock is held while a tensor is read."""
        self._thread = threading.Thread(target=self._hash, name="honed-checksum", daemon=True)
        self._thread.start()

    @torch.inference_mode()
    def take(self, part: int) -> tuple[str, bool, int]:
        """Start a tensor's copy to the host: in order, and under tensor parallelism on all ranks at once; −1: none.

        Returns:
            the checksum, "" until it is there; whether the next tensor may come already; their total number.

        Raises:
            RuntimeError: hashing failed on this rank, after it took part in joining the tensor like all others.
        """
        if part >= 0:
            name, tensor, shard = self._parts[part]
            self._num_taken += 1
            self._coming.put(_Coming(name, shard.join(tensor, self._all_gather)))
            if self._num_taken == self._num_parts:
                self._coming.put(None)
                self._parts = []
        if self._error:
            raise RuntimeError(self._error)
        return self._result, self._has_room, self._num_parts

    @property
    def _has_room(self) -> bool:
        if not self._parts:
            return False
        _, _, shard = self._parts[self._num_taken]
        return self._num_taken - self._num_hashed < (MOST_UNHASHED if shard.is_whole else 1)

    def stop(self) -> None:
        """End the thread. Once this returns, nothing is read from the device any more: vLLM may unmap its memory."""
        self._is_stopped = True  # first: the thread may get the lock again before this one does
        with self._reading:
            self._coming.put(None)

    def _hash(self) -> None:
        try:
            use_device(self._device)
            side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
            while (coming := self._coming.get()) is not None:
                with self._reading:
                    if self._is_stopped:
                        return
                    name, tensor = coming.name, coming.on_host(side)
                del coming  # and with it the joined tensor on the device
                self._digest.update(f"{name}{list(tensor.shape)}".encode())
                self._digest.update(tensor.float().reshape(-1).numpy().data.cast("B"))
                self._num_hashed += 1
            self._result = self._digest.hexdigest()
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"


class _Coming:
    """A tensor to be copied to the host."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self._tensor = name, tensor.detach()
        self._event = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def on_host(self, side: torch.cuda.Stream | None) -> torch.Tensor:
        """Copy it, on the calling thread alone, to memory that isn't pinned: pinning would hold up the engine's launches."""
        if side is None or self._event is None:
            return self._tensor
        with torch.cuda.stream(side):
            side.wait_event(self._event)
            return self._tensor.cpu()
