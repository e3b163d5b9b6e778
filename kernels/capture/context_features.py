"""Gather + RMSNorm + cast of the rows that are captured for training, in one pass.

Computes: reference.context_features. One program a row.
Moves: N·H·(sizeof(in) + sizeof(out)) + H·sizeof(w) bytes; at copy bandwidth that is the floor (each row is read once, kept in
registers, written once). Separate `index_select`, norm and cast would move the rows three times.
Layout: `states` [T, H] with unit stride in H; `out` [N, H] contiguous; H at most 16,384 (one row in registers).
Source: RMSNorm, arXiv 1910.07467; its place in DFlash: arXiv 2602.06036, section 3.
"""

from __future__ import annotations

import torch

from honed.kernels.capture import reference

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MAX_HIDDEN = 16_384

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _context_features_kernel(  # type: ignore[no-untyped-def]
        states_ptr, rows_ptr, weight_ptr, out_ptr, states_stride, hidden, eps, BLOCK: tl.constexpr
    ):
        i_n = tl.program_id(0).to(tl.int64)
        o_h = tl.arange(0, BLOCK)
        m_h = o_h < hidden
        row = tl.load(rows_ptr + i_n).to(tl.int64)
        b_x = tl.load(states_ptr + row * states_stride + o_h, mask=m_h, other=0.0).to(tl.float32)
        b_w = tl.load(weight_ptr + o_h, mask=m_h, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=0) / hidden + eps)
        b_y = b_x * scale * b_w
        tl.store(out_ptr + i_n * hidden + o_h, b_y.to(out_ptr.dtype.element_ty), mask=m_h)


def context_features(
    states: torch.Tensor,  # [T, H]
    rows: torch.Tensor,  # [N] int64, each 0 ≤ row < T: not checked
    norm_weight: torch.Tensor,  # [H]
    eps: float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:  # [N, H]
    """Normalise rows of the fused target states by the drafter's `hidden_norm`; Triton on a GPU, its plain twin elsewhere.

    Raises:
        ValueError: shapes don't fit each other.
    """
    if states.dim() != 2 or norm_weight.shape != states.shape[1:] or rows.dim() != 1:
        raise ValueError(
            f"context_features: states {list(states.shape)}, rows {list(rows.shape)} and norm weight "
            f"{list(norm_weight.shape)} don't fit: they are [T, H], [N] and [H]"
        )
    if states.is_cuda and states.stride(1) == 1 and states.shape[1] <= MAX_HIDDEN:
        return launch(states, rows, norm_weight, eps, dtype)
    return reference.context_features(states, rows, norm_weight, eps, dtype)


def launch(
    states: torch.Tensor, rows: torch.Tensor, norm_weight: torch.Tensor, eps: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Run the Triton kernel itself (on a GPU, or under Triton's interpreter); arguments as `context_features`."""
    if triton is None:
        raise RuntimeError("Triton is not installed: pip install triton")
    hidden = states.shape[1]
    assert states.stride(1) == 1 or hidden <= 1, "the kernel reads rows of unit stride"
    rows, norm_weight = rows.contiguous(), norm_weight.contiguous()  # the kernel takes no strides for them
    out = torch.empty((len(rows), hidden), dtype=dtype, device=states.device)
    if out.numel():
        block = triton.next_power_of_2(hidden)
        _context_features_kernel[(len(rows),)](
            states, rows, norm_weight, out, states.stride(0), hidden, eps, BLOCK=block, num_warps=max(1, min(16, block // 256))
        )
    return out
