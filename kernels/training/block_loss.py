"""Linear + loss over the vocabulary, one value a row, without the logits: forward and backward in one pass over the head.

Computes: reference.block_loss. Rows are returned unreduced, so position weights stay ordinary autograd on [N, K] numbers.
The head is frozen (it is the target's), so a row's gradient is its own times the row's weight, whatever that is. So g = dℓ/dh
[M, H] is made in the forward pass, and the backward pass is a product.
Moves: the head and the hidden states once for the logits and once for the gradient. Floor: the matmuls, 4·M·V·H FLOPs for
labels (logits, gradient) and 6·M·V·H for goals (the goal's logits as well), at the matmul rate. Peak memory is a tile of
scores, not [M, V]; see `block_loss_labels`, `block_loss_goal`.
Layout: hidden [M, H] and head [V, H] with unit stride in H; half-precision operands, float32 scores and sums.
Source: the gradient in the forward pass as in Liger's fused linear cross-entropy, arXiv 2410.10989, section 3.2; the losses as
in `reference`.
Why not Liger itself (0.8.5): its kernels need a GPU. Its chunks are of some M·H/V rows, 8 of the trainer's 240 at H = 4,096 and
a 152k vocabulary, and every chunk reads the whole head. One loss a row (`reduction="none"`) is computed again in the backward
pass. The linear KL requires the goal's probabilities [M, V].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from honed.kernels.training.block_loss_goal import fold_goal
from honed.kernels.training.block_loss_labels import fold_labels

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class BlockLoss(NamedTuple):
    """Result of `block_loss`."""

    losses: torch.Tensor  # [M], float32 (float64 of float64); has the gradient
    top: torch.Tensor  # [M] int64, the most likely token


def block_loss(
    hidden: torch.Tensor,  # [M, H]
    head: torch.Tensor,  # [V, H]
    *,
    labels: torch.Tensor | None = None,  # [M] int64
    goal: torch.Tensor | None = None,  # [M, H'] another model's hidden states at the same rows
    goal_head: torch.Tensor | None = None,  # [V, H'], by default `head`
) -> BlockLoss:
    """Compute the loss of each row of hidden states behind a frozen head.

    For labels it is −log q(label), for a goal KL(p || q) to the distribution p = softmax(goal @ goal_headᵀ). No gradient flows
    to `goal`.

    Raises:
        ValueError: shapes don't fit, there are not labels or a goal alone, or the head requires a gradient.
    """
    _check(hidden, head, labels, goal, goal_head)
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype == torch.float32:
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    with_gradient = hidden.requires_grad and torch.is_grad_enabled()
    # A dispatch mode sees our custom operator as one operation, however long it takes. On a CPU, where the trainer yields
    # before every operation (`recalib.process.yield_points`), it must see the operations inside.
    is_seen = hidden.device.type == "cpu" and not torch.compiler.is_compiling()
    if labels is not None:
        compute = _label_loss if is_seen else label_loss
        losses, top, _ = compute(hidden, head.detach(), labels, with_gradient)
    else:
        assert goal is not None
        goal_head = head if goal_head is None else goal_head
        compute_goal = _goal_loss if is_seen else goal_loss
        losses, top, _ = compute_goal(hidden, head.detach(), goal.detach(), goal_head.detach(), with_gradient)
    return BlockLoss(losses, top)


def top_tokens(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:  # [..., H] -> [...]
    """Return each row's most likely token, without the logits and without gradient."""
    rows = hidden.detach().flatten(0, -2)
    made = block_loss(rows, head.detach(), labels=torch.zeros(len(rows), dtype=torch.int64, device=rows.device))
    return made.top.view(hidden.shape[:-1])


@torch.library.custom_op("honed::label_loss", mutates_args=())
def label_loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, with_gradient: bool) -> Three:
    """Losses, top tokens, gradients [M, H] (or none); call it through `block_loss`."""
    with torch.autocast(hidden.device.type, enabled=False):
        return fold_labels(hidden, head, labels, with_gradient, is_triton=hidden.is_cuda)


