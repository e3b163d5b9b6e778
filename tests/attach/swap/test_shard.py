"""Each rank takes from a whole tensor what vLLM's own loader would give it, and the ranks' parts make up the whole again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from honed.attach.swap.shard import Shard, shard_of

RANKS = [(size, rank) for size in (1, 2, 4, 8) for rank in range(size)]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_parts_make_up_the_whole(dim: int, count: int, copies: int) -> None:
    whole = torch.arange(8 * 12).reshape(8, 12)
    shards = [Shard(dim, count, rank // copies, copies) for rank in range(count * copies)]
    parts = [shard.cut(whole) for shard in shards]

    def all_gather(part: torch.Tensor, along: int) -> torch.Tensor:
        assert part.is_contiguous()
        return torch.cat(parts, along)

    for shard, part in zip(shards, parts, strict=True):
        assert shard.whole_shape(part.shape) == whole.shape
        assert torch.equal(shard.join(part, all_gather), whole)


def test_what_every_rank_has_whole_is_not_gathered() -> None:
    def never(part: torch.Tensor, along: int) -> torch.Tensor:
        raise AssertionError("gathered")

    whole = torch.ones(3)
    assert Shard().join(Shard().cut(whole), never) is not None
    assert Shard().whole_shape(whole.shape) == whole.shape


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Any]:
    """vLLM's linear layers, as they are made on a rank of a tensor-parallel group."""
    pytest.importorskip("vllm")
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    def layers(size: int, rank: int) -> Any:
        for module in (linear, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
        return linear

    return layers


def loaded(layer: Any, whole: torch.Tensor, *which: Any) -> torch.Tensor:
    """The layer's weight after vLLM's own loader was given a whole tensor."""
    layer.weight.data.zero_()
    layer.weight.weight_loader(layer.weight, whole, *which)
    weight: torch.Tensor = layer.weight.data
    return weight


@pytest.mark.parametrize(("size", "rank"), RANKS)
def test_parts_are_those_of_vllms_loaders(size: int, rank: int, as_rank: Callable[[int, int], Any]) -> None:
    """8 query heads, 2 key/value heads: from 4 ranks on, neighbours share one."""
    linear = as_rank(size, rank)
    qkv = linear.QKVParallelLinear(16, 4, 8, 2, bias=False)
    rows = qkv.num_heads * 4
    sizes = {"q_proj": (32, 0, rows), "k_proj": (8, rows, qkv.num_kv_heads * 4)}
    sizes["v_proj"] = (8, rows + qkv.num_kv_heads * 4, qkv.num_kv_heads * 4)
    for name, (num_rows, start, length) in sizes.items():
        whole = torch.randn(num_rows, 16)
        part = loaded(qkv, whole, name[0]).narrow(0, start, length)
        shard = shard_of(qkv, "weight", name)
        assert torch.equal(shard.cut(whole), part), name
        assert shard.whole_shape(part.shape) == whole.shape

    merged = linear.MergedColumnParallelLinear(16, [24, 24], bias=False)
    for number, name in enumerate(("gate_proj", "up_proj")):
        whole = torch.randn(24, 16)
        part = loaded(merged, whole, number).chunk(2)[number]
        assert torch.equal(shard_of(merged, "weight", name).cut(whole), part), name

    row, whole = linear.RowParallelLinear(16, 8, bias=False), torch.randn(8, 16)
    assert torch.equal(shard_of(row, "weight").cut(whole), loaded(row, whole))
    replicated, whole = linear.ReplicatedLinear(16, 8, bias=False), torch.randn(8, 16)
    assert torch.equal(shard_of(replicated, "weight").cut(whole), loaded(replicated, whole))
    assert shard_of(torch.nn.LayerNorm(4), "weight") == Shard()
