import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.acceptance.estimate import (
    AcceptanceCounts,
    RequestTable,
    acceptance_length,
    chain_estimate,
    count_trials,
    odds_ratio,
    reached_and_accepted,
    scale_odds,
    shrunk_estimate,
    strength_between,
    survival,
)
from tests.adapt.simulate import simulate_rounds

K = 7
TRUTH = np.array([0.8, 0.75, 0.7, 0.6, 0.6, 0.5, 0.5])

rounds_lists = st.lists(st.tuples(st.integers(0, K), st.integers(0, K), st.integers(0, 3)), max_size=60)


def columns(rounds):
    drafted = np.array([r[0] for r in rounds], dtype=np.int64)
    return drafted, np.minimum([r[1] for r in rounds], drafted).astype(np.int64), np.array([r[2] for r in rounds])


def test_a_position_is_a_trial_only_when_reached_and_verified():
    # Drafted 3: accepted 1 -> positions 1 and 2 tried; drafted 2, both accepted -> 2 tried; drafted 0 -> nothing.
    trials, successes = count_trials([3, 2, 0], [1, 2, 0], 4)
    assert trials.tolist() == [2, 2, 0, 0]
    assert successes.tolist() == [2, 1, 0, 0]


def test_drafts_past_the_block_s_verified_part_were_not_tried():
    reached, accepted = reached_and_accepted([5], [2], K, [3])
    assert (reached.tolist(), accepted.tolist()) == ([2], [2])


@given(rounds_lists)
def test_counts_equal_counting_by_hand(rounds):
    drafted, accepted, invalid = columns(rounds)
    trials, successes = count_trials(drafted, accepted, K, invalid)
    for j in range(1, K + 1):
        verified = [max(d - v, 0) for d, v in zip(drafted, invalid, strict=True)]
        passed = [min(a, v) for a, v in zip(accepted, verified, strict=True)]
        assert trials[j - 1] == sum(a >= j - 1 and v >= j for a, v in zip(passed, verified, strict=True))
        assert successes[j - 1] == sum(a >= j for a in passed)


@given(rounds_lists, st.integers(0, 60))
def test_batching_makes_no_difference_to_forgetting(rounds, cut):
    drafted, accepted, invalid = columns(rounds)
    whole, parts = AcceptanceCounts(K, 20.0), AcceptanceCounts(K, 20.0)
    whole.observe(drafted, accepted, invalid)
    parts.observe(drafted[:cut], accepted[:cut], invalid[:cut])
    parts.observe(drafted[cut:], accepted[cut:], invalid[cut:])
    assert np.allclose(whole.trials, parts.trials)
    assert np.allclose(whole.successes, parts.successes)


@given(rounds_lists, rounds_lists)
def test_estimates_are_numbers_between_0_and_1_whatever_was_seen(engine_rounds, workload_rounds):
    engine, workload = AcceptanceCounts(K, 50.0), AcceptanceCounts(K, 50.0)
    engine.observe(*columns(engine_rounds))
    workload.observe(*columns(workload_rounds))
    parent = chain_estimate(engine.trials, engine.successes)
    own = shrunk_estimate(workload.trials, workload.successes, parent, 24.0)
    for curve in (parent, own):
        assert ((curve > 0.0) & (curve < 1.0)).all()
        assert (np.diff(survival(curve)) <= 0.0).all()


def test_the_estimate_finds_the_truth_where_accepted_over_drafted_does_not():
    # k follows the past, as a controller's does: long after a good round, short after a bad one. Sessions alternate in quality
    # of nothing; the acceptance is the same throughout, and yet accepted / drafted depends on the rule for k.
    rng = np.random.default_rng(3)
    counts = {}
    for rule, lengths in {"short": rng.integers(1, 3, 20_000), "long": rng.integers(5, K + 1, 20_000)}.items():
        counts[rule] = AcceptanceCounts(K, 1e9)
        accepted = simulate_rounds(rng, TRUTH, lengths)
        counts[rule].observe(lengths, accepted)
        counts[rule].naive = accepted.sum() / lengths.sum()
    assert abs(counts["short"].naive - counts["long"].naive) > 0.2
    short, long = (chain_estimate(c.trials, c.successes) for c in counts.values())
    assert np.allclose(short[:2], TRUTH[:2], atol=0.015)
    assert np.allclose(long, TRUTH, atol=0.04)