@torch.library.custom_op("honed::goal_loss", mutates_args=())
def goal_loss(
    hidden: torch.Tensor, head: torch.Tensor, goal: torch.Tensor, goal_head: torch.Tensor, with_gradient: bool
) -> Three:
    """Losses, top tokens, gradients [M, H] (or none); call it through `block_loss`."""
    with torch.autocast(hidden.device.type, enabled=False):
        return fold_goal(hidden, head, goal.to(hidden.dtype), goal_head, with_gradient, is_triton=hidden.is_cuda)


def _fake(hidden: torch.Tensor, with_gradient: bool) -> Three:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    losses, top = (hidden.new_empty(len(hidden), dtype=dtype) for dtype in (wide, torch.int64))
    return losses, top, hidden.new_empty(hidden.shape if with_gradient else (0, hidden.shape[1]))


@label_loss.register_fake
def _(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, with_gradient: bool) -> Three:
    return _fake(hidden, with_gradient)


@goal_loss.register_fake
def _(hidden: torch.Tensor, head: torch.Tensor, goal: torch.Tensor, goal_head: torch.Tensor, with_gradient: bool) -> Three:
    return _fake(hidden, with_gradient)


def _keep_gradient(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: Three) -> None:
    ctx.save_for_backward(output[2])
    ctx.num_inputs = len(inputs)  # type: ignore[attr-defined]


def _scale_gradient(ctx: torch.autograd.function.FunctionCtx, by_loss: torch.Tensor, *_: object) -> tuple[object, ...]:
    return (_scaled(ctx, by_loss), *(None,) * (ctx.num_inputs - 1))  # type: ignore[attr-defined]


def _scaled(ctx: torch.autograd.function.FunctionCtx, by_loss: torch.Tensor) -> torch.Tensor:
    (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
    scaled: torch.Tensor = (gradient * by_loss[:, None]).to(gradient.dtype)
    return scaled


label_loss.register_autograd(_scale_gradient, setup_context=_keep_gradient)
goal_loss.register_autograd(_scale_gradient, setup_context=_keep_gradient)


class _Seen(torch.autograd.Function):
    """The same without an operator around it."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, fold: Callable[[torch.Tensor], Three], hidden: torch.Tensor) -> Three:
        with torch.autocast(hidden.device.type, enabled=False):
            made = fold(hidden)
        ctx.save_for_backward(made[2])
        ctx.mark_non_differentiable(*made[1:])
        return made

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, by_loss: torch.Tensor, *_: object) -> tuple[None, torch.Tensor]:
        return None, _scaled(ctx, by_loss)


def _label_loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, with_gradient: bool) -> Three:
    def fold(rows: torch.Tensor) -> Three:
        return fold_labels(rows, head, labels, with_gradient, is_triton=False)

    made: Three = _Seen.apply(fold, hidden)  # type: ignore[no-untyped-call]
    return made


def _goal_loss(
    hidden: torch.Tensor, head: torch.Tensor, goal: torch.Tensor, goal_head: torch.Tensor, with_gradient: bool
) -> Three:
    def fold(rows: torch.Tensor) -> Three:
        return fold_goal(rows, head, goal.to(rows.dtype), goal_head, with_gradient, is_triton=False)

    made: Three = _Seen.apply(fold, hidden)  # type: ignore[no-untyped-call]
    return made


def _check(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor | None,
    goal: torch.Tensor | None,
    goal_head: torch.Tensor | None,
) -> None:
    if (labels is None) == (goal is None):
        raise ValueError("block_loss needs either labels or a goal")
    if hidden.dim() != 2 or head.dim() != 2 or hidden.shape[1] != head.shape[1] or not len(head):
        raise ValueError(f"block_loss: hidden {list(hidden.shape)} and head {list(head.shape)} must be [M, H] and [V, H]")
    if head.requires_grad:
        raise ValueError("block_loss gives no gradient for the head: it is the target's; pass head.detach()")
    if goal is None:
        if labels is None or labels.shape != hidden.shape[:1]:
            raise ValueError(f"block_loss needs labels [{len(hidden)}], one for each row of hidden")
        return
    if goal.dim() != 2 or len(goal) != len(hidden):
        raise ValueError(f"block_loss needs a goal [{len(hidden)}, H'], a hidden state of each row")
    wanted = (len(head), goal.shape[1])
    given = (head if goal_head is None else goal_head).shape
    if given != wanted:
        raise ValueError(f"block_loss: the goal's head is {list(given)}, must be {list(wanted)}")
