"""Records a running engine's drafter: its inputs and its drafts. Compares them with the drafts of honed's drafter."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from honed.recalib.drafter.drafter import Drafter
from honed.recalib.drafter.unrolled import UnrolledDrafter
from tests.e2e.engine import IS_CUDA, K, TestEngine
from tests.e2e.swapping import worker_of

LOGITS_TOLERANCE = 1e-1 if IS_CUDA else 1e-3
"""Of `difference_of_logits`: on CUDA vLLM's attention multiplies float32 with ten bits."""


@dataclass
class Seen:
    """One request's rows by position, and its drafts by the position of their anchor."""

    aux: dict[int, Tensor] = field(default_factory=dict)
    token_ids: dict[int, int] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)
    """Those of each draft, [K, V], by anchor; only for a drafter that drafts token after token, if asked for."""


def listen(running: TestEngine, *, has_logits: bool = False) -> dict[str, Seen]:
    """Note all that the drafter is given, and what it drafts, from now on; `has_logits`: and the logits (V1)."""
    runner = worker_of(running)._honed_side.runner
    seen: dict[str, Seen] = defaultdict(Seen)
    propose = runner.drafter.propose
    passes: list[Tensor] = []
    if has_logits:
        compute = runner.drafter.model.compute_logits

        def computing(hidden: Tensor) -> Tensor:
            logits: Tensor = compute(hidden)
            passes.append(logits.float().cpu().clone())
            return logits

        runner.drafter.model.compute_logits = computing

    def listening(*args: Any, **kwargs: Any) -> Any:
        view = runner.view(args, kwargs)
        passes.clear()
        drafted = propose(*args, **kwargs)
        if view is not None:
            aux = (view.aux if isinstance(view.aux, Tensor) else torch.cat(list(view.aux or ()), dim=-1)).cpu()
            for i, request in enumerate(view.req_ids):
                end = int(view.row_starts[i + 1]) - (int(view.num_rejected[i]) if view.num_rejected is not None else 0)
                rows = range(int(view.row_starts[i]), end)
                seen[request].aux |= {int(view.positions[row]): aux[row].clone() for row in rows}
                seen[request].token_ids |= {int(view.positions[row]): int(view.token_ids[row]) for row in rows}
                if kwargs.get("num_speculative_tokens") != 0:  # V2 returns old ones then
                    anchor = int(view.positions[end - 1]) + 1
                    seen[request].drafts[anchor] = drafted[i].tolist()
                    if passes:
                        seen[request].logits[anchor] = torch.stack([one[i] for one in passes])
        return drafted

    runner.drafter.propose = listening
    return seen


@torch.inference_mode()
def difference_of_logits(drafter: UnrolledDrafter, seen: dict[str, Seen]) -> float:
    """Largest difference of honed's logits from vLLM's, in standard deviations of the logits, over all steps of all blocks.

    honed's drafter is given vLLM's drafts. A step that were compared with the one before it must show.
    """
    apart, shifted, num_blocks = 0.0, 0.0, 0
    for request in seen.values():
        rows = range(max(request.aux) + 1)
        anchors = [one for one, drafts in request.drafts.items() if len(drafts) == K and one + K < len(rows)]
        if not anchors:
            continue
        context = drafter.fuse(torch.stack([request.aux[row].float() for row in rows]))
        tokens = torch.tensor([request.token_ids[row] for row in rows])
        drafted = [torch.cat((tokens[: a + 1], torch.tensor(request.drafts[a]), tokens[a + 1 + K :])) for a in anchors]
        each = zip(drafted, anchors, strict=True)
        ours = torch.cat([drafter(context, torch.arange(len(rows)), ids, torch.tensor([one])) for ids, one in each])
        theirs = torch.stack([request.logits[one] for one in anchors])
        is_word = torch.isfinite(ours)
        assert torch.equal(is_word, torch.isfinite(theirs))
        scale = float(ours[is_word].std())
        apart = max(apart, float((ours - theirs)[is_word].abs().max()) / scale)
        shifted = max(shifted, float((ours[:, 1:] - theirs[:, :-1])[is_word[:, 1:]].abs().max()) / scale)
        num_blocks += len(anchors)
    assert num_blocks > 20, "nothing was drafted: this shows nothing"
    assert shifted > 20 * apart, f"steps are no more alike than others: {apart:.1e} and {shifted:.1e}"
    return apart


@torch.inference_mode()
def share_of_equal_drafts(drafter: Drafter, seen: dict[str, Seen], since: dict[str, int] | None = None) -> float:
    """Share of vLLM's drafts that honed's drafter drafts from the same rows.

    Only drafts that the request could still take count: for others vLLM may have no room in its cache.

    Args:
        since: by request, the first position of an anchor that counts.
    """
    equal = total = 0
    for name, request in seen.items():
        whole = (position for position, drafts in request.drafts.items() if len(drafts) == K)  # near the end they are shorter
        first = (since or {}).get(name, 0)
        anchors = [position for position in whole if position in request.token_ids and position >= first]
        if not anchors:
            continue
        rows = range(max(request.aux) + 1)
        context = drafter.fuse(torch.stack([request.aux[row].float() for row in rows]))
        tokens = torch.tensor([request.token_ids[row] for row in rows])
        given = (context, torch.arange(len(rows)), tokens, torch.tensor(anchors))
        if isinstance(drafter, UnrolledDrafter):
            ours = drafter.draft(*given)
        else:
            ours = drafter.best_drafts(drafter.draft_hidden(*given), tokens[anchors])
        theirs = torch.tensor([request.drafts[position] for position in anchors])
        has_room = torch.tensor(anchors)[:, None] + torch.arange(K) < len(rows)
        equal, total = equal + int(((ours == theirs) & has_room).sum()), total + int(has_room.sum())
    assert total > 20, "nothing was drafted: this shows nothing"
    return equal / total
