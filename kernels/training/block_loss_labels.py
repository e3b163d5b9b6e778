"""Cross-entropy's half of `block_loss`: the gradient is attention over the vocabulary, so it is folded as attention is.

Computes: ℓ = logsumexp(z) − z[label], z = head·h, and dℓ/dh = Σ_v softmax(z)_v · head[v] − head[label]. The sum is attention of
query h over keys and values `head`. So one pass over tiles of the vocabulary with a running maximum computes both (online
softmax): logits of a tile, weights exp(z − reference), gradient += weights · tile.
Moves: head twice and hidden once per ROWS rows. A tile of scores is written, read and written again, 12 bytes a score with
bfloat16 weights. The default sizes (ROWS · TILE · 6 bytes = 48 MiB) are chosen to keep it in L2. Floor: 4·M·V·H FLOPs. Peak:
ROWS · TILE scores and weights, and ROWS · H sums, whatever V is.
Layout: scores [rows, TILE] float32 and gradient [rows, H] float32, contiguous; one program of the kernel folds one row's tile.
The row's reference is renewed only when its maximum has grown by more than SLACK. Then the program rescales that row's gradient
itself. So the rare event costs a pass over [H], without a wait for the host.
Its time and memory on an H200 are in docs/gpu.md.
Source: online softmax, arXiv 1805.02867, as in FlashAttention, arXiv 2205.14135; gradient in the forward pass, 2410.10989.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from honed.kernels.training.sizes import ROWS, TILE
from honed.kernels.training.wide_matmul import add_weighted, even_size, operand_dtype, scores_into, slices, wide_dtype

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

GROUP = 128
SLACK = 8.0
"""exp(8) leaves float16 weights room on both sides; bfloat16 and float32 would allow far more."""

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _fold_tile_kernel(  # type: ignore[no-untyped-def]
        scores_ptr,
        weights_ptr,
        gradient_ptr,
        labels_ptr,
        reference_ptr,
        peak_ptr,
        total_ptr,
        top_ptr,
        label_score_ptr,
        start,
        width,
        hidden,
        slack,
        WITH_GRADIENT: tl.constexpr,
        TILE: tl.constexpr,
        BLOCK_H: tl.constexpr,
    ):
        i_m = tl.program_id(0).to(tl.int64)
        o_v = tl.arange(0, TILE)
        m_v = o_v < width
        b_z = tl.load(scores_ptr + i_m * width + o_v, mask=m_v, other=float("-inf"))
        best, where = tl.max(tl.where(b_z == b_z, b_z, float("-inf")), axis=0, return_indices=True)
        if best > tl.load(peak_ptr + i_m):  # the first of equals, as everywhere
            tl.store(peak_ptr + i_m, best)
            tl.store(top_ptr + i_m, where.to(tl.int64) + start)
        label = tl.load(labels_ptr + i_m) - start
        if (label >= 0) & (label < width):
            tl.store(label_score_ptr + i_m, tl.sum(tl.where(o_v == label, b_z, 0.0), axis=0))
        reference = tl.load(reference_ptr + i_m)
        total = tl.load(total_ptr + i_m)
        if best > reference + slack:
            rescale = tl.exp(reference - best)
            total *= rescale
            reference = best
            tl.store(reference_ptr + i_m, reference)
            if WITH_GRADIENT:
                for i_h in range(0, hidden, BLOCK_H):
                    o_h = i_h + tl.arange(0, BLOCK_H)
                    p_g = gradient_ptr + i_m * hidden + o_h
                    b_g = tl.load(p_g, mask=o_h < hidden, other=0.0)
                    tl.store(p_g, b_g * rescale, mask=o_h < hidden)
        b_w = tl.exp(b_z - reference)
        tl.store(total_ptr + i_m, total + tl.sum(b_w, axis=0))
        if WITH_GRADIENT:
            tl.store(weights_ptr + i_m * width + o_v, b_w.to(weights_ptr.dtype.element_ty), mask=m_v)


@dataclass
class _Rows:
    """State of some rows after the tiles so far."""

    labels: torch.Tensor  # [m] int64
    reference: torch.Tensor  # [m] the base of the weights and their sums
    peak: torch.Tensor  # [m]
    total: torch.Tensor  # [m] Σ exp(z − reference)
    top: torch.Tensor  # [m] int64
    label_score: torch.Tensor  # [m]
    gradient: torch.Tensor  # [m, H] Σ exp(z − reference) · head

    @classmethod
    def begin(cls, labels: torch.Tensor, gradient: torch.Tensor) -> _Rows:
        def filled(value: float) -> torch.Tensor:
            return torch.full(labels.shape, value, dtype=gradient.dtype, device=gradient.device)

        low = float("-inf")
        return cls(labels, filled(low), filled(low), filled(0.0), torch.zeros_like(labels), filled(low), gradient)


def fold_labels(
    hidden: torch.Tensor,  # [M, H]
    head: torch.Tensor,  # [V, H]
    labels: torch.Tensor,  # [M] int64
    with_gradient: bool,
    *,
    is_triton: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # 2 x [M], [M, H] or [0, H]
    """Losses, top tokens, gradients.

    Raises:
        IndexError: a label is outside the vocabulary; on a GPU an assertion fails there.
    """
    if is_triton and triton is None:
        raise RuntimeError("Triton is not installed: pip install triton")
    wide, labels = wide_dtype(hidden), labels.long()
    labelled = F.embedding(labels, head)  # [M, H]; also checks the labels
    losses, top = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for dtype in (wide, torch.int64))
    gradients = torch.empty_like(hidden if with_gradient else hidden[:0], memory_format=torch.contiguous_format)
    step = even_size(len(hidden), ROWS)
    buffer = torch.empty(step * min(TILE, len(head)), dtype=wide, device=hidden.device)
    narrow = torch.empty_like(buffer, dtype=hidden.dtype) if is_triton and with_gradient else buffer
    for part in slices(len(hidden), step):
        some = hidden[part]
        sums = torch.zeros(some.shape if with_gradient else (0, some.shape[1]), dtype=wide, device=hidden.device)
        rows = _Rows.begin(labels[part].contiguous(), sums)
        for tile in slices(len(head), TILE):
            shape = (len(some), tile.stop - tile.start)
            scores = buffer[: shape[0] * shape[1]].view(shape)
            weights = narrow[: shape[0] * shape[1]].view(shape)
            right = head[tile].to(operand_dtype(hidden))
            scores_into(scores, some, right)
            if is_triton:
                _fold_by_kernel(rows, scores, weights, tile.start, with_gradient)
            else:
                _fold(rows, scores, tile.start, with_gradient)
            if with_gradient:
                add_weighted(rows.gradient, weights, right)
        losses[part], top[part] = rows.reference + rows.total.log() - rows.label_score, rows.top
        if with_gradient:
            gradients[part] = rows.gradient.div_(rows.total[:, None]).sub_(labelled[part])
    return losses, top, gradients


def _fold(rows: _Rows, scores: torch.Tensor, start: int, with_gradient: bool) -> None:
    """Turn the scores into weights in place; the reference is the maximum so far."""
    best, where = first_best(scores)
    rows.top = torch.where(best > rows.peak, where + start, rows.top)
    local = rows.labels - start
    is_here = (local >= 0) & (local < scores.shape[1])
    at_label = scores.gather(1, local.clamp(0, scores.shape[1] - 1)[:, None])[:, 0]
    rows.label_score = torch.where(is_here, at_label, rows.label_score)
    rows.peak = torch.maximum(rows.peak, best)
    rescale = torch.exp(rows.reference - rows.peak)
    rows.reference = rows.peak
    rows.total = rows.total * rescale + scores.sub_(rows.reference[:, None]).exp_().sum(-1)
    if with_gradient and start:
        rows.gradient.mul_(rescale[:, None])


def first_best(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [m, V] -> [m], [m]
    """Maximum of each row and its first place, in two steps: a maximum alone is ten times as fast as one with its place."""
    if scores.shape[1] % GROUP:
        return scores.max(dim=-1)
    groups = scores.view(len(scores), -1, GROUP)
    best, group = groups.amax(-1).max(dim=-1)
    return best, group * GROUP + groups[torch.arange(len(scores)), group].argmax(-1)


def _fold_by_kernel(rows: _Rows, scores: torch.Tensor, weights: torch.Tensor, start: int, with_gradient: bool) -> None:
    hidden = rows.gradient.shape[1]
    _fold_tile_kernel[(len(scores),)](
        scores,
        weights,
        rows.gradient,
        rows.labels,
        rows.reference,
        rows.peak,
        rows.total,
        rows.top,
        rows.label_score,
        start,
        scores.shape[1],
        hidden,
        SLACK,
        WITH_GRADIENT=with_gradient,
        TILE=triton.next_power_of_2(scores.shape[1]),
        BLOCK_H=min(2048, triton.next_power_of_2(max(1, hidden))),
        num_warps=8,
    )
