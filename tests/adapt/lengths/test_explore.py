"""What is tried beside the lengths that were chosen, and by how many requests of a step."""

from __future__ import annotations

import itertools
import random

import pytest

from honed.adapt.lengths.explore import (
    ENOUGH_STEPS,
    MOST_EXPLORING,
    TRIAL_STEPS,
    LengthTrials,
    Option,
    Trials,
    alone_share,
    neighbour,
    trial_share,
)


def tried(lengths: list[int], **options: object) -> list[list[int]]:
    rng = random.Random(1)
    return [neighbour(rng, list(lengths), 7, **options) for _ in range(200)]  # type: ignore[arg-type]


def test_where_nobody_drafts_only_a_few_try_one_token() -> None:
    for found in tried([0] * 40):
        assert sum(k > 0 for k in found) == MOST_EXPLORING
        assert max(found) == 1
    assert all(all(found) for found in tried([0] * MOST_EXPLORING))


@pytest.mark.parametrize("options", [{"cold_length": 5}, {"is_equal": True}])
def test_all_do_while_prices_are_unknown_and_where_lengths_have_to_be_equal(options: dict[str, object]) -> None:
    for found in tried([0] * 32, **options):
        assert len(set(found)) == 1
        assert found[0] > 0
    assert {found[0] for found in tried([0] * 32, **options)} == ({1, 2, 5} if "cold_length" in options else {1})


def test_of_a_large_batch_that_drafts_some_move_by_little() -> None:
    lengths = [3] * 64
    for found in tried(lengths):
        changed = [k for k, before in zip(found, lengths, strict=True) if k != before]
        assert len(changed) in (MOST_EXPLORING, 64)
        assert found == [0] * 64 or len(changed) == MOST_EXPLORING
        assert set(changed) <= {0, 1, 2, 4}


def test_nothing_is_tried_beyond_the_limit() -> None:
    rng = random.Random(1)
    assert all(max(neighbour(rng, [2] * 8, 2)) <= 2 for _ in range(200))


def test_the_other_side_is_tried_most_where_the_choice_is_even_and_never_without_exploring() -> None:
    shares = [trial_share(0.02, margin) for margin in (0.0, 0.05, 0.1, 0.2, 1.0)]
    assert shares[0] == shares[1] > shares[2] > shares[3] > shares[4] > 0.0
    assert shares == [trial_share(0.02, -margin) for margin in (0.0, 0.05, 0.1, 0.2, 1.0)]
    assert shares[0] < 0.05
    assert trial_share(1.0, 0.0) < 0.05
    assert trial_share(0.0, 0.0) == 0.0


def test_a_side_that_was_little_seen_is_tried_though_it_is_believed_to_be_worse() -> None:
    assert trial_share(0.02, -0.2, 0.0) == trial_share(0.02, 0.0) > 5.0 * trial_share(0.02, -0.2)
    assert trial_share(0.02, -0.9, 0.0) < 0.1 * trial_share(0.02, -0.2, 0.0)


def test_the_more_was_seen_of_the_other_side_the_closer_it_has_to_be() -> None:
    shares = [trial_share(0.02, -0.05, seen) for seen in (ENOUGH_STEPS, 4 * ENOUGH_STEPS, 100 * ENOUGH_STEPS)]
    assert shares[0] > 3.0 * shares[1] > 9.0 * shares[2] > 0.0
    assert trial_share(0.02, -0.005, 1e6) == shares[0]


@pytest.mark.parametrize("has_trials", [False, True])
def test_where_drafting_is_far_worse_less_is_tried_in_steps_alone(has_trials: bool) -> None:
    even, worse, far_worse = (alone_share(0.02, margin, False, has_trials) for margin in (-0.03, -0.1, -0.5))
    assert 0.02 == even > worse > far_worse > 0.004
    assert alone_share(0.0, -0.5, False, has_trials) == 0.0


def test_where_lengths_have_trials_of_their_own_less_is_tried_in_steps_alone() -> None:
    assert 0.02 == alone_share(0.02, 0.5, True, False) > alone_share(0.02, 0.5, True, True) > 0.004


