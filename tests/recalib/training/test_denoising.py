"""Blocks drafted in several passes: counts by the schedules, what training reveals, and drafting one place after another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from honed.recalib.config.training import MaskSchedule
from honed.recalib.drafter.dflash import DFlashDrafter
from honed.recalib.gate.evaluate import expected_acceptance_length
from honed.recalib.samples.sample import TrainingSample
from honed.recalib.training.denoising import ONE_PASS, Denoising, draft_in_steps, reveal_randomly

SCHEDULES: tuple[MaskSchedule, ...] = ("cosine", "linear", "square-root")
MASK = 1


@given(steps=st.integers(1, 4), schedule=st.sampled_from(SCHEDULES), num_draft_tokens=st.integers(1, 64))
def test_counts_sum_to_the_block_and_never_rise(steps: int, schedule: MaskSchedule, num_draft_tokens: int) -> None:
    counts = Denoising(steps, schedule).counts(num_draft_tokens)
    assert sum(counts) == num_draft_tokens
    assert len(counts) == min(steps, num_draft_tokens)
    assert min(counts) >= 1
    assert list(counts) == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    ("schedule", "counts"), [("cosine", (6, 5, 4, 1)), ("linear", (7, 5, 3, 1)), ("square-root", (8, 5, 2, 1))]
)
def test_counts_of_a_block_of_sixteen(schedule: MaskSchedule, counts: tuple[int, ...]) -> None:
    assert Denoising(4, schedule).counts(16) == counts


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": 5}, {"schedule": "cubic"}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"denoising steps|unknown mask schedule"):
        Denoising(**wrong)  # type: ignore[arg-type]


def test_training_sees_blocks_as_the_passes_find_them() -> None:
    labels = torch.randint(2, 50, (4000, 16), generator=torch.Generator().manual_seed(0))
    tokens, is_masked = reveal_randomly(labels, MASK, Denoising(4, "cosine"), torch.Generator().manual_seed(1))
    assert torch.equal(tokens == MASK, is_masked)
    assert torch.equal(tokens[~is_masked], labels[~is_masked])
    masked, blocks = is_masked.sum(-1).unique(return_counts=True)
    assert masked.tolist() == [1, 5, 10, 16]  # 16 less 0, 6, 6 + 5, 6 + 5 + 4
    assert (blocks > 900).all()
    share_by_place = is_masked.float().mean(0)
    assert (share_by_place - share_by_place.mean()).abs().max() < 0.03  # no place is favoured


def test_one_pass_reveals_nothing_in_training() -> None:
    labels = torch.randint(2, 50, (5, 7))
    tokens, is_masked = reveal_randomly(labels, MASK, ONE_PASS, torch.Generator())
    assert is_masked.all()
    assert (tokens == MASK).all()


def test_the_surest_places_are_revealed_first_and_then_seen() -> None:
    """Place j is surer than the next; what it says next depends on how many places it sees revealed."""
    seen: list[Tensor] = []

    def best_of(tokens: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(tokens.clone())
        num_revealed = int((tokens[0] != MASK).sum())
        return torch.full_like(tokens, 10 + num_revealed), -torch.arange(tokens.shape[1]).expand(tokens.shape).float()

    drafts = draft_in_steps(best_of, 2, 7, MASK, Denoising(2, "linear"), torch.device("cpu"))
    first = Denoising(2, "linear").counts(7)[0]
    assert drafts.tolist() == [[10] * first + [10 + first] * (7 - first)] * 2
    assert [(tokens[0] != MASK).sum().item() for tokens in seen] == [0, first]


def test_the_evaluator_takes_passes(
    make_drafter: Callable[..., DFlashDrafter], make_sample: Callable[..., TrainingSample]
) -> None:
    drafter, sample = make_drafter(), make_sample(60)
    once = expected_acceptance_length(drafter, [sample])
    assert expected_acceptance_length(drafter, [sample], denoising=Denoising(1, "linear")) == once
    several = expected_acceptance_length(drafter, [sample], denoising=Denoising(3))
    assert several.sessions[0].num_anchors == once.sessions[0].num_anchors
