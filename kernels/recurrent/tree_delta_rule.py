"""Gated DeltaNet along draft trees: outputs of all nodes from one state a request, and the state after the accepted path.

Computes: reference.tree_delta_rule and reference.commit. A program has one head, and a part of its values' width. It reads the
state after the anchor once, and multiplies it with all rows' queries and keys. What nodes add to each other is a triangular
system of the tree's rows, which is solved row by row in registers. So no node's state is written: vLLM's own kernel for chains
writes one of V·K numbers for each row.
Moves, for 32 rows, 32 heads and K = V = 128 in float32: 2.1 MB of state a request and layer, once to read, and twice more for
the commit; 1.2 MB of updates. One state a row would be 67 MB to write. Floor: the state at copy bandwidth.
Layout: q, k [R, Q, K], v and out [R, H, V], gates [R, H]; made contiguous. K and V 16 … 256, powers of two. States of any
strides. At most 64 rows a request.
No GPU has run it. Source: arXiv 2406.06484 (the triangular system of a chunk), 2412.06464 (its gates).
"""

from __future__ import annotations

from typing import Any

import torch

from honed.kernels.recurrent import reference
from honed.kernels.recurrent.reference import TreeUpdates

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MAX_ROWS = 64
"""More would need more shared memory than small cards have (99 KiB)."""
WIDTHS = (16, 32, 64, 128, 256)

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _load_unit(x_ptr, o_r, m_r, stride, K: tl.constexpr):  # type: ignore[no-untyped-def]
        """Rows [M, K] at length 1."""
        o_k = tl.arange(0, K)
        b_x = tl.load(x_ptr + o_r[:, None] * stride + o_k[None, :], mask=m_r[:, None], other=0.0).to(tl.float32)
        return b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=1) + 1e-6)[:, None]

    @triton.jit(do_not_specialize=["scale"])  # type: ignore[untyped-decorator]
    def _tree_delta_rule_kernel(  # type: ignore[no-untyped-def]
        q_ptr,
        k_ptr,
        v_ptr,
        decay_ptr,
        strength_ptr,
        states_ptr,
        root_ptr,
        starts_ptr,
        masks_ptr,
        out_ptr,
        keys_ptr,
        values_ptr,
        decays_ptr,
        scale,
        stride_s,
        stride_sh,
        stride_sv,
        stride_sk,
        stride_mb,
        stride_mr,
        H: tl.constexpr,
        GROUP: tl.constexpr,
        K: tl.constexpr,
        V: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_V: tl.constexpr,
    ):
        i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        start = tl.load(starts_ptr + i_b).to(tl.int64)
        count = (tl.load(starts_ptr + i_b + 1) - start).to(tl.int32)
        o_i, o_j, o_k = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_R), tl.arange(0, K)
        o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
        m_i = o_i < count
        o_r = start + o_i
        is_node = m_i & (o_i > 0)  # the state already holds what the anchor adds
        of_key = (i_h // GROUP) * K
        b_k = _load_unit(k_ptr + of_key, o_r, m_i, (H // GROUP) * K, K)
        b_q = _load_unit(q_ptr + of_key, o_r, m_i, (H // GROUP) * K, K) * scale
        b_beta = tl.load(strength_ptr + o_r * H + i_h, mask=is_node, other=0.0).to(tl.float32)
        p_decay = decay_ptr + (start + o_j) * H + i_h
        b_g = tl.load(p_decay, mask=(o_j > 0) & (o_j < count), other=0.0).to(tl.float32)

        p_words = masks_ptr + i_b * stride_mb + o_i[:, None] * stride_mr + (o_j // 32)[None, :]
        m_ij = m_i[:, None] & (o_j < count)[None, :]
        b_words = tl.load(p_words, mask=m_ij, other=0)
        goes_on = ((b_words >> (o_j % 32)[None, :]) & 1) != 0
        b_decay = tl.sum(tl.where(goes_on, b_g[None, :], 0.0), axis=1)  # [I]
        b_other = tl.sum(tl.where(o_i[:, None] == o_j[None, :], b_decay[:, None], 0.0), axis=0)  # the same as [J]
        b_kept = tl.where(goes_on, tl.exp(tl.minimum(b_decay[:, None] - b_other[None, :], 0.0)), 0.0)

        root = tl.load(root_ptr + i_b).to(tl.int64)
        p_s = states_ptr + root * stride_s + i_h * stride_sh + o_v[None, :] * stride_sv + o_k[:, None] * stride_sk
        b_s = tl.load(p_s).to(tl.float32)  # [K, V]
        b_from_root = tl.exp(b_decay)[:, None]
        o_rv = (o_r * H + i_h)[:, None] * V + o_v[None, :]
        b_v = tl.load(v_ptr + o_rv, mask=is_node[:, None], other=0.0).to(tl.float32)
        b_u = b_beta[:, None] * (b_v - b_from_root * tl.dot(b_k, b_s, input_precision="ieee"))  # [I, V]
        b_kk = tl.dot(b_k, tl.trans(b_k), input_precision="ieee")
        b_system = tl.where(o_i[:, None] > o_j[None, :], b_beta[:, None] * b_kept * b_kk, 0.0)
        for i in range(2, count):  # node 0 goes on from the anchor alone, which adds nothing
            b_row = tl.sum(tl.where(o_i[:, None] == i, b_system, 0.0), axis=0)  # [J]
            b_less = tl.sum(b_row[:, None] * b_u, axis=0)  # [V]
            b_u = tl.where(o_i[:, None] == i, b_u - b_less[None, :], b_u)
        b_qk = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * b_kept
        b_out = b_from_root * tl.dot(b_q, b_s, input_precision="ieee") + tl.dot(b_qk, b_u, input_precision="ieee")
        tl.store(out_ptr + o_rv, b_out, mask=m_i[:, None])
        tl.store(values_ptr + o_rv, b_u, mask=m_i[:, None])
        if i_v == 0:
            tl.store(decays_ptr + o_r * H + i_h, b_decay, mask=m_i)
            if i_h % GROUP == 0:
                p_keys = keys_ptr + of_key + o_r[:, None] * ((H // GROUP) * K) + o_k[None, :]
                tl.store(p_keys, b_k, mask=m_i[:, None])

    @triton.jit  # type: ignore[untyped-decorator]
    def _commit_kernel(  # type: ignore[no-untyped-def]
        states_ptr,
        root_ptr,
        target_ptr,
        keys_ptr,
        values_ptr,
        decays_ptr,
        starts_ptr,
        path_ptr,
        accepted_ptr,
        stride_s,
        stride_sh,
        stride_sv,
        stride_sk,
        P,
        H: tl.constexpr,
        GROUP: tl.constexpr,
        K: tl.constexpr,
        V: tl.constexpr,
        BLOCK_P: tl.constexpr,
        BLOCK_V: tl.constexpr,
    ):
        i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        accepted = tl.load(accepted_ptr + i_b).to(tl.int32)
        if accepted == 0:  # the target is the root
            return
        o_p, o_k = tl.arange(0, BLOCK_P), tl.arange(0, K)
        o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
        m_p = (o_p < accepted) & (o_p < P)
        o_r = tl.load(starts_ptr + i_b).to(tl.int64) + tl.load(path_ptr + i_b * P + o_p, mask=m_p, other=0).to(tl.int64)
        b_decay = tl.load(decays_ptr + o_r * H + i_h, mask=m_p, other=0.0)
        whole = tl.sum(tl.where(o_p == accepted - 1, b_decay, 0.0), axis=0)
        b_kept = tl.where(m_p, tl.exp(tl.minimum(whole - b_decay, 0.0)), 0.0)
        p_u = values_ptr + (o_r * H + i_h)[None, :] * V + o_v[:, None]
        b_u = tl.load(p_u, mask=m_p[None, :], other=0.0) * b_kept[None, :]  # [V, P]
        p_k = keys_ptr + o_r[:, None] * ((H // GROUP) * K) + (i_h // GROUP) * K + o_k[None, :]
        b_k = tl.load(p_k, mask=m_p[:, None], other=0.0)
        o_s = i_h * stride_sh + o_v[:, None] * stride_sv + o_k[None, :] * stride_sk
        b_s = tl.load(states_ptr + tl.load(root_ptr + i_b).to(tl.int64) * stride_s + o_s).to(tl.float32)
        b_s = tl.exp(whole) * b_s + tl.dot(b_u, b_k, input_precision="ieee")
        p_s = states_ptr + tl.load(target_ptr + i_b).to(tl.int64) * stride_s + o_s
        tl.store(p_s, b_s.to(p_s.dtype.element_ty))


def tree_delta_rule(
    q: torch.Tensor,  # [R, Q, K]
    k: torch.Tensor,  # [R, Q, K]
    v: torch.Tensor,  # [R, H, V]
    log_decay: torch.Tensor,  # [R, H]
    strength: torch.Tensor,  # [R, H]
    states: torch.Tensor,  # [S, H, V, K]
    root: torch.Tensor,  # [B]
    row_starts: torch.Tensor,  # [B + 1]
    row_masks: torch.Tensor,  # [B, ≥ max_rows, W] int32
    max_rows: int,
) -> tuple[torch.Tensor, TreeUpdates]:  # [R, H, V] float32
    """Outputs of all rows, and what they add to their request's state; Triton on a GPU, its plain twin elsewhere.

    `reference.tree_delta_rule` says what the arguments are. All R rows belong to requests.

    Raises:
        ValueError: shapes don't fit each other, or the kernel has no room for them.
    """
    rows, heads, width = v.shape
    is_fit = q.shape == k.shape and q.shape[0] == rows and heads % q.shape[1] == 0
    is_fit = is_fit and log_decay.shape == strength.shape == (rows, heads) and states.shape[1:] == (heads, width, q.shape[2])
    if not is_fit or len(root) != len(row_starts) - 1 or len(row_masks) != len(root) or row_masks.shape[1] < max_rows:
        raise ValueError(
            f"tree_delta_rule: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, gates {list(log_decay.shape)} and "
            f"{list(strength.shape)}, states {list(states.shape)}, {len(root)} roots, {len(row_starts)} starts and masks "
            f"{list(row_masks.shape)} of {max_rows} rows don't fit"
        )
    if not v.is_cuda:
        return reference.tree_delta_rule(q, k, v, log_decay, strength, states, root, row_starts, row_masks, max_rows)
    if problem := misfit(q.shape[2], width, max_rows):
        raise ValueError(f"tree_delta_rule: {problem}")
    return launch(q, k, v, log_decay, strength, states, root, row_starts, row_masks, max_rows)


def misfit(key_width: int, value_width: int, max_rows: int) -> str:
    """Why the kernel doesn't take such heads or trees; empty if it does."""
    if key_width not in WIDTHS or value_width not in WIDTHS:
        return f"heads are {key_width} and {value_width} wide, and it takes {', '.join(map(str, WIDTHS))}"
    return f"{max_rows} rows, and it takes {MAX_ROWS}" if max_rows > MAX_ROWS else ""


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    strength: torch.Tensor,
    states: torch.Tensor,
    root: torch.Tensor,
    row_starts: torch.Tensor,
    row_masks: torch.Tensor,
    max_rows: int,
) -> tuple[torch.Tensor, TreeUpdates]:
    """Run the Triton kernel itself (on a GPU, or under Triton's interpreter); arguments as `tree_delta_rule`."""
    if triton is None:
        raise RuntimeError("Triton is not installed: pip install triton")
    (rows, heads, width), (_, key_heads, key_width) = v.shape, k.shape
    made = dict[str, Any](dtype=torch.float32, device=v.device)
    out, values, decays = torch.empty(v.shape, **made), torch.empty(v.shape, **made), torch.empty((rows, heads), **made)
    keys = torch.empty(k.shape, **made)
    block_r = max(16, triton.next_power_of_2(max_rows))
    block_v = min(width, 64 if block_r <= 32 else 32)
    _tree_delta_rule_kernel[(width // block_v, heads, len(root))](
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        log_decay.contiguous(),
        strength.contiguous(),
        states,
        root.contiguous(),
        row_starts.contiguous(),
        row_masks,
        out,
        keys,
        values,
        decays,
        key_width**-0.5,
        *states.stride(),
        *row_masks.stride()[:2],
        H=heads,
        GROUP=heads // key_heads,
        K=key_width,
        V=width,
        BLOCK_R=block_r,
        BLOCK_V=block_v,
        num_warps=4 if block_r <= 32 else 8,
    )
    return out, TreeUpdates(keys, values, decays)


def commit(
    states: torch.Tensor,  # [S, H, V, K]
    root: torch.Tensor,  # [B]
    target: torch.Tensor,  # [B]
    updates: TreeUpdates,
    row_starts: torch.Tensor,  # [B + 1]
    path: torch.Tensor,  # [B, P]
    num_accepted: torch.Tensor,  # [B]
) -> None:
    """Write the state after each request's accepted path; Triton on a GPU, its plain twin elsewhere.

    `reference.commit` says what the arguments are.
    """
    if states.is_cuda:
        launch_commit(states, root, target, updates, row_starts, path, num_accepted)
    else:
        reference.commit(states, root, target, updates, row_starts, path, num_accepted)


def launch_commit(
    states: torch.Tensor,
    root: torch.Tensor,
    target: torch.Tensor,
    updates: TreeUpdates,
    row_starts: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
) -> None:
    """Run the Triton kernel itself (on a GPU, or under Triton's interpreter); arguments as `commit`."""
    if triton is None:
        raise RuntimeError("Triton is not installed: pip install triton")
    heads, width, key_width = states.shape[1:]
    block_v = min(width, 64)
    _commit_kernel[(width // block_v, heads, len(root))](
        states,
        root.contiguous(),
        target.contiguous(),
        *updates,
        row_starts.contiguous(),
        path.contiguous(),
        num_accepted.contiguous(),
        *states.stride(),
        path.shape[1],
        H=heads,
        GROUP=heads // updates.keys.shape[1],
        K=key_width,
        V=width,
        BLOCK_P=max(16, triton.next_power_of_2(path.shape[1])),
        BLOCK_V=block_v,
        num_warps=4,
    )