def test_a_k_chosen_from_the_past_does_not_bias_the_estimate():
    rng = np.random.default_rng(4)
    counts, k = AcceptanceCounts(K, 1e9), 3
    for _ in range(12_000):
        accepted = simulate_rounds(rng, TRUTH, [k])
        counts.observe([k], accepted)
        k = min(K, k + 1) if accepted[0] == k else max(1, k - 1)
    seen = counts.trials > 500
    assert seen.sum() >= 4
    assert np.allclose(chain_estimate(counts.trials, counts.successes)[seen], TRUTH[seen], atol=0.05)


def test_positions_never_reached_repeat_their_neighbour():
    curve = chain_estimate(np.array([1000.0, 500.0, 0.0, 0.0]), np.array([900.0, 200.0, 0.0, 0.0]))
    assert curve[1] == pytest.approx(0.4, abs=0.01)
    assert curve[2] == curve[3] == curve[1]


def test_a_workload_that_does_better_is_expected_to_do_better_where_it_was_not_seen_yet():
    parent = np.array([0.5, 0.5, 0.5])
    own = shrunk_estimate(np.array([500.0, 0.0, 0.0]), np.array([450.0, 0.0, 0.0]), parent, 24.0)
    assert own[0] == pytest.approx(0.9, abs=0.02)
    assert own[2] > 0.8


def test_without_data_a_workload_is_its_engine():
    assert np.allclose(shrunk_estimate(np.zeros(K), np.zeros(K), TRUTH, 24.0), TRUTH)


@pytest.mark.parametrize("theta", [0.3, 1.0, 3.0])
def test_the_odds_ratio_is_found_at_every_level(theta):
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, K + 1, 20_000)
    accepted = simulate_rounds(rng, scale_odds(TRUTH, theta), lengths)
    trials, successes = count_trials(lengths, accepted, K)
    assert odds_ratio(trials, successes, TRUTH, 8.0) == pytest.approx(theta, rel=0.05)


@pytest.mark.parametrize("strength", [6.0, 30.0])
def test_the_spread_between_requests_is_found(strength):
    rng = np.random.default_rng(6)
    table = RequestTable(K, num_slots=4096)
    for request in range(600):
        own = rng.beta(strength * TRUTH, strength * (1.0 - TRUTH))
        reached, accepted = reached_and_accepted(np.full(40, K), simulate_rounds(rng, own, np.full(40, K)), K)
        table.observe(np.full(40, request, dtype=np.uint64), reached, accepted)
    assert strength * 0.7 < table.strength() < strength * 1.4
    assert table.design_effect(table.strength()) > 1.5


@pytest.mark.parametrize("strength", [2.0, 9.0])
def test_rounds_of_a_request_add_up_to_what_correlated_trials_say(strength):
    rng, table, found = np.random.default_rng(12), RequestTable(1), {}
    requests = rng.integers(1, 6, 300).astype(np.uint64)
    reached = (rng.random(300) < 0.7).astype(np.int64)
    for begin, end in ((0, 3), (3, 60), (60, 61), (61, 300)):  # however rounds are batched
        told = table.information(requests[begin:end], reached[begin:end], strength)
        assert (told[reached[begin:end] == 0] == 0.0).all()
        for request, gained in zip(requests[begin:end].tolist(), told.tolist(), strict=True):
            found.setdefault(request, []).append(gained)
        table.observe(requests[begin:end], reached[begin:end], np.zeros(end - begin, dtype=np.int64))
    rho = 1.0 / (1.0 + strength)
    for request, gained in found.items():
        count = int(reached[requests == request].sum())
        assert sum(gained) == pytest.approx(count / (1.0 + (count - 1) * rho))
        tried = [one for one in gained if one]
        assert tried[0] == pytest.approx(1.0)
        assert tried == sorted(tried, reverse=True)
    assert not len(table.information(requests[:0], reached[:0], strength))


def test_weighted_rounds_are_as_many_rounds():
    rng = np.random.default_rng(13)
    drafted = rng.integers(0, K + 1, 50)
    accepted = simulate_rounds(rng, TRUTH, drafted)
    thrice, weighted = AcceptanceCounts(K, 1e9), AcceptanceCounts(K, 1e9)
    thrice.observe(np.repeat(drafted, 3), np.repeat(accepted, 3))
    weighted.observe(drafted, accepted, weights=np.full(50, 3.0))
    assert np.allclose(thrice.trials, weighted.trials)
    assert np.allclose(thrice.successes, weighted.successes)


def test_equal_requests_need_no_curve_of_their_own():
    rng = np.random.default_rng(7)
    successes = rng.binomial(50, 0.7, size=(200, 1)).astype(float)
    assert strength_between(np.full((200, 1), 50.0), successes) > 100.0
    assert strength_between(np.zeros((4, K)), np.zeros((4, K))) == 512.0


