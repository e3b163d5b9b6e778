"""Cases of the training ops: `block_loss` and `anchor_attention`, forward and backward."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernels.case import Case, Goal, Run, Work
from honed.kernels.training import reference
from honed.kernels.training.anchor_attention import Visible, anchor_attention
from honed.kernels.training.block_loss import block_loss

QWEN_VOCABULARY = 151_936
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}

# Letters as in honed.kernels.training.reference.


def loss_work(m: int, h: int, v: int, kind: str, device: torch.device) -> Work:
    """Loss of M rows with weights, and the gradient of the hidden states."""
    dtype = DTYPE[device.type]
    torch.manual_seed(0)
    hidden = torch.randn(m, h, device=device, dtype=dtype).requires_grad_()
    head = (torch.randn(v, h, device=device) * h**-0.5).to(dtype)
    goal = torch.randn(m, h, device=device, dtype=dtype)
    labels = torch.randint(v, (m,), device=device)
    weights = torch.rand(m, device=device)
    target: dict[str, Any] = {"labels": labels} if kind == "ce" else {"goal": goal}
    scores, gradient = torch.empty(m, v, device=device, dtype=dtype), torch.empty(m, h, device=device, dtype=dtype)

    def ours() -> object:
        return torch.autograd.grad((block_loss(hidden, head, **target).losses * weights).sum(), hidden)

    def naive() -> torch.Tensor:
        return (reference.block_loss(hidden, head, **target)[0] * weights).sum()

    def matmuls() -> None:
        torch.mm(hidden.detach(), head.T, out=scores)
        if kind != "ce":
            torch.mm(goal, head.T, out=scores)
        torch.mm(scores, head, out=gradient)

    alternatives: dict[str, Run] = {"full logits": lambda: torch.autograd.grad(naive(), hidden)}
    if device.type == "cuda":
        compiled = torch.compile(naive)
        alternatives["full logits, compiled"] = lambda: torch.autograd.grad(compiled(), hidden)
        alternatives |= liger(hidden, head, labels) if kind == "ce" else {}
    return Work(
        ours,
        bytes_moved=2 * (head.nbytes + hidden.nbytes),
        flops=(4 if kind == "ce" else 6) * m * v * h,
        alternatives=alternatives,
        yardsticks={"matmuls alone": matmuls},
        has_peak=True,
    )


def liger(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> dict[str, Run]:
    """Run Liger's fused linear cross-entropy, if installed: the plain mean, since it supports no row weights."""
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return {"Liger": lambda: torch.autograd.grad(liger_fused_linear_cross_entropy(hidden, head, labels), hidden)}
    return {}


def attention_work(n: int, b: int, q: int, g: int, d: int, t: int, device: torch.device) -> Work:
    """Blocks at sorted random anchors of one sample; gradients of all five inputs."""
    dtype = DTYPE[device.type]
    torch.manual_seed(0)
    anchors = torch.randint(1, t, (n,), device=device).sort().values
    begins = torch.zeros_like(anchors)
    sizes = ((n, b, q, d), (n, b, g, d), (n, b, g, d), (t, g, d), (t, g, d))
    tensors = [torch.randn(size, device=device, dtype=dtype).requires_grad_() for size in sizes]
    weights = torch.randn(sizes[0], device=device, dtype=dtype)

    visible = Visible(begins, anchors)  # made once, since a step's layers share it; likewise the alternatives' mask

    def ours() -> object:
        return torch.autograd.grad(anchor_attention(*tensors, visible=visible), tensors, weights)

    def naive() -> torch.Tensor:
        return reference.anchor_attention(*tensors, begins=begins, ends=anchors, scale=d**-0.5)

    rows = torch.arange(t + n * b, device=device)
    block = torch.arange(n * b, device=device)[:, None] // b
    mask = torch.where(rows < t, rows < anchors[block], (rows - t) // b == block)  # [N·B, T + N·B]

    def masked() -> object:
        own_q, own_k, own_v, context_k, context_v = tensors
        k, v = (torch.cat((c, o.flatten(0, 1))).transpose(0, 1)[None] for c, o in ((context_k, own_k), (context_v, own_v)))
        out = F.scaled_dot_product_attention(
            own_q.reshape(1, n * b, q, d).transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True
        )
        return torch.autograd.grad(out.transpose(1, 2).reshape(sizes[0]), tensors, weights)

    alternatives: dict[str, Run] = {"SDPA with a mask": masked}
    if device.type == "cuda":
        compiled = torch.compile(naive)
        alternatives["plain, compiled"] = lambda: torch.autograd.grad(compiled(), tensors, weights)
    else:
        alternatives["plain"] = lambda: torch.autograd.grad(naive(), tensors, weights)
    num_seen = int(anchors.sum()) + n * b
    return Work(
        ours,
        bytes_moved=4 * sum(x.nbytes for x in tensors),
        flops=int(3.5 * 4 * d * q * b * num_seen),
        alternatives=alternatives,
    )


def loss_case(m: int, h: int, kind: str, on: Any, *goals: Goal) -> Case:
    """A case of `block_loss` at Qwen3's vocabulary."""
    v = QWEN_VOCABULARY
    return Case("block_loss", f"{kind}: {m} rows, H {h}, V {v}", on, partial(loss_work, m, h, v, kind), goals)


def attention_case(n: int, b: int, q: int, g: int, d: int, t: int, on: Any) -> Case:
    """A case of `anchor_attention`."""
    shape = f"{n} blocks of {b}, {q}/{g} heads of {d}, context {t}"
    return Case("anchor_attention", shape, on, partial(attention_work, n, b, q, g, d, t))


GOALS = (Goal("cost:matmuls alone", at_most=1.1), Goal("peak_share:full logits", at_most=0.25))

CASES = [
    loss_case(7680, 4096, "ce", "cuda", *GOALS),
    loss_case(240, 4096, "ce", "cuda", *GOALS),
    loss_case(7680, 4096, "kl", "cuda", *GOALS),
    attention_case(512, 16, 32, 8, 128, 4096, "cuda"),
    attention_case(16, 16, 32, 8, 128, 2048, "cuda"),
    loss_case(240, 256, "ce", "cpu", GOALS[1]),
    loss_case(120, 256, "kl", "cpu", GOALS[1]),
    attention_case(16, 8, 8, 4, 32, 256, "cpu"),
    attention_case(64, 16, 8, 4, 64, 1024, "cpu"),
]
