"""KL to another model's distribution, a few rows at a time: the other half of `block_loss`.

Computes: with z = head·h and t = goal_head·g, p = softmax(t), q = softmax(z): KL = Σ p (log p − log q), dKL/dz = q − p. Then
dℓ/dh = dℓ/dz · head. The difference is taken before it is rounded. Folding q and p separately, as for labels, would cost a
fourth matmul and lose the small differences of a drafter that is nearly right.
Moves: both heads once for the scores and one of them again for the gradient, per chunk of rows. A score of each side is written
once and read twice, a gradient written and read once. Floor: 6·M·V·H FLOPs. Peak: BUFFER_BYTES of scores, a
quarter of that for gradients on a GPU; one row at least.
Layout: scores and goal scores [rows, V] float32, contiguous, gradients [rows, V] in the hidden states' dtype; one program of
the kernel takes one row.
Its time and memory on an H200 are in docs/gpu.md.
Source: the formulas in `reference`; chunks of rows as in Liger's linear losses, arXiv 2410.10989.
"""

from __future__ import annotations

import torch

from honed.kernels.training.block_loss_labels import first_best
from honed.kernels.training.sizes import BUFFER_BYTES, CACHED_BYTES
from honed.kernels.training.wide_matmul import add_weighted, even_size, scores_into, slices, wide_dtype

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _distance_kernel(  # type: ignore[no-untyped-def]
        scores_ptr,
        goal_scores_ptr,
        gradient_ptr,
        losses_ptr,
        top_ptr,
        vocabulary,
        WITH_GRADIENT: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        i_m = tl.program_id(0).to(tl.int64)
        p_z, p_t = scores_ptr + i_m * vocabulary, goal_scores_ptr + i_m * vocabulary
        low = tl.full((), float("-inf"), dtype=scores_ptr.dtype.element_ty)
        zero = tl.full((), 0.0, dtype=scores_ptr.dtype.element_ty)
        peak_z, peak_t, sum_z, sum_t, cross = low, low, zero, zero, zero
        top = tl.full((), 0, dtype=tl.int64)
        for i_v in range(0, vocabulary, BLOCK):
            o_v = i_v + tl.arange(0, BLOCK)
            m_v = o_v < vocabulary
            b_z = tl.load(p_z + o_v, mask=m_v, other=float("-inf"))
            b_t = tl.load(p_t + o_v, mask=m_v, other=float("-inf"))
            best_z, where = tl.max(tl.where(b_z == b_z, b_z, float("-inf")), axis=0, return_indices=True)
            if best_z > peak_z:
                top = where.to(tl.int64) + i_v
            new_z, new_t = tl.maximum(peak_z, best_z), tl.maximum(peak_t, tl.max(b_t, axis=0))
            b_p = tl.exp(b_t - new_t)
            rescale = tl.exp(peak_t - new_t)
            sum_z = sum_z * tl.exp(peak_z - new_z) + tl.sum(tl.exp(b_z - new_z), axis=0)
            sum_t = sum_t * rescale + tl.sum(b_p, axis=0)
            cross = cross * rescale + tl.sum(tl.where(m_v, b_p * (b_t - b_z), 0.0), axis=0)
            peak_z, peak_t = new_z, new_t
        rest_z, rest_t = tl.log(sum_z), tl.log(sum_t)
        log_z, log_t = peak_z + rest_z, peak_t + rest_t
        tl.store(top_ptr + i_m, top)

        loss = cross / sum_t + (peak_z - peak_t) + (rest_z - rest_t)
        tl.store(losses_ptr + i_m, loss)
        if WITH_GRADIENT:
            for i_v in range(0, vocabulary, BLOCK):
                o_v = i_v + tl.arange(0, BLOCK)
                m_v = o_v < vocabulary
                b_q = tl.exp(tl.load(p_z + o_v, mask=m_v, other=float("-inf")) - log_z)
                b_p = tl.exp(tl.load(p_t + o_v, mask=m_v, other=float("-inf")) - log_t)
                tl.store(gradient_ptr + i_m * vocabulary + o_v, (b_q - b_p).to(gradient_ptr.dtype.element_ty), mask=m_v)


def fold_goal(
    hidden: torch.Tensor,  # [M, H]
    head: torch.Tensor,  # [V, H]
    goal: torch.Tensor,  # [M, H']
    goal_head: torch.Tensor,  # [V, H']
    with_gradient: bool,
    *,
    is_triton: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # 2 x [M], [M, H] or [0, H]
    """Losses, top tokens, gradients."""
    if is_triton and triton is None:
        raise RuntimeError("Triton is not installed: pip install triton")
    wide, (vocabulary, width) = wide_dtype(hidden), head.shape
    losses, top = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for dtype in (wide, torch.int64))
    gradients = torch.empty_like(hidden if with_gradient else hidden[:0], memory_format=torch.contiguous_format)
    room = BUFFER_BYTES.get(hidden.device.type, BUFFER_BYTES["cpu"])
    step = even_size(len(hidden), max(1, room // (2 * vocabulary * wide.itemsize)))
    buffers = torch.empty((2, step, vocabulary), dtype=wide, device=hidden.device)
    narrow = torch.empty((step, vocabulary), dtype=hidden.dtype, device=hidden.device) if is_triton and with_gradient else None
    for part in slices(len(hidden), step):
        rows = part.stop - part.start
        scores, goal_scores = buffers[0, :rows], buffers[1, :rows]
        scores_into(scores, hidden[part], head)
        scores_into(goal_scores, goal[part], goal_head)
        if is_triton:
            by_score = scores if narrow is None else narrow[:rows]
            _distance_kernel[(rows,)](
                scores,
                goal_scores,
                by_score,
                losses[part],
                top[part],
                vocabulary,
                WITH_GRADIENT=with_gradient,
                BLOCK=min(4096, triton.next_power_of_2(vocabulary)),
                num_warps=8,
            )
        else:
            by_score = scores
            for some in slices(rows, max(1, CACHED_BYTES // (vocabulary * wide.itemsize))):
                here = slice(part.start + some.start, part.start + some.stop)
                losses[here], top[here] = _distance(scores[some], goal_scores[some])
        if with_gradient:
            sums = torch.zeros((rows, width), dtype=wide, device=hidden.device)
            add_weighted(sums, by_score, head)
            gradients[part] = sums
    return losses, top, gradients


def _distance(scores: torch.Tensor, goal_scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # 2 x [m]
    """Losses and top tokens; dKL/dz overwrites the scores, and the goal's scores are destroyed."""
    peak_z, top = first_best(scores)
    peak_t = goal_scores.amax(-1)
    z, t = scores.sub_(peak_z[:, None]), goal_scores.sub_(peak_t[:, None])
    p = t.exp()
    cross = _row_dot(p, t.sub_(z))
    q = z.exp_()
    sum_p, sum_q = p.sum(-1), q.sum(-1)
    kl = cross / sum_p + sum_q.log() - sum_p.log()
    q.div_(sum_q[:, None])
    p.div_(sum_p[:, None])
    q.sub_(p)
    return kl, top


def _row_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # 2 x [m, V] -> [m]
    """Σ_v a·b without a third [m, V]."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]