@pytest.mark.parametrize("is_drafting", [False, True])
def test_trials_last_some_steps_and_become_rare_once_enough_was_seen_at_that_batch_size(is_drafting: bool) -> None:
    rng, trials, margin = random.Random(1), Trials(), 0.15 if is_drafting else -0.15

    def tried(num_requests: int, num_steps: int) -> list[bool]:
        on = []
        for _ in range(num_steps):
            on.append(trials.is_on(rng.random(), 0.02, margin, num_requests, is_drafting))
            trials.note(num_requests, is_drafting != on[-1])
        return on

    first, later, other = tried(4, 500), tried(5, 2000), tried(8, 500)
    assert ENOUGH_STEPS <= sum(first) < 3 * ENOUGH_STEPS
    assert sum(later) / 2000 < 0.3 * sum(first) / 500
    assert sum(other) >= ENOUGH_STEPS
    runs = [len(list(run)) for is_on, run in itertools.groupby(first) if is_on]
    assert min(runs[:-1]) >= TRIAL_STEPS


def test_a_trial_ends_when_it_turns_out_to_be_what_is_best() -> None:
    trials = Trials()
    assert trials.is_on(0.02, 0.02, 0.0, 4, False)
    assert not trials.is_on(0.9, 0.02, 0.0, 4, True)


RATES = {-1: (2.0, 0.97), 0: (3.0, 1.0), 1: (4.0, 0.9), 2: (5.0, 0.985), 4: (7.0, 0.5)}
"""By how much lengths move -> (drafts per request, what is believed of them)."""


def options(rates: dict[int, tuple[float, float]]) -> list[Option]:
    """Lengths whose steps take equally long."""
    return [Option(moves, length, rate, 1.0) for moves, (length, rate) in rates.items()]


def may_begin(
    trials: LengthTrials, chance: float, num_requests: int, found: list[Option], longest: int, *, tries_near: bool = True
) -> None:
    """Do as the decider does in a step without a trial."""
    if not trials.is_planned(num_requests):
        trials.plan(num_requests, longest, found, tries_near=tries_near)
    trials.begin(chance, num_requests, longest)


def tried_lengths(trials: LengthTrials, num_steps: int, seed: int = 1) -> dict[int, int]:
    """Steps of each move, where a trial may begin at any time."""
    rng, steps = random.Random(seed), dict.fromkeys(RATES, 0)
    for _ in range(num_steps):
        moves = trials.go_on()
        if not moves:
            may_begin(trials, rng.random(), 1, options(RATES), 3)
            moves = trials.go_on()
        trials.note(1, RATES[moves][0])
        steps[moves] += 1
    while moves := trials.go_on():
        steps[moves] += 1
    return steps


def test_lengths_that_are_nearly_as_good_are_tried_until_they_are_known() -> None:
    steps = tried_lengths(LengthTrials(), 1000)
    assert min(steps[-1], steps[2]) > 2 * ENOUGH_STEPS
    assert steps[4] < 0.5 * ENOUGH_STEPS
    assert steps[2] > steps[-1] > steps[1]
    assert all(num % TRIAL_STEPS == 0 for move, num in steps.items() if move)


def test_what_was_tried_long_ago_is_tried_anew() -> None:
    trials = LengthTrials()
    first = tried_lengths(trials, 500)[1]
    for _ in range(20_000):
        trials.note(1, 3.0)
    again = tried_lengths(trials, 500, seed=2)[1]
    assert again > 0.5 * first > 0


def test_other_batch_sizes_have_trials_of_their_own() -> None:
    trials = LengthTrials()
    for _ in range(1000):
        trials.note(1, 5.0)
    may_begin(trials, 0.9, 1, options({0: (3.0, 1.0), 2: (5.0, 0.96)}), 3)
    assert trials.go_on() == 0
    may_begin(trials, 0.9, 4, options({0: (3.0, 1.0), 2: (5.0, 0.96)}), 3)
    assert [trials.go_on() for _ in range(TRIAL_STEPS + 1)] == [2] * TRIAL_STEPS + [0]


