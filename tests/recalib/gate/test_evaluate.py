"""Offline acceptance is what rounds one by one would have given, for each session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from honed.recalib.drafter.dflash import DFlashDrafter
from honed.recalib.gate.evaluate import expected_acceptance_length, walk
from honed.recalib.gate.gate import TREE_SIZES
from honed.recalib.samples.sample import TrainingSample
from honed.recalib.training.micro_step import MicroTrainer, TrainingSettings
from tests.kernels.draft_tree import ROOT, build_tree

MakeDrafter = Callable[..., DFlashDrafter]
MakeSample = Callable[..., TrainingSample]


def round_by_round(drafter: DFlashDrafter, sample: TrainingSample) -> tuple[int, int]:
    """Rounds and accepted tokens, the slow way."""
    anchor, num_rounds, num_accepted = max(1, sample.num_prompt_tokens), 0, 0
    while anchor + 1 < sample.num_tokens:
        with torch.no_grad():
            logits = drafter(sample.features, sample.positions, sample.token_ids, torch.tensor([anchor]))
        drafts = logits[0].argmax(-1).tolist()
        emitted = sample.token_ids[anchor + 1 : anchor + 4].tolist()
        accepted = next((i for i in range(len(emitted)) if drafts[i] != emitted[i]), len(emitted))
        num_rounds, num_accepted, anchor = num_rounds + 1, num_accepted + accepted, anchor + accepted + 1
    return num_rounds, num_accepted


def tree_rounds(drafter: DFlashDrafter, sample: TrainingSample, num_nodes: int) -> tuple[int, int]:
    """Rounds with draft trees and accepted tokens, the slow way."""
    anchor, num_rounds, num_accepted = max(1, sample.num_prompt_tokens), 0, 0
    while anchor + 1 < sample.num_tokens:
        with torch.no_grad():
            logits = drafter(sample.features, sample.positions, sample.token_ids, torch.tensor([anchor]))[0]
        best = logits.log_softmax(-1).topk(8)
        children = build_tree(best.values.numpy(), num_nodes).children()
        node, accepted = ROOT, 0
        for ids, token in zip(best.indices.tolist(), sample.token_ids[anchor + 1 : anchor + 4].tolist(), strict=False):
            node = children.get((node, ids.index(token) if token in ids else 99), ROOT)
            if node == ROOT:
                break
            accepted += 1
        num_rounds, num_accepted, anchor = num_rounds + 1, num_accepted + accepted, anchor + accepted + 1
    return num_rounds, num_accepted


@pytest.fixture
def trained(make_drafter: MakeDrafter, make_sample: MakeSample) -> DFlashDrafter:
    """A drafter that is right sometimes."""
    drafter = make_drafter()
    settings = TrainingSettings(learning_rate=1e-2, anchors_per_micro_step=16, micro_steps_per_update=1, warmup_updates=1)
    trainer = MicroTrainer(drafter, settings)
    for _ in range(60):
        trainer.step([make_sample(40, seed=3)])
    return drafter


def test_equals_rounds_one_by_one(trained: DFlashDrafter, make_sample: MakeSample) -> None:
    sample = make_sample(40, seed=3, num_prompt_tokens=11)
    (figures,) = expected_acceptance_length(trained, [sample], max_anchors_per_pass=5).sessions
    assert (figures.num_rounds, figures.num_round_accepted_tokens) == round_by_round(trained, sample)
    assert 0 < figures.num_round_accepted_tokens < 3 * figures.num_rounds
    assert figures.num_anchors == 40 - 1 - 11


@pytest.mark.parametrize("vocabulary", [{}, {"draft_vocab_size": 40}])
def test_trees_equal_rounds_one_by_one(make_drafter: MakeDrafter, make_sample: MakeSample, vocabulary: dict[str, int]) -> None:
    drafter = make_drafter(**vocabulary)
    settings = TrainingSettings(learning_rate=1e-2, anchors_per_micro_step=16, micro_steps_per_update=1, warmup_updates=1)
    trainer = MicroTrainer(drafter, settings)
    for _ in range(25):
        trainer.step([make_sample(40, seed=3)])
    samples = [make_sample(40, seed=seed, num_prompt_tokens=11) for seed in (3, 5)]
    (figures,) = expected_acceptance_length(drafter, samples, max_anchors_per_pass=5).sessions
    of_chain = [round_by_round(drafter, sample) for sample in samples]
    assert (figures.num_rounds, figures.num_round_accepted_tokens) == tuple(map(sum, zip(*of_chain, strict=True)))
    for num_nodes, found in zip(TREE_SIZES, figures.tree_rounds, strict=True):
        each = [tree_rounds(drafter, sample, num_nodes) for sample in samples]
        assert found == tuple(map(sum, zip(*each, strict=True)))
    accepted = [figures.num_round_accepted_tokens, *(accepted for _, accepted in figures.tree_rounds)]
    assert accepted[0] < accepted[1] < accepted[-1]


def test_sessions_are_summed_and_workloads_kept_apart(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    samples = [
        make_sample(seed=0, session="one", workload="chat"),
        make_sample(seed=1, session="one", workload="chat"),
        make_sample(seed=2, session="two", workload="code"),
    ]
    result = expected_acceptance_length(make_drafter(), samples)
    assert [(s.session, s.workload) for s in result.sessions] == [("one", "chat"), ("two", "code")]
    assert result.sessions[0].num_anchors == 2 * result.sessions[1].num_anchors


def test_length_over_all_is_the_ratio_of_sums(trained: DFlashDrafter, make_sample: MakeSample) -> None:
    result = expected_acceptance_length(trained, [make_sample(40, seed=3), make_sample(20, seed=4, session="t")])
    rounds = sum(s.num_rounds for s in result.sessions)
    accepted = sum(s.num_round_accepted_tokens for s in result.sessions)
    assert result.acceptance_length() == pytest.approx(1 + accepted / rounds)
    assert result.acceptance_length("absent") == 1.0


def test_samples_with_nothing_to_draft_are_left_out(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    assert expected_acceptance_length(make_drafter(), [make_sample(9, num_prompt_tokens=8)]).sessions == ()


@pytest.mark.parametrize(("accepted", "rounds"), [([0, 0, 0], [0, 1, 2]), ([2, 9, 9, 1, 9], [0, 3]), ([], []), ([7], [0])])
def test_walk_goes_accepted_and_one_further(accepted: list[int], rounds: list[int]) -> None:
    assert walk(accepted) == rounds


def test_unfused_features_give_the_same(trained: DFlashDrafter, make_sample: MakeSample) -> None:
    unfused = make_sample(is_fused=False)
    with torch.no_grad():
        features = trained.fuse(unfused.features)
    fused = TrainingSample(features, unfused.token_ids, unfused.positions, "s", "w")
    assert expected_acceptance_length(trained, [unfused]) == expected_acceptance_length(trained, [fused])
