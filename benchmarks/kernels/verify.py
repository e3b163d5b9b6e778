"""Cases of the ops after the target's pass: `verify_chain` and `walk_tree`."""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.kernels.case import Case, Goal, Run, Work
from honed.kernels.verify import reference
from honed.kernels.verify.verify_chain import verify_chain
from honed.kernels.verify.walk_tree import walk_tree

QWEN_VOCABULARY = 151_936
CERTAIN = 40.0
"""Added to a logit, it makes its token almost certain."""
GOAL = Goal("cost:reading the logits once", at_most=1.2)

# Letters: B requests, K draft tokens, N tree nodes, V vocabulary.


def chain_work(b: int, k: int, v: int, is_greedy: bool, has_q: bool, device: torch.device) -> Work:
    """Verify chains whose drafts are all accepted: all rows must be read."""
    torch.manual_seed(0)
    drafts = torch.randint(v, (b, k), device=device, dtype=torch.int32)
    logits = torch.randn(b, k + 1, v, device=device, dtype=torch.bfloat16)
    logits[:, :k].scatter_(2, drafts.long()[:, :, None], CERTAIN)
    draft_logits = logits[:, :k].clone() if has_q else None
    lengths = torch.full((b,), k, device=device, dtype=torch.int32)
    temperature = torch.full((b,), 0.0 if is_greedy else 1.0, device=device)
    seeds, positions = torch.arange(b, device=device), torch.full((b,), 1000, device=device)
    arguments = (logits, drafts, lengths, temperature, seeds, positions)
    read = [logits] if draft_logits is None else [logits, draft_logits]
    alternatives: dict[str, Run] = {}
    if device.type == "cuda":
        alternatives["plain PyTorch"] = lambda: plain_chain(logits, drafts, is_greedy, draft_logits)
        compiled = torch.compile(plain_chain)
        alternatives["plain PyTorch, compiled"] = lambda: compiled(logits, drafts, is_greedy, draft_logits)
        alternatives |= vllm_chain(logits, drafts, is_greedy, draft_logits)
    else:
        alternatives["plain PyTorch"] = lambda: plain_chain(logits, drafts, is_greedy, draft_logits)
    return Work(
        lambda: verify_chain(*arguments, draft_logits=draft_logits),
        bytes_moved=sum(x.nbytes for x in read),
        alternatives=alternatives,
        yardsticks={"reading the logits once": lambda: [x.amax(-1) for x in read]},
        is_graphed=True,
    )


def plain_chain(
    logits: torch.Tensor, drafts: torch.Tensor, is_greedy: bool, draft_logits: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:  # [B], [B]
    """Rejection sampling with the probabilities materialised; accepted lengths and bonus tokens."""
    k = drafts.shape[1]
    if is_greedy:
        best = logits.argmax(-1)
        accepted = (best[:, :k] == drafts).int().cumprod(1).sum(1)
        return accepted, best.gather(1, accepted[:, None])[:, 0]
    index = drafts.long()[:, :, None]
    p = logits.float().softmax(-1)
    own_p = p[:, :k].gather(2, index)[:, :, 0]
    if draft_logits is None:
        q, own_q = torch.zeros_like(p[:, :k]).scatter_(2, index, 1.0), 1.0
    else:
        q = draft_logits.float().softmax(-1)
        own_q = q.gather(2, index)[:, :, 0]
    accepted = (torch.rand_like(own_p) * own_q < own_p).int().cumprod(1).sum(1)
    residual = torch.cat(((p[:, :k] - q).clamp(min=0.0), p[:, k:]), dim=1)
    row = residual[torch.arange(len(p), device=p.device), accepted]
    return accepted, (row / torch.empty_like(row).exponential_()).argmax(-1)


def vllm_chain(
    logits: torch.Tensor, drafts: torch.Tensor, is_greedy: bool, draft_logits: torch.Tensor | None
) -> dict[str, Run]:
    """Run vLLM's rejection sampler, if installed, with a bonus token drawn from the last row as its sampler does."""
    with contextlib.suppress(ImportError):
        from vllm.v1.sample.rejection_sampler import rejection_sample

        b, k = drafts.shape
        ends = torch.arange(k, b * k + 1, k, device=drafts.device, dtype=torch.int32)
        temperature = torch.full((b,), 0.0 if is_greedy else 1.0, device=drafts.device)
        metadata: Any = SimpleNamespace(all_greedy=is_greedy, all_random=not is_greedy, temperature=temperature, generators={})

        def run() -> object:
            last = logits[:, k].float()
            if not is_greedy:
                probabilities = last.softmax(-1)
                last = probabilities / torch.empty_like(probabilities).exponential_()
            bonus = last.argmax(-1, keepdim=True).int()
            q = None if draft_logits is None else draft_logits.float().softmax(-1).flatten(0, 1)
            rows = logits[:, :k].float().flatten(0, 1)
            return rejection_sample(drafts.flatten(), [k] * b, k, ends, q, rows, bonus, metadata)

        return {"vLLM": run}
    return {}


def tree_of(b: int, n: int, v: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make tokens, parents and depths [B, N] of trees with a chain of up to 15 and siblings of its nodes."""
    tokens = torch.randint(v, (b, n), device=device, dtype=torch.int32)
    chain = min(n, 15)
    node = torch.arange(n, device=device, dtype=torch.int32)
    parents = torch.where(node < chain, node - 1, (node - chain) % chain - 1)
    return tokens, parents.int().repeat(b, 1), (parents + 2).int().repeat(b, 1)


def walk_work(b: int, n: int, device: torch.device) -> Work:
    """Walk to the end of the chain by drawn tokens, outside of a graph, as an engine does."""
    torch.manual_seed(0)
    tokens, parents, depths = tree_of(b, n, QWEN_VOCABULARY, device)
    chain = int(depths.max())
    drawn = torch.full((b, n + 1), -1, device=device, dtype=torch.int64)
    drawn[:, :chain] = tokens[:, :chain].long()
    arguments = (tokens, parents, torch.full((b,), n, device=device), drawn, chain)
    return Work(lambda: walk_tree(*arguments), alternatives={"plain twin": lambda: reference.walk_tree(*arguments)})


def chain_case(b: int, k: int, v: int, is_greedy: bool, has_q: bool, on: Any, *goals: Goal) -> Case:
    """A case of `verify_chain`."""
    how = "greedy" if is_greedy else "sampled, full q" if has_q else "sampled"
    return Case(
        "verify_chain", f"{how}: batch {b}, {k} drafts, V {v}", on, partial(chain_work, b, k, v, is_greedy, has_q), goals
    )


CASES = [
    chain_case(64, 15, QWEN_VOCABULARY, True, False, "cuda", GOAL),
    chain_case(64, 15, QWEN_VOCABULARY, False, False, "cuda", GOAL),
    chain_case(64, 15, QWEN_VOCABULARY, False, True, "cuda", GOAL),
    chain_case(1, 15, QWEN_VOCABULARY, False, False, "cuda"),
    Case("walk_tree", "batch 64, 32 nodes", "cuda", partial(walk_work, 64, 32)),
    chain_case(4, 7, 32_000, False, False, "cpu"),
    Case("walk_tree", "batch 8, 15 nodes", "cpu", partial(walk_work, 8, 15)),
]
