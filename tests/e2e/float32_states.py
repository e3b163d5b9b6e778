"""Lets vLLM's CPU build compute Gated DeltaNet in float32: its C++ kernels take 16-bit inputs only.

They are replaced by the recurrence itself, token by token (arXiv 2412.06464). All else of the layer is vLLM's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

# Letters: T tokens, Q heads of queries and keys, H heads of values, K and V their widths, S states held.


class _Float32Torch:
    """PyTorch for one module of vLLM's, which asks for bfloat16, and for packed kernels where the CPU has them."""

    bfloat16 = torch.float32

    class cpu:
        _is_amx_tile_supported = _is_avx512_bf16_supported = staticmethod(lambda: False)
        get_capabilities = staticmethod(dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _recur(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:  # [H, K, V], of one token
    """Change the state in place; returns the output [H, V]."""
    group = len(v) // len(k)
    q, k = (x.repeat_interleave(group, 0) for x in (_unit(q) * q.shape[-1] ** -0.5, _unit(k)))
    state *= g.exp()[:, None, None]
    update = beta[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
    state += k[:, :, None] * update[:, None]
    return torch.einsum("hkv,hk->hv", state, q)


def _gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:  # [1, T, H] each
    return (-A_log.float().exp() * torch.nn.functional.softplus(a + dt_bias))[None], b.sigmoid()[None]


def _prefill(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, cu_seqlens: Tensor, **more: Any
) -> tuple[Tensor, None]:
    out = torch.empty_like(value)
    for i, slot in enumerate(more["initial_state_indices"].tolist()):
        for t in range(int(cu_seqlens[i]), int(cu_seqlens[i + 1])):
            out[0, t] = _recur(initial_state[slot], *(x[0, t] for x in (query, key, value, g, beta)))
    return out, None


def _decode(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **more: Any) -> Tensor:
    g, beta = _gates(more["A_log"], a, b, more["dt_bias"])
    states, slots = more["initial_state_source"], more["initial_state_indices"].tolist()
    rows = [_recur(states[slot], *(x[0, t] for x in (q, k, v, g, beta))) for t, slot in enumerate(slots)]
    return torch.stack(rows)[:, None]


def _speculative(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **more: Any) -> Tensor:
    g, beta = _gates(more["A_log"], a, b, more["dt_bias"])
    states, slots, starts, out = (
        more["initial_state_source"],
        more["spec_state_indices"],
        more["cu_seqlens"],
        torch.empty_like(v),
    )
    for i, accepted in enumerate(more["num_accepted_tokens"].tolist()):
        state = states[slots[i, accepted - 1]].clone()
        for place, t in enumerate(range(int(starts[i]), int(starts[i + 1]))):
            out[t] = _recur(state, q[t], k[t], v[t], g[0, t], beta[0, t])
            states[slots[i, place]] = state
    return out


def compute_in_float32(patch: pytest.MonkeyPatch) -> None:
    """Replace the kernels in this process."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    patch.setattr(gdn_attention, "torch", _Float32Torch())
    patch.setattr(gdn_attention.ops, "fused_gdn_gating_cpu", _gates)
    patch.setattr(gdn_attention.ops, "chunk_gated_delta_rule_cpu", _prefill)
    patch.setattr(gdn_attention.ops, "fused_sigmoid_gating_delta_rule_update_cpu", _decode)
    patch.setattr(gdn_attention.ops, "fused_sigmoid_gating_delta_rule_update_spec_cpu", _speculative)
