"""Estimates of acceptance are set right by workload and position, and keep their order within."""

from __future__ import annotations

import torch

from honed.attach.runner.fed_levels import SHRINK_ROUNDS, FedLevels

K, SLOTS = 3, 8
SURE = torch.tensor([[0.9, 0.8, 0.7]])


def levels() -> FedLevels:
    made = FedLevels(SLOTS, K, 4, torch.device("cpu"))
    made.set_workloads(torch.arange(SLOTS), torch.arange(SLOTS) % 2 + 1)
    return made


def rounds(made: FedLevels, slots: list[int], accepted: list[int], verified: list[int]) -> None:
    """A step: predictions of these slots' drafts, and what became of them."""
    of = torch.tensor(slots)
    made.apply(of, SURE.expand(len(slots), K))
    made.observe(of, torch.tensor(accepted) + 1, torch.tensor(verified) - torch.tensor(accepted))


def test_only_what_was_verified_and_reached_is_graded() -> None:
    made = levels()
    rounds(made, [0, 1, 2, 3], accepted=[3, 0, 1, 0], verified=[3, 3, 1, 0])
    graded, accepted, predicted = made._sums
    assert graded[1].tolist() == [2.0, 1.0, 1.0]  # slots 0 and 2
    assert accepted[1].tolist() == [2.0, 1.0, 1.0]
    assert graded[2].tolist() == [1.0, 0.0, 0.0]  # slot 1; nothing of slot 3 was verified
    assert accepted[2].tolist() == [0.0, 0.0, 0.0]
    assert torch.allclose(predicted[1], torch.tensor([1.8, 0.8, 0.7]))


def test_a_step_that_samples_nothing_or_only_a_prompts_token_grades_nothing() -> None:
    made = levels()
    made.apply(torch.tensor([0, 1]), SURE.expand(2, K))
    made.observe(torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([0, 0]))
    assert made._sums.abs().sum() == 0.0
    assert made.shifts().abs().sum() == 0.0


def test_a_workload_that_is_less_than_it_looks_gets_its_own_level() -> None:
    """Half of what is predicted at 0.9 is accepted in one workload, all but a tenth in the other: as predicted."""
    made, generator = levels(), torch.Generator().manual_seed(0)
    share = torch.tensor([0.9, 0.5] * (SLOTS // 2))
    for _ in range(1500):
        draws = (torch.rand(SLOTS, generator=generator) < share).long()
        rounds(made, list(range(SLOTS)), accepted=draws.tolist(), verified=[1] * SLOTS)
    told = made.apply(torch.tensor([0, 1]), SURE.expand(2, K))
    assert torch.allclose(told[:, 0], torch.tensor([0.9, 0.5]), atol=0.03)
    assert torch.allclose(told[:, 1:], SURE[:, 1:].expand(2, 2), atol=1e-3)  # nothing is known of these positions
    spread = made.apply(torch.tensor([1, 3]), torch.tensor([[0.95, 0.5, 0.5], [0.6, 0.5, 0.5]]))
    assert spread[0, 0] > spread[1, 0], "which draft is the better one was lost"


def test_little_evidence_shifts_little() -> None:
    made = levels()
    rounds(made, [1], accepted=[0], verified=[1])
    moved = made.apply(torch.tensor([1]), SURE)[0, 0].item()
    expected = (SHRINK_ROUNDS * 0.9) / (SHRINK_ROUNDS + 1.0)
    assert abs(moved - expected) < 1e-4


def test_what_was_long_ago_is_forgotten() -> None:
    made = levels()
    for accepted in (0, 1):
        for _ in range(3000):
            rounds(made, [1, 3, 5, 7], accepted=[accepted] * 4, verified=[1] * 4)
    assert made.apply(torch.tensor([1]), SURE)[0, 0] > 0.93


def test_a_slots_next_request_isnt_graded_by_what_was_predicted_of_the_last() -> None:
    made = levels()
    made.apply(torch.tensor([1]), SURE)
    made.set_workloads(torch.tensor([1]), torch.tensor([3]))
    made.observe(torch.tensor([1]), torch.tensor([2]), torch.tensor([0]))
    assert made._sums[2, 3].tolist() == [0.5, 0.0, 0.0]


def test_certainty_stays_finite() -> None:
    made = levels()
    told = made.apply(torch.tensor([0, 1]), torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.5]]))
    made.observe(torch.tensor([0, 1]), torch.tensor([1, 4]), torch.tensor([3, 0]))
    assert torch.isfinite(told).all()
    assert torch.isfinite(made.shifts()).all()
