"""Greedy acceptance of a drafter on captured text, without an engine: the figures that the gate compares.

With a greedy target, a draft token is accepted exactly if it equals the emitted token. So one pass over the emitted text gives
the acceptance length that a drafter would have had. Figures are kept by session, since sessions, not blocks, are independent:
the gate's paired bootstrap draws sessions.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from honed.kernels.trees.reference import NUM_CANDIDATES, DraftTrees
from honed.recalib.drafter.drafter import Drafter
from honed.recalib.gate.tree_lengths import accepted_by_size, grow_trees
from honed.recalib.samples.sample import PackedSamples, TrainingSample, pack
from honed.recalib.training.blocks import block_labels, eligible_anchors
from honed.recalib.training.pace import Pace, run_through
from honed.recalib.training.precision import compute_dtype, computing

# Letters: N anchors, K draft positions.


@dataclass(frozen=True)
class SessionFigures:
    """One session's sums: over every anchor of its emitted text, and over the rounds a server would have run."""

    session: str
    workload: str
    num_anchors: int
    num_accepted_tokens: int
    num_rounds: int
    num_round_accepted_tokens: int
    tree_rounds: tuple[tuple[int, int], ...] = ()
    """Rounds and accepted tokens with draft trees of each of `TREE_SIZES`; empty where the drafter grows none."""

    @property
    def acceptance_length(self) -> float:
        """tau in the rounds a server would have run, bonus token included."""
        return 1.0 + self.num_round_accepted_tokens / max(1, self.num_rounds)


@dataclass(frozen=True)
class Evaluation:
    """All sessions' figures."""

    sessions: tuple[SessionFigures, ...]

    def acceptance_length(self, workload: str | None = None) -> float:
        """tau over all rounds of one workload, or of all."""
        chosen = [s for s in self.sessions if workload in (None, s.workload)]
        return 1.0 + sum(s.num_round_accepted_tokens for s in chosen) / max(1, sum(s.num_rounds for s in chosen))


def expected_acceptance_length(
    drafter: Drafter,
    samples: Iterable[TrainingSample],
    num_draft_tokens: int | None = None,
    max_anchors_per_pass: int = 256,
) -> Evaluation:
    """Go through the emitted text of every sample, block by block.

    Args:
        drafter: the drafter to judge; it is not changed.
        samples: held-out samples; anchors are taken from the emitted part only (`num_prompt_tokens` on).
        num_draft_tokens: k, by default the drafter's full block.
        max_anchors_per_pass: blocks whose activations a pass holds; bounds memory.
    """
    k = num_draft_tokens or drafter.config.num_draft_tokens
    sessions: dict[tuple[str, str], list[SessionFigures]] = {}
    for sample in samples:
        figures = run_through(evaluate_in_parts(drafter, sample, k, max_anchors_per_pass))
        if figures is not None:
            sessions.setdefault((sample.session, sample.workload), []).append(figures)
    return Evaluation(tuple(_add_sessions(group) for group in sessions.values()))


@torch.inference_mode()
def evaluate_in_parts(
    drafter: Drafter,
    sample: TrainingSample,
    num_draft_tokens: int,
    max_anchors_per_pass: int = 256,
    pace: Pace | None = None,
) -> Generator[None, None, SessionFigures | None]:
    """Go through one sample, with a `yield` after some of its anchors; returns None for a sample with nothing to draft.

    Args:
        pace: sets how many anchors are drafted at a time, up to `max_anchors_per_pass`.
    """
    packed = pack([sample])
    anchors = eligible_anchors(packed)
    if not len(anchors):
        return None
    labels, has_label = block_labels(packed, anchors, num_draft_tokens)
    packed = packed.to(drafter.device)
    drafts, in_trees, done = list[Tensor](), list[Tensor](), 0
    while done < len(anchors):
        began_s = time.perf_counter()
        most = min(max_anchors_per_pass, len(anchors) - done)
        part = anchors[done : done + (pace.blocks(most) if pace else most)]
        if drafter.grows_trees:
            tokens, trees = draft_with_trees(drafter, packed, part, num_draft_tokens)
            texts = (one[done : done + len(part)].to(drafter.device) for one in (labels, has_label))
            in_trees.append(accepted_by_size(trees, *texts).cpu())
        else:
            tokens = draft_blocks(drafter, packed, part, num_draft_tokens)
        drafts.append(tokens)
        done += len(part)
        if pace is not None:
            pace.observe(len(part), time.perf_counter() - began_s)
        yield
    is_right = (torch.cat(drafts) == labels) & has_label
    accepted = is_right.long().cumprod(-1).sum(-1).tolist()  # up to the first wrong or unknown one
    return SessionFigures(
        sample.session,
        sample.workload,
        len(anchors),
        sum(accepted),
        *_rounds(accepted),
        tuple(_rounds(of_size) for of_size in torch.cat(in_trees).T.tolist()) if in_trees else (),
    )


def draft_blocks(
    drafter: Drafter, packed: PackedSamples, anchors: Tensor, num_draft_tokens: int
) -> Tensor:  # [N, K], on the CPU
    """Draft greedily from some anchors of samples that are on the drafter's device.

    A drafter that drafts token after token is fed the right ones: the same as its own, up to its first wrong one.
    """
    device = drafter.device
    anchors = anchors.to(device)
    with computing(device, compute_dtype(device, "auto")):
        given = (_context(drafter, packed), packed.positions, packed.token_ids, anchors, packed.segments, num_draft_tokens)
        return drafter.best_drafts(drafter.draft_hidden(*given), packed.token_ids[anchors]).cpu()


def draft_with_trees(
    drafter: Drafter, packed: PackedSamples, anchors: Tensor, num_draft_tokens: int
) -> tuple[Tensor, DraftTrees]:  # [N, K], on the CPU
    """Draft as `draft_blocks`, and grow the trees of the same pass."""
    device = drafter.device
    anchors = anchors.to(device)
    with computing(device, compute_dtype(device, "auto")):
        given = (_context(drafter, packed), packed.positions, packed.token_ids, anchors, packed.segments, num_draft_tokens)
        found = drafter.candidates(drafter.draft_hidden(*given), packed.token_ids[anchors], NUM_CANDIDATES)
    return found.chain().cpu(), grow_trees(found)


def _context(drafter: Drafter, packed: PackedSamples) -> Tensor:  # [T, H]
    features = packed.features.float()
    return features if packed.is_fused else drafter.fuse(features)


def walk(accepted: Sequence[int]) -> list[int]:
    """List the anchors a server would have used: the first, then always accepted + 1 tokens further."""
    rounds, index = [], 0
    while index < len(accepted):
        rounds.append(index)
        index += accepted[index] + 1
    return rounds


def _rounds(accepted: Sequence[int]) -> tuple[int, int]:
    """Count the rounds that a server would have run, and the tokens accepted in them."""
    rounds = walk(accepted)
    return len(rounds), sum(accepted[i] for i in rounds)


def _add_sessions(group: list[SessionFigures]) -> SessionFigures:
    first, by_size = group[0], zip(*(s.tree_rounds for s in group), strict=True)
    return SessionFigures(
        first.session,
        first.workload,
        sum(s.num_anchors for s in group),
        sum(s.num_accepted_tokens for s in group),
        sum(s.num_rounds for s in group),
        sum(s.num_round_accepted_tokens for s in group),
        tuple((sum(rounds), sum(accepted)) for rounds, accepted in (zip(*of_size, strict=True) for of_size in by_size)),
    )
