"""Part of a checkpoint's tensor that a rank holds under vLLM's tensor parallelism: each rank takes only its own.

Source: vllm/model_executor/layers/linear.py. A column-parallel weight is cut along its outputs, each of its stacked tensors by
itself. A row-parallel weight is cut along its inputs. With fewer K/V heads than ranks, neighbouring ranks hold the same head.
Everything else is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

AllGather = Callable[[torch.Tensor, int], torch.Tensor]
"""(part, dim) -> the parts of all ranks in a row along dim."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count` equal ones along `dim`, held by each of `copies` neighbouring ranks; by default the whole."""

    dim: int = 0
    count: int = 1
    index: int = 0
    copies: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return self.count * self.copies == 1

    def whole_shape(self, part: torch.Size) -> torch.Size:
        """Shape of the whole tensor, from a part's shape."""
        return torch.Size(size * self.count if dim == self.dim else size for dim, size in enumerate(part))

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        size = whole.shape[self.dim] // self.count
        return whole.narrow(self.dim, self.index * size, size)

    def joining_bytes(self, part: torch.Tensor) -> int:
        """Bytes that `join` takes: those of all ranks' parts, and those of the whole."""
        return part.nbytes * self.count * (self.copies + 1)

    def join(self, part: torch.Tensor, all_gather: AllGather) -> torch.Tensor:
        """The whole tensor from the ranks' parts; every rank has to call it for the same tensor at the same time."""
        if self.is_whole:
            return part
        parts = all_gather(part.contiguous(), self.dim).chunk(self.count * self.copies, self.dim)
        return torch.cat(parts[:: self.copies], self.dim)


def shard_of(module: Any, parameter: str, stacked: str = "") -> Shard:
    """The part of a parameter's tensor that vLLM's module holds.

    Args:
        module: the module that owns the parameter.
        parameter: its name there, like "weight".
        stacked: name of one of the tensors stacked in it, like "k_proj"; "" when there is only one.
    """
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

    if parameter == "attention_sink_bias":  # one value a query head
        return shard_of(module.qkv_proj, "weight", "q_proj")
    if isinstance(module, RowParallelLinear) and parameter == "weight":
        return Shard(1, module.tp_size, module.tp_rank)
    if isinstance(module, ColumnParallelLinear):
        copies = module.num_kv_head_replicas if stacked in ("k_proj", "v_proj") else 1
        return Shard(0, module.tp_size // copies, module.tp_rank // copies, copies)
    return Shard()