def test_a_request_table_stays_bounded_and_forgets_whom_it_replaced():
    table = RequestTable(2, num_slots=4)
    table.observe(np.array([1, 5], dtype=np.uint64), np.array([2, 2]), np.array([2, 2]))  # both map to slot 1
    assert table.trials.sum() == 2.0
    table.observe(np.array([2**64 - 1], dtype=np.uint64), np.array([1]), np.array([0]))
    assert table.trials[3].tolist() == [1.0, 0.0]
    for _ in range(6):  # the first one has ended, and the other gets its slot
        table.observe(np.array([5], dtype=np.uint64), np.array([1]), np.array([0]))
    assert 1.0 <= table.trials[1, 0] <= 3.0
    assert table.trials[1, 1] == 0.0


@pytest.mark.fault("two running requests of one slot erased each other")
@pytest.mark.parametrize("order", [(1, 513), (513, 1)])
@pytest.mark.parametrize("at_once", [True, False])
def test_of_two_running_requests_of_one_slot_one_is_counted(order: tuple[int, int], at_once: bool):
    """Both began anew with every batch, and counted as new requests for ever: for 98 % of all evidence at 16 requests."""
    table, rounds, gained = RequestTable(1), np.repeat(np.array(order, dtype=np.uint64), 8), np.zeros(2)
    one = np.ones(len(rounds), dtype=np.int64)
    for batch in range(10):
        mine = np.ones(16, dtype=bool) if at_once else rounds == order[batch % 2]
        asked = rounds[mine], one[mine]
        information = table.information(*asked, strength=10.0)
        gained += [float(information[rounds[mine] == request].sum()) for request in order]
        table.observe(*asked, one[mine])
    owner = int(table.owner[1])
    assert table.trials[1, 0] == (80 if at_once else 40)
    assert gained[order.index(owner)] == pytest.approx(table.trials[1, 0] / (1 + (table.trials[1, 0] - 1) / 11))
    assert gained[1 - order.index(owner)] == 0.0


def test_running_requests_are_counted_as_what_they_are_whatever_their_hashes():
    """Long requests that differ from the many short ones don't outweigh them."""
    rng = np.random.default_rng(3)
    found = []
    for keys in (np.arange(1, 257, dtype=np.uint64), rng.integers(1, 2**63, 256).astype(np.uint64)):
        table, total = RequestTable(1), 0.0
        requests = np.repeat(keys, 4)
        for _ in range(30):
            reached = np.ones(len(requests), dtype=np.int64)
            total += float(table.information(requests, reached, 10.0).sum())
            table.observe(requests, reached, reached)
        found.append(total)
    distinct, hashed = found
    assert 0.6 * distinct < hashed < distinct


def test_acceptance_length_counts_the_bonus_token():
    assert acceptance_length(np.array([0.5, 0.5])) == pytest.approx(1.75)
    assert acceptance_length(np.array([0.5, 0.5]), 1) == pytest.approx(1.5)
    assert acceptance_length(np.array([0.5, 0.5]), 0) == 1.0


def test_what_is_expected_of_a_round_comes_from_the_rounds_before_it() -> None:
    rng, table, curve, strength = np.random.default_rng(1), RequestTable(K), np.linspace(0.8, 0.5, K), 3.0
    information = float(survival(curve) @ (1.0 - curve))
    failed: dict[int, float] = {}
    passed: dict[int, float] = {}
    for _ in range(5):
        requests = rng.integers(0, 12, 40).astype(np.uint64)
        drafted = rng.integers(0, K + 1, 40)
        reached, accepted = reached_and_accepted(drafted, simulate_rounds(rng, curve, drafted), K)
        expected = []
        for request, tried, got in zip(requests.tolist(), reached.tolist(), accepted.tolist(), strict=True):
            f, p = failed.setdefault(request, 0.0), passed.setdefault(request, 0.0)
            expected.append((strength * information + f) / (strength * information + p))
            failed[request] += float(curve[tried - 1]) if tried > got else 0.0
            passed[request] += float((1.0 - curve[:got]).sum())
        assert table.theta(requests, reached, accepted, curve, strength) == pytest.approx(np.clip(expected, 1 / 12, 12.0))
        table.observe(requests, reached, accepted)
    assert table.theta(np.zeros(0, np.uint64), np.zeros(0, int), np.zeros(0, int), curve, strength).shape == (0,)