def test_where_only_lengths_of_unknown_price_are_tried_no_other_is() -> None:
    trials = LengthTrials()
    near = [Option(0, 3.0, 1.0, 1.0), Option(1, 4.0, 0.99, 1.0)]
    for _ in range(200):
        may_begin(trials, 0.5, 64, near, 3, tries_near=False)
        trials.note(64, 3.0)
    assert trials.go_on() == 0
    trials = LengthTrials()
    may_begin(trials, 0.5, 64, [Option(0, 3.0, 1.0, 1.0), Option(1, 4.0, 0.9, 1.2)], 3, tries_near=False)
    assert trials.go_on() == 1


def test_a_plan_is_for_some_trials_and_steps_and_for_a_length_whatever_is_best_meanwhile() -> None:
    trials, found = LengthTrials(), options({0: (3.0, 1.0), 2: (5.0, 0.995)})
    trials.plan(1, 3, found, tries_near=True)
    for longest, moves in ((3, 2), (4, 1), (7, -2), (5, 0)) * 2:
        assert trials.is_planned(1)
        trials.begin(0.0, 1, longest)
        assert [trials.go_on() for _ in range(TRIAL_STEPS + 1)] == [moves] * TRIAL_STEPS + [0]
    assert not trials.is_planned(1)
    trials.plan(1, 3, found, tries_near=True)
    for _ in range(300):
        trials.note(1, 3.0)
    assert not trials.is_planned(1)


def test_no_range_of_lengths_is_too_short_to_plan() -> None:
    for found in (
        [],
        [Option(0, 0.0, 1.0, 1.0)],
        [Option(-2, 0.0, 1.0, 1.0)],
        [Option(-1, 0.0, 1.0, 1.0), Option(2, 3.0, 0.5, 2.0)],
    ):
        trials = LengthTrials()
        may_begin(trials, 0.99, 1, found, 1)
        assert trials.is_planned(1)
        assert trials.go_on() in {0, *(option.moves for option in found if option.length)}


def test_where_there_is_no_other_length_nothing_is_tried() -> None:
    trials = LengthTrials()
    may_begin(trials, 0.0, 1, options({0: (1.0, 1.0)}), 3)
    assert trials.go_on() == 0


@pytest.mark.fault("a jump of the step time between lengths that were tried")
@pytest.mark.parametrize("seen", [(0, 15), (15,)], ids=["between", "below"])
@pytest.mark.parametrize("jump", range(1, 15))
def test_a_jump_of_the_step_time_is_found_between_lengths_that_were_seen_and_below_them(jump: int, seen: tuple[int]) -> None:
    """A smooth price says that 15 is best; the step time jumps above `jump` drafts."""
    trials, tried = LengthTrials(), set()
    for length in seen:
        for _ in range(100):
            trials.note(4, length)
    known = {length: 1.5 if length else 1.0 for length in seen}
    for _ in range(20):
        here = sorted(known)
        seconds = [
            min((known[near] for near in here if near >= length), default=1.5) if length else 1.0 for length in range(16)
        ]
        if 0 not in seen:
            seconds[0] = seconds[1]
        rates = [(1.0 + 0.11 * length) / spent for length, spent in enumerate(seconds)]
        best = max(range(16), key=rates.__getitem__)
        found = [Option(length - best, length, rates[length], seconds[length]) for length in range(16)]
        may_begin(trials, 0.5, 4, found, best)
        while moves := trials.go_on():
            trials.note(4, best + moves)
            known[best + moves] = 1.0 if best + moves <= jump else 1.5
            tried.add(best + moves)
    if 1.0 + 0.11 * jump > 1.03 * (1.0 + 0.11 * 15) / 1.5:
        assert jump in known
        assert len(tried) < 10


def test_a_price_that_was_seen_is_not_asked_for_again_soon() -> None:
    trials = LengthTrials()
    found = [Option(-1, 3.0, 0.9, 1.0), Option(0, 4.0, 1.0, 1.0)]
    steps = 0
    for _ in range(4000):
        moves = trials.go_on()
        if not moves:
            may_begin(trials, 0.5, 1, found, 4, tries_near=False)
            moves = trials.go_on()
        trials.note(1, 4.0 + moves)
        steps += moves != 0
    assert 5 <= steps <= 6
