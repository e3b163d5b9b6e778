"""A checksum that is taken a tensor at a time is that of all of them."""

from __future__ import annotations

import hashlib
import threading
import time
import weakref

import pytest
import torch

from honed.attach.swap.live_checksum import MOST_UNHASHED, LiveChecksum, _Coming
from honed.attach.swap.shard import Shard
from tests.daemon.conftest import wait_for

TENSORS = {
    "norm.weight": torch.arange(5.0),
    "layers.0.weight": torch.randn(7, 3, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
    "layers.0.bias": torch.tensor(2.5),
    "layers.1.weight": torch.randn(4, 6, generator=torch.Generator().manual_seed(2)).t(),
}
CPU = torch.device("cpu")


def expected() -> str:
    digest = hashlib.sha256()
    for name in sorted(TENSORS):
        tensor = TENSORS[name]
        digest.update(f"{name}{list(tensor.shape)}".encode() + tensor.float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def alone(part: torch.Tensor, dim: int) -> torch.Tensor:
    raise AssertionError("a whole tensor has nothing to be joined with")


def finish(running: LiveChecksum) -> str:
    deadline_s = time.monotonic() + 30
    while not (found := running.take(-1)[0]):
        assert time.monotonic() < deadline_s
    return found


def test_it_is_the_checksum_of_all_in_the_order_of_their_names() -> None:
    running = LiveChecksum(((name, tensor, Shard()) for name, tensor in TENSORS.items()), alone, CPU)
    for part in range(len(TENSORS)):
        found, has_room, num_parts = running.take(part)
        assert (num_parts, has_room) == (4, part < 3)
        assert not found or part == 3
    assert finish(running) == expected()
    assert running.take(-1) == (expected(), False, 4)


def test_parts_are_joined() -> None:
    """Each of two ranks has half of the rows; here the other's are the negative of ours."""
    whole = torch.cat([TENSORS["norm.weight"], -TENSORS["norm.weight"]])
    joined = LiveChecksum([("w", TENSORS["norm.weight"], Shard(0, 2, 0))], lambda part, dim: torch.cat([part, -part], dim), CPU)
    joined.take(0)
    direct = LiveChecksum([("w", whole, Shard())], alone, CPU)
    direct.take(0)
    assert finish(joined) == finish(direct)


@pytest.mark.parametrize("shard", [Shard(), Shard(0, 2, 0)])
def test_of_joined_tensors_one_at_a_time_is_on_the_device(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank had memory for one before it took any in; parameters themselves take none."""
    on_host, go_on, held = _Coming.on_host, threading.Event(), weakref.WeakSet[_Coming]()

    def slow(coming: _Coming, side: torch.cuda.Stream | None) -> torch.Tensor:
        held.add(coming)
        assert go_on.wait(60)
        return on_host(coming, side)

    monkeypatch.setattr(_Coming, "on_host", slow)
    parts = [(f"{i}", TENSORS["norm.weight"], shard) for i in range(6)]
    running = LiveChecksum(parts, lambda part, dim: torch.cat([part, part], dim), CPU)
    num_taken, has_room = 0, True
    while has_room:
        _, has_room, _ = running.take(num_taken)
        num_taken += 1
    assert num_taken == (MOST_UNHASHED if shard.is_whole else 1)
    go_on.set()
    wait_for(lambda: running._num_hashed == num_taken, "the checksum")
    assert not held
    assert running.take(-1)[1]


def test_what_can_not_be_hashed_is_said() -> None:
    running = LiveChecksum([("w", torch.zeros(2, dtype=torch.complex64).to_sparse(), Shard())], alone, CPU)
    running.take(0)
    with pytest.raises(RuntimeError):
        finish(running)


@pytest.mark.fault("ranks that wait for the part of one that has failed")
def test_what_fails_on_a_rank_fails_before_any_rank_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def full(num_bytes: int, **more: object) -> torch.Tensor:
        asked.append(num_bytes)
        raise torch.OutOfMemoryError("no memory")

    parts = [("a", TENSORS["norm.weight"], Shard(0, 2, 0)), ("b", TENSORS["layers.1.weight"], Shard(0, 2, 0, copies=2))]
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(torch.OutOfMemoryError):
        LiveChecksum(parts, alone, CPU)
    assert asked == [4 * 6 * 4 * (4 + 2)], "the largest tensor: parts of four ranks, and the whole of two"


def test_a_rank_on_which_hashing_failed_still_takes_part_in_joining() -> None:
    """The others wait for it."""
    joined: list[int] = []

    def all_gather(part: torch.Tensor, dim: int) -> torch.Tensor:
        joined.append(dim)
        return part

    running = LiveChecksum([(name, TENSORS["norm.weight"], Shard(0, 2, 0)) for name in "ab"], all_gather, CPU)
    running.take(0)
    running._error = "no memory"
    with pytest.raises(RuntimeError, match="no memory"):
        running.take(1)
    assert len(joined) == 2


def test_once_it_has_stopped_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """After that vLLM unmaps the weights' memory, and a copy of it would end the worker."""
    on_host, begun, go_on, read = _Coming.on_host, threading.Event(), threading.Event(), list[str]()

    def slow(coming: _Coming, side: torch.cuda.Stream | None) -> torch.Tensor:
        read.append(coming.name)
        begun.set()
        assert go_on.wait(60)
        return on_host(coming, side)

    monkeypatch.setattr(_Coming, "on_host", slow)
    running = LiveChecksum(((name, tensor, Shard()) for name, tensor in TENSORS.items()), alone, CPU)
    for part in range(len(TENSORS)):
        running.take(part)
    assert begun.wait(60)
    stopping = threading.Thread(target=running.stop)
    stopping.start()
    stopping.join(0.2)
    assert stopping.is_alive(), "a tensor is being read"
    go_on.set()
    stopping.join(60)
    running._thread.join(60)
    assert not running._thread.is_alive()
    assert read == [min(TENSORS)]
    assert running.take(-1)[0] == ""
