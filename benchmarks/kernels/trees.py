"""Cases of the ops that make draft trees: `top_candidates` and `tree_build`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.kernels.case import Case, Goal, Run, Work
from honed.kernels.trees import reference
from honed.kernels.trees.top_candidates import top_candidates
from honed.kernels.trees.tree_build import allocate, tree_build
from honed.kernels.trees.tree_build_host import build_on_host

QWEN_VOCABULARY = 151_936

# Letters: B requests, D depths, m candidates, V vocabulary.


def candidates_work(b: int, d: int, v: int, m: int, device: torch.device) -> Work:
    """Top candidates of random draft logits."""
    torch.manual_seed(0)
    logits = 4.0 * torch.randn(b, d, v, device=device, dtype=torch.bfloat16)
    temperature = torch.ones(b, device=device)

    def plain() -> object:
        values, ids = logits.topk(m, dim=-1)
        return values.float() - logits.float().logsumexp(-1, keepdim=True), ids

    alternatives: dict[str, Run] = {"topk and logsumexp": plain}
    if device.type == "cuda":
        alternatives["topk and logsumexp, compiled"] = torch.compile(plain)
    return Work(
        lambda: top_candidates(logits, m, temperature),
        bytes_moved=logits.nbytes + 8 * b * d * m,
        alternatives=alternatives,
        yardsticks={"one reduction of the logits": lambda: logits.amax(-1)},
        is_graphed=True,
    )


def tree_work(b: int, d: int, m: int, budget: int, device: torch.device) -> Work:
    """Build trees from random candidates, the best with probabilities as a drafter would give."""
    torch.manual_seed(0)
    log_probs = (2.0 * torch.randn(b, d, 1000)).log_softmax(-1).topk(m, dim=-1).values.to(device)
    ids = torch.randint(1000, (b, d, m), device=device, dtype=torch.int32)
    budgets = torch.full((b,), budget, device=device, dtype=torch.int32)

    def on_the_host() -> object:
        return build_on_host(log_probs, ids, budgets, None, allocate(b, budget, "cpu"))

    return Work(
        lambda: tree_build(log_probs, ids, budgets, budget),
        bytes_moved=log_probs.nbytes + ids.nbytes + sum(part.nbytes for part in allocate(b, budget, "meta")),
        alternatives={
            "heap on the host": on_the_host,
            "plain PyTorch": lambda: reference.tree_build(log_probs, ids, budgets, budget),
        },
        is_graphed=True,
    )


def candidates_case(b: int, v: int, on: Any) -> Case:
    """A case of `top_candidates`."""
    return Case("top_candidates", f"batch {b}, 15 depths, top 8 of {v}", on, partial(candidates_work, b, 15, v, 8))


def tree_case(b: int, budget: int, on: Any, *goals: Goal) -> Case:
    """A case of `tree_build`."""
    return Case(
        "tree_build", f"batch {b}, top 8 of 15 depths, budget {budget}", on, partial(tree_work, b, 15, 8, budget), goals
    )


CASES = [
    candidates_case(64, QWEN_VOCABULARY, "cuda"),
    candidates_case(1, QWEN_VOCABULARY, "cuda"),
    tree_case(64, 32, "cuda", Goal("time_us", at_most=60.0)),
    tree_case(1, 32, "cuda"),
    tree_case(64, 255, "cuda"),
    candidates_case(4, 32_000, "cpu"),
    tree_case(16, 32, "cpu"),
]
