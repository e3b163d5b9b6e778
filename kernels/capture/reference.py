"""Plain PyTorch twins of the kernels: the definition of each op, used where there is no Triton.

Letters: T = rows of the batch, N = rows taken, H = hidden size.
"""

from __future__ import annotations

import torch


def context_features(
    states: torch.Tensor,  # [T, H]
    rows: torch.Tensor,  # [N] int64
    norm_weight: torch.Tensor,  # [H]
    eps: float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:  # [N, H]
    """Take rows of the fused target states and apply the drafter's `hidden_norm`: y = x / rms(x) · w.

    This is the order of vLLM's DFlash: `fc` is applied in `combine_hidden_states`, the norm when the context K/V are made. The
    mean of squares is accumulated in float32, whatever the states' dtype.
    """
    x = states.index_select(0, rows).float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * norm_weight.float()).to(dtype)
