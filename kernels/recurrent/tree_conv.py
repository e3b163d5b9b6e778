"""The short convolution before a recurrent layer, along draft trees: each row's taps are its own ancestors.

Computes: silu(reference.tree_conv), in the inputs' type. A program has one row and a part of the channels.
Moves: R·C·(X + 1) values, of which ancestors that rows share come from the cache. Floor: R·C·2 values at copy bandwidth.
Layout: inputs [N, C] and weight [C, X] contiguous; any C and X.
No GPU has run it. Source: arXiv 2312.00752 (Mamba), section 3.4.
"""

from __future__ import annotations

import torch

from honed.kernels.recurrent import reference

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_CHANNELS = 1024

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _tree_conv_kernel(  # type: ignore[no-untyped-def]
        inputs_ptr,
        at_ptr,
        weight_ptr,
        bias_ptr,
        out_ptr,
        C,
        TAPS: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        i_r = tl.program_id(0).to(tl.int64)
        o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        m_c = o_c < C
        b_out = tl.zeros([BLOCK_C], tl.float32)
        for i_x in tl.static_range(TAPS):
            row = tl.load(at_ptr + i_r * TAPS + i_x).to(tl.int64)
            b_x = tl.load(inputs_ptr + row * C + o_c, mask=m_c, other=0.0).to(tl.float32)
            b_out += b_x * tl.load(weight_ptr + o_c * TAPS + i_x, mask=m_c, other=0.0).to(tl.float32)
        if HAS_BIAS:
            b_out += tl.load(bias_ptr + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_out = b_out * tl.sigmoid(b_out)
        tl.store(out_ptr + i_r * C + o_c, b_out.to(out_ptr.dtype.element_ty), mask=m_c)


def tree_conv(
    inputs: torch.Tensor,  # [N, C]
    at: torch.Tensor,  # [R, X]
    weight: torch.Tensor,  # [C, X]
    bias: torch.Tensor | None = None,  # [C]
) -> torch.Tensor:  # [R, C] in the inputs' type
    """Convolve each row with the rows it follows, then silu; Triton on a GPU, its plain twin elsewhere.

    Args:
        at: the inputs of each row's taps, the oldest first, its own last. They aren't checked.

    Raises:
        ValueError: shapes don't fit each other.
    """
    if inputs.dim() != 2 or at.dim() != 2 or weight.shape != (inputs.shape[1], at.shape[1]):
        raise ValueError(
            f"tree_conv: inputs {list(inputs.shape)}, taps {list(at.shape)} and weight {list(weight.shape)} don't fit: they "
            "are [N, C], [R, X] and [C, X]"
        )
    if inputs.is_cuda:
        return launch(inputs, at, weight, bias)
    return torch.nn.functional.silu(reference.tree_conv(inputs, at, weight, bias)).to(inputs.dtype)


def launch(inputs: torch.Tensor, at: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Run the Triton kernel itself (on a GPU, or under Triton's interpreter); arguments as `tree_conv`."""
    if triton is None:
        raise RuntimeError("Triton is not installed: pip install triton")
    (rows, taps), channels = at.shape, inputs.shape[1]
    out = torch.empty((rows, channels), dtype=inputs.dtype, device=inputs.device)
    if not out.numel():
        return out
    block = min(triton.next_power_of_2(channels), _CHANNELS)
    _tree_conv_kernel[(rows, triton.cdiv(channels, block))](
        inputs.contiguous(),
        at.contiguous(),
        weight.contiguous(),
        weight if bias is None else bias.contiguous(),
        out,
        channels,
        TAPS=taps,
        HAS_BIAS=bias is not None,
        BLOCK_C=block,
        num_warps=4,
    )
    return out
