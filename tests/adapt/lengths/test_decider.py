import itertools
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.lengths import compiled
from honed.adapt.lengths.block_size import choose
from honed.adapt.lengths.decider import Decider
from honed.adapt.lengths.explore import TRIAL_STEPS
from honed.adapt.protocol.wire import Policy, WorkloadPrior
from honed.adapt.steps.step_time import StepTimeModel
from tests.adapt.simulate import simulate_rounds

K = 7
STEP_SECONDS = list(StepTimeModel.of(base=5e-3, per_token=3e-4, drafting=5e-4, per_block_token=1e-4).parameters)


def make_policy(**changes):
    figures = dict(
        generation=1,
        ttl_s=10.0,
        kind="goodput",
        static_k=4,
        max_k=K,
        step_seconds=STEP_SECONDS,
        priors=[
            WorkloadPrior(workload="", acceptance=[0.6] * K),
            WorkloadPrior(workload="good", acceptance=[0.95] * K),
            WorkloadPrior(workload="bad", acceptance=[0.05] * K),
        ],
        explore_share=0.0,
    )
    return Policy(**{**figures, **changes})


def make_decider(policy=None, now_s=0.0, **figures):
    decider = Decider(K, 8, **figures)
    decider.set_policy(policy, now_s)
    return decider


def test_without_a_policy_everybody_gets_what_the_engine_was_configured_for():
    decision = make_decider().decide(["a", "b"], 10, 0, 0.0)
    assert (decision.num_draft_tokens, decision.block, decision.reason) == ([K, K], K, "no_policy")


def test_a_stale_policy_falls_back_to_its_static_length_and_a_refresh_ends_that():
    decider = make_decider(make_policy(ttl_s=10.0), now_s=100.0)
    assert decider.decide(["a"], 10, 0, 110.0).reason == "policy"
    assert decider.decide(["a"], 10, 0, 110.1) == type(decider.decide([], 0, 0, 110.1))([4], 4, "stale_policy")
    assert decider.fallback == "stale_policy"
    decider.set_policy(make_policy(ttl_s=10.0), 111.0)
    assert decider.fallback == ""
    assert decider.decide(["a"], 10, 0, 112.0).reason == "policy"


@pytest.mark.fault("an override that outlives its daemon")
@pytest.mark.parametrize("changes", [{"static_k": 0}, {"kind": "off"}])
def test_with_a_policy_its_override_expires(changes):
    decider = make_decider(make_policy(**({"kind": "static", "override": "draft_tokens", "fallback_k": 5} | changes)))
    decider.decide(["a"], 10, 0, 9.0)
    decision = decider.decide(["a"], 10, 0, 11.0)
    assert (decision.num_draft_tokens, decision.reason) == ([5], "stale_policy")
    for fallback_k, length in ((-1, 4), (0, 0), (99, 6)):
        decider.set_policy(make_policy(fallback_k=fallback_k, max_k=6), 0.0)
        assert decider.decide(["a"], 10, 0, 11.0).num_draft_tokens == [length]


def test_a_policys_time_to_live_begins_when_it_arrives_and_not_when_the_engine_looks_at_it():
    decider = Decider(K, 8)
    decider.use(decider.tabulate(make_policy(), 0.0))  # arrived in a step that took as long as one likes
    assert decider.decide(["a"], 10, 0, 11.0).reason == "stale_policy"
    again = decider.tabulate(make_policy(), 12.0)
    assert decider.decide(["a"], 10, 0, 13.0).reason == "stale_policy"
    decider.use(again)
    assert (decider.policy_age(20.0), decider.decide(["a"], 10, 0, 20.0).reason) == (8.0, "policy")
    assert decider.decide(["a"], 10, 0, 22.1).reason == "stale_policy"


def test_nothing_is_compiled_in_the_middle_of_a_step() -> None:
    """`prepare` compiles for exactly the types that deciding and learning pass, or the engine would stand still for seconds."""
    compiled.prepare()
    called = [function for function in vars(compiled).values() if hasattr(function, "signatures")]
    before = [len(function.signatures) for function in called]
    for changes in ({}, {"hysteresis": 0.05}, {"kind": "latency"}, {"kind_effects": [(4, 2, 0.1)]}, {"equal_lengths": True}):
        decider, ids = make_decider(make_policy(**changes)), ["a", "b"]
        decider.requests.slots_of(ids)
        for _ in range(3):
            lengths = decider.decide(ids, -1, 0, 0.0, [10, 20]).num_draft_tokens
            decider.observe(ids, lengths, [0, 0])
            decider.decide(ids, 30, 100, 0.0)
    assert [len(function.signatures) for function in called] == before


@pytest.mark.parametrize("captured_lengths", [[3], [4, 7], [1, 6]])
def test_lengths_between_those_that_are_captured_have_their_trials(captured_lengths):
    """A request's ceiling may lie between two of them: then the step's length is none of them."""
    decider = make_decider(make_policy(equal_lengths=True, captured_lengths=captured_lengths, explore_share=1.0))
    for request_id, ceiling in (("a", 2), ("b", 5)):
        decider.start(request_id, "good", ceiling)
    for _ in range(200):
        for ids in (["a"], ["b"], ["a", "b"]):
            lengths = decider.decide(ids, -1, 0, 0.0, [10] * len(ids)).num_draft_tokens
            assert all(length <= {"a": 2, "b": 5}[request_id] for request_id, length in zip(ids, lengths, strict=True))
            decider.observe(ids, lengths, lengths)


@pytest.mark.fault("labels that run out")
def test_workloads_that_come_and_go_do_not_use_the_labels_up():
    decider, rows = make_decider(make_policy()), {"": 0, "good": 1, "bad": 2}
    decider.start("old", "bad")
    for number in range(3000):
        decider.start(f"r{number}", f"w{number}")
        decider.finish(f"r{number}")
    decider.start("new", "good")
    beliefs = decider.requests
    row_of = {name: int(beliefs.known["row"][slot]) for name, slot in beliefs.slot_of.items()}
    assert row_of == {"old": rows["bad"], "new": rows["good"]}
    assert len(beliefs._labels) <= 1024
    reversed_priors = make_policy(priors=[make_policy().priors[row] for row in (0, 2, 1)])
    decider.set_policy(reversed_priors, 0.0)
    assert {name: int(beliefs.known["row"][slot]) for name, slot in beliefs.slot_of.items()} == {"old": 1, "new": 2}
    for number in range(2000):  # all of them at once: those beyond count as without a label
        decider.start(f"r{number}", f"w{number}")
    assert len(beliefs._labels) == 1024
    decider.decide([f"r{number}" for number in range(2000)], -1, 0, 0.0)


def test_staleness_is_noticed_while_the_engine_is_idle():
    decider = make_decider(make_policy(), now_s=0.0)
    assert (decider.policy_age(3.0), decider.fallback) == (3.0, "")
    assert (decider.policy_age(30.0), decider.fallback) == (30.0, "stale_policy")
    decider.set_policy(None, 31.0)
    assert (decider.policy_age(32.0), decider.fallback) == (-1.0, "no_policy")


@pytest.mark.parametrize(
    ("changes", "length", "reason", "fallback"),
    [
        ({"kind": "static"}, 4, "static", ""),
        ({"kind": "static", "override": "draft_tokens", "static_k": 2}, 2, "override", ""),
        ({"kind": "static", "static_k": 99}, K, "static", ""),
        ({"kind": "static", "static_k": -3}, 0, "static", ""),
        ({"kind": "static", "max_k": 3}, 3, "static", ""),
        ({"kind": "static", "request_ceiling": 1}, 1, "static", ""),
        ({"kind": "off"}, K, "off", ""),
        ({"step_seconds": []}, 4, "cold", ""),
        ({"step_seconds": [1.0, 2.0]}, 4, "cold", ""),
        ({"kind": "a kind of the future"}, 4, "static", ""),
    ],
)
def test_kinds_of_policy(changes, length, reason, fallback):
    decider = make_decider(make_policy(**changes))
    decision = decider.decide(["a", "b", "c"], 10, 0, 1.0)
    assert (decision.num_draft_tokens, decision.block, decision.reason) == ([length] * 3, length, reason)
    assert decider.fallback == fallback


def test_without_exploring_a_cold_policy_tries_nothing_else():
    decider = make_decider(make_policy(step_seconds=[], explore_share=0.0))
    assert {decider.decide(["a"], 10, 0, 0.0).reason for _ in range(100)} == {"cold"}


def test_equal_lengths_are_priced_at_the_noted_contexts():
    """The longer the contexts, the more a round costs anyway, and the more drafts are worth it."""

    def lengths(context_tokens):
        step_seconds = list(StepTimeModel.of(base=1e-3, per_token=1e-3, per_context_token=1e-6).parameters)
        decider = make_decider(make_policy(equal_lengths=True, step_seconds=step_seconds))
        return decider.decide(["a", "b"], context_tokens, 0, 0.0, [20000, 20000]).num_draft_tokens

    assert lengths(-1) == lengths(40000) != lengths(0)


def test_requests_get_lengths_by_their_workload():
    decider = make_decider(make_policy())
    decider.start("x", "good")
    decider.start("y", "bad")
    good, bad = decider.decide(["x", "y"], 10, 0, 0.0).num_draft_tokens
    assert good > bad


def test_a_request_that_does_better_than_its_workload_gets_more():
    decider = make_decider(make_policy(hysteresis=0.0))
    ids = ["lucky", "unlucky"]
    before = decider.decide(ids, 10, 0, 0.0).num_draft_tokens
    for _ in range(30):
        decider.observe(ids, [5, 5], [5, 0])
    after = decider.decide(ids, 10, 0, 0.0).num_draft_tokens
    assert after[0] > before[0] == before[1] > after[1]


def test_only_finished_rounds_inform_a_decision():
    # The same history gives the same decision however often, and about whatever else, one asked in between.
    def run(is_asking):
        decider, decisions = make_decider(make_policy(hysteresis=0.0)), []
        rng = np.random.default_rng(0)
        for step in range(50):
            decision = decider.decide(["a", "b"], 10, 0, float(step) / 100)
            if is_asking:
                decider.decide(["a"], 999, 50, float(step) / 100)
            accepted = simulate_rounds(rng, [0.7] * K, [5, 5])
            decider.observe(["a", "b"], [5, 5], accepted)
            decisions.append(decision.num_draft_tokens)
        return decisions

    assert run(False) == run(True)


def test_exploration_has_its_share_is_repeatable_and_includes_no_draft_at_all():
    def run(seed):
        decider = make_decider(make_policy(explore_share=0.2), seed=seed)
        return [decider.decide(["a", "b"], 10, 0, 0.0) for _ in range(2000)]

    decisions = run(1)
    explored = [d for d in decisions if d.reason == "explore"]
    assert 200 < len(explored) < 500  # some alone, most in trials of lengths that are as good
    assert decisions == run(1) != run(2)
    assert {d.block for d in explored} >= {0}
    assert len({tuple(d.num_draft_tokens) for d in explored}) >= 3


def test_a_cold_model_is_explored_too_since_it_learns_from_variation_alone():
    decider = make_decider(make_policy(explore_share=0.2, step_seconds=[]))
    lengths = {decider.decide(["a"], 10, 0, 0.0).block for _ in range(300)}
    assert {0, 2, 3, 4, 5} <= lengths


def test_drafting_that_does_not_pay_is_tried_again_now_and_then():
    decider = make_decider(make_policy(explore_share=0.2, priors=[WorkloadPrior(workload="", acceptance=[0.01] * K)]))
    blocks = [decider.decide(["a"] * 1, 10, 0, 0.0).block for _ in range(300)]
    assert blocks.count(0) > 200
    assert max(blocks) >= 1


@pytest.mark.parametrize("is_equal", [False, True])
def test_while_two_drafters_are_compared_those_without_drafts_get_some(is_equal):
    def decisions(compare_share, workloads, ceiling=-1):
        decider = make_decider(make_policy(compare_share=compare_share, equal_lengths=is_equal, captured_lengths=[2, 5]))
        for name in workloads:
            decider.start(name, name)
        decider.start("limited", workloads[0], ceiling)
        return [decider.decide([*workloads, "limited"], 10, 0, 0.0) for _ in range(2000)]

    def drafted(decisions, at):
        return [d.num_draft_tokens[at] for d in decisions if d.num_draft_tokens[at]]

    assert not drafted(decisions(0.0, ["bad"]), 0)
    compared = decisions(0.1, ["bad"])
    assert 140 < len(drafted(compared, 0)) < 260
    assert set(drafted(compared, 0)) == {2 if is_equal else 1}
    assert {d.reason for d in compared if d.block} == {"explore"}
    without = decisions(0.1, ["bad"], ceiling=0)
    assert drafted(without, 0)
    assert not drafted(without, 1)  # what a client forbade stays forbidden
    good = decisions(0.0, ["good"])[0]
    assert decisions(0.1, ["good"]) == [good] * 2000  # nobody is without drafts
    beside_none = decisions(0.1, ["good"], ceiling=0)
    assert beside_none == [beside_none[0]] * 2000


def test_beside_requests_with_drafts_few_of_those_without_get_one():
    good, bad = [[f"{name}{number}" for number in range(count)] for name, count in (("good", 20), ("bad", 30))]

    def lengths(compare_share):
        decider = make_decider(make_policy(compare_share=compare_share))
        for name in (*good, *bad):
            decider.start(name, name.rstrip("0123456789"))
        return np.array([decider.decide([*good, *bad], 10, 0, 0.0).num_draft_tokens for _ in range(50)])

    before, compared = lengths(0.0), lengths(1.0)
    assert before[:, :20].min() > 1
    assert (before[:, 20:] == 0).all()
    assert (compared[:, :20] == before[:, :20]).all()
    assert compared[:, 20:].max() == 1
    assert (compared[:, 20:].sum(axis=1) == 16).all()


def acceptance_of_margin(margin):
    """That with which drafting is predicted to beat not drafting by so much, for one request."""
    low, high, model = 0.01, 0.95, StepTimeModel(tuple(STEP_SECONDS))
    for _ in range(40):
        middle = 0.5 * (low + high)
        is_above = choose(np.cumprod([[middle] * K], axis=1), model, context_tokens=10).margin > margin
        low, high = (low, middle) if is_above else (middle, high)
    return low


def run_lengths(decisions, is_wanted):
    """Lengths of the runs of decisions that are wanted."""
    return [len(list(run)) for wanted, run in itertools.groupby(decisions, is_wanted) if wanted]


@pytest.mark.parametrize(("margin", "is_drafting"), [(0.07, True), (-0.03, False)])
def test_where_the_choice_is_even_the_other_side_is_tried_for_some_steps_in_a_row(margin, is_drafting):
    def share_and_runs(margin, explore_share):
        priors = [WorkloadPrior(workload="", acceptance=[acceptance_of_margin(margin)] * K)]
        decider = make_decider(make_policy(priors=priors, explore_share=explore_share))
        decisions = [decider.decide(["a"], 10, 0, 0.0) for _ in range(8000)]
        assert sum((d.block > 0) == is_drafting for d in decisions) > 4000
        runs = run_lengths(decisions, lambda d: d.reason == "explore" and (d.block == 0) == is_drafting)
        return sum(runs) / len(decisions), runs

    share, runs = share_and_runs(margin, 0.02)
    assert 0.02 < share < 0.15
    assert max(runs) >= TRIAL_STEPS
    assert sum(length >= TRIAL_STEPS for length in runs) > 40
    assert share_and_runs(3.0 * margin if is_drafting else 20.0 * margin, 0.02)[0] < 0.5 * share
    assert share_and_runs(margin, 0.0) == (0.0, [])


@pytest.mark.parametrize("requests", [["a"], ["a", "b"]])
def test_lengths_that_are_nearly_as_good_are_tried(requests):
    def tried(explore_share):
        decider = make_decider(make_policy(explore_share=explore_share))
        best = make_decider(make_policy()).decide(requests, 10, 0, 0.0).num_draft_tokens
        decisions = [decider.decide(requests, 10, 0, 0.0).num_draft_tokens for _ in range(4000)]
        runs = run_lengths(decisions, lambda lengths: lengths != best and 0 not in lengths)
        return sum(length >= TRIAL_STEPS for length in runs), {max(lengths) for lengths in decisions}

    num_trials, lengths = tried(0.02)
    assert num_trials > 20
    assert {2, 3, 4, 5} <= lengths
    assert tried(0.0)[0] == 0


@given(
    st.lists(st.integers(-1, 9), min_size=1, max_size=12),
    st.sampled_from(["goodput", "static"]),
    st.integers(-1, 9),
    st.integers(0, 9),
    st.floats(0.0, 1.0),
)
def test_ceilings_hold_in_every_mode(ceilings, kind, request_ceiling, max_k, explore_share):
    decider = make_decider(make_policy(kind=kind, request_ceiling=request_ceiling, max_k=max_k, explore_share=explore_share))
    ids = [f"r{i}" for i in range(len(ceilings))]
    for request_id, ceiling in zip(ids, ceilings, strict=True):
        decider.start(request_id, "good", ceiling)
    for _ in range(10):
        decision = decider.decide(ids, 10, 0, 0.0)
        assert decision.block == max(decision.num_draft_tokens)
        for length, ceiling in zip(decision.num_draft_tokens, ceilings, strict=True):
            limits = [K, max_k] + [n for n in (ceiling, request_ceiling) if n >= 0]
            assert 0 <= length <= min(limits)


def test_a_thousand_requests_and_none():
    decider = make_decider(make_policy())
    ids = [f"r{i}" for i in range(1024)]
    assert len(decider.decide(ids, 500_000, 2000, 0.0).num_draft_tokens) == 1024
    assert decider.decide([], 0, 512, 0.0).num_draft_tokens == []
    for request_id in ids:
        decider.finish(request_id)
    assert not decider.requests.slot_of
    assert sorted(decider.requests.free) == list(range(1024))


def test_a_slot_that_is_used_again_knows_nothing_of_its_former_request():
    decider = make_decider(make_policy(hysteresis=0.0))
    fresh = decider.decide(["first"], 10, 0, 0.0)
    for _ in range(50):
        decider.observe(["first"], [5], [0])
    assert decider.decide(["first"], 10, 0, 0.0) != fresh
    decider.finish("first")
    assert decider.decide(["second"], 10, 0, 0.0) == fresh


def test_starting_twice_changes_nothing():
    decider = make_decider(make_policy())
    decider.start("x", "good", 3)
    decider.start("x", "bad", 0)
    assert decider.decide(["x"], 10, 0, 0.0).num_draft_tokens == [3]


numbers = st.one_of(st.floats(), st.just(float("nan")), st.floats(0.0, 1.0))
priors = st.builds(WorkloadPrior, workload=st.just("w"), acceptance=st.lists(numbers, max_size=12), strength=numbers)
policies = st.builds(
    Policy,
    generation=st.just(1),
    ttl_s=numbers,
    explore_share=numbers,
    compare_share=numbers,
    hysteresis=numbers,
    kind=st.sampled_from(["goodput", "static", "off", ""]),
    static_k=st.integers(-99, 99),
    max_k=st.integers(-99, 99),
    request_ceiling=st.integers(-5, 99),
    priors=st.lists(priors, max_size=3),
    step_seconds=st.one_of(st.lists(numbers, max_size=20), st.just(STEP_SECONDS)),
    captured_tokens=st.lists(st.integers(-5, 600), max_size=5),
    captured_lengths=st.lists(st.integers(-5, 600), max_size=5),
    equal_lengths=st.booleans(),
    equal_up_to=st.integers(-5, 9),
)


@given(policies, numbers, st.integers(-5, 10**9), st.integers(-5, 10**6))
def test_no_policy_however_odd_breaks_a_decision(policy, now_s, context, prefill):
    decider = make_decider(policy, now_s=now_s)
    decider.observe(["a", "b", "a"], [3, 99, 0], [99, -1, 5])
    for _ in range(3):
        lengths = decider.decide(["a", "b", "c"], context, prefill, now_s).num_draft_tokens
        assert len(lengths) == 3
        assert all(0 <= k <= K for k in lengths)


def test_without_draft_tokens_there_is_nothing_to_decide():
    decider = Decider(0, 4)
    decider.set_policy(make_policy(), 0.0)
    decider.observe(["a"], [0], [0])
    assert decider.decide(["a"], 1, 0, 0.0).num_draft_tokens == [0]


def test_a_refresh_of_the_same_policy_keeps_the_operating_point():
    policy = make_policy()
    decider = make_decider(policy)
    decider.decide(["a"], 10, 0, 0.0)
    model = decider._model
    decider.set_policy(msgspec.structs.replace(policy), 1.0)
    assert decider._model is model


def test_learning_from_few_rounds_at_a_time_is_the_same_as_from_many():
    policy = make_policy()
    workloads = ["", "good", "bad", "unheard of"]
    ids = [f"r{i}" for i in range(100)]
    together, apart = make_decider(policy), make_decider(policy)
    for decider in (together, apart):
        for i, request_id in enumerate(ids):
            decider.start(request_id, workloads[i % 4])
    rng = np.random.default_rng(0)
    for _ in range(20):
        drafted = rng.integers(-1, K + 2, len(ids)).tolist()
        accepted = [int(rng.integers(-1, max(k, 0) + 2)) for k in drafted]
        together.observe(ids, drafted, accepted)
        for at in range(0, len(ids), 10):
            apart.observe(ids[at : at + 10], drafted[at : at + 10], accepted[at : at + 10])
    np.testing.assert_allclose(apart.requests.known["failures"], together.requests.known["failures"])
    np.testing.assert_allclose(apart.requests.known["successes"], together.requests.known["successes"])
    assert together.decide(ids, 1000, 0, 0.0) == apart.decide(ids, 1000, 0, 0.0)


def test_what_is_learned_are_sums_over_the_requests_own_rounds():
    decider, curve = make_decider(make_policy()), np.array(make_policy().priors[1].acceptance)
    decider.start("r", make_policy().priors[1].workload)
    failures = successes = 0.0
    for drafted, accepted in [(3, 1), (K, K), (0, 0), (2, 0), (5, 5)]:
        decider.observe(["r"], [drafted], [accepted])
        if drafted:
            failures *= np.exp(-1.0 / 128.0)
            successes *= np.exp(-1.0 / 128.0)
            failures += curve[accepted] if accepted < drafted else 0.0
            successes += (1.0 - curve[:accepted]).sum()
    assert decider.requests.known["failures"][0] == pytest.approx(failures)
    assert decider.requests.known["successes"][0] == pytest.approx(successes)


@pytest.mark.parametrize("count", [3, 100])
def test_a_request_that_ends_in_the_step_that_is_learned_from_leaves_nothing_behind(count):
    """Regression: its last round took it up again, for ever."""
    decider, ids = make_decider(make_policy()), [f"r{i}" for i in range(count)]
    for request_id in ids:
        decider.start(request_id)
    lengths = decider.decide(ids, 1000, 0, 0.0).num_draft_tokens
    decider.finish(ids[1])
    decider.observe(ids, lengths, [0] * count)
    assert sorted(decider.requests.slot_of) == sorted(set(ids) - {ids[1]})
    decider.start("new")
    slot = decider.requests.slot_of["new"]
    assert decider.requests.known["failures"][slot] == decider.requests.known["successes"][slot] == 0.0


def test_slots_are_found_however_a_batch_changes():
    decider, rng, running = make_decider(make_policy()), np.random.default_rng(3), []
    for number in range(300):
        for request_id in [r for r in running if rng.random() < 0.1]:
            decider.finish(request_id)
            running.remove(request_id)
        for request_id in (f"r{number}", f"s{number}"):
            decider.start(request_id)
            running.insert(int(rng.integers(0, len(running) + 1)) if rng.random() < 0.2 else len(running), request_id)
        if running and rng.random() < 0.1:  # over, and back at once
            decider.finish(running[0])
            decider.start(f"other{number}")
            decider.start(running[0])
        assert len(decider.requests._left) <= len(decider.requests._last_ids)
        if number % 50 >= 40:
            continue
        asked = [r for r in running if rng.random() < 0.9]
        assert decider.requests.slots_of(asked).tolist() == [decider.requests.slot_of[r] for r in asked]
        assert len(set(decider.requests.slots_of(asked).tolist())) == len(asked)


def test_only_who_runs_learns_however_a_batch_changes():
    """A request's rounds count for it alone, though its slot is another's the moment it is over."""
    decider, rng, running, contexts = make_decider(make_policy()), np.random.default_rng(4), [], {}

    def come_in(request_id):
        decider.start(request_id)
        decider.requests.note_context(request_id, 10)
        running.append(request_id)
        contexts[request_id] = 10

    for number in range(300):
        come_in(f"r{number}")
        decider.requests.slots_of(running)
        seen = [r for r in running if rng.random() < 0.95] if number % 3 == 0 else list(running)
        for request_id in [r for r in running if rng.random() < 0.1]:
            decider.finish(request_id)
            running.remove(request_id)
        if number % 2:  # a request comes in before the step's rounds are learned from, as when vLLM schedules ahead
            come_in(f"s{number}")
        decider.observe(seen, [3] * len(seen), [2] * len(seen))
        for request_id in seen:
            contexts[request_id] += 2  # the third is counted on when the round is decided
        for request_id in running:
            slot = decider.requests.slot_of[request_id]
            assert decider.requests.context[slot] == contexts[request_id]
            assert (decider.requests.known["failures"][slot] > 0.0) == (contexts[request_id] > 10)


def test_contexts_that_were_noted_count_as_those_that_are_told():
    ids, told, noted = [f"r{i}" for i in range(90)], make_decider(make_shifted_policy()), make_decider(make_shifted_policy())
    contexts = [100 + 97 * i for i in range(len(ids))]
    for request_id, context in zip(ids, contexts, strict=True):
        noted.start(request_id)
        noted.requests.note_context(request_id, context)
    noted.requests.note_context("unheard of", 5)
    assert noted.requests.noted_tokens(ids) == sum(contexts)
    assert noted.decide(ids, -1, 0, 0.0) == told.decide(ids, sum(contexts), 0, 0.0, contexts)
    before = noted.requests.noted_tokens(ids)
    noted.requests.advance([ids[3], "unheard of", ids[1]], [3, 9, 0])
    assert noted.requests.noted_tokens(ids) == before + 3


KINDS = [
    {"kind": "static", "static_k": K},
    {"kind": "goodput"},
    {"kind": "goodput", "explore_share": 1.0},
    {"kind": "goodput", "step_seconds": [], "static_k": K},
    {"kind": "latency"},
    {"kind": "table", "static_k": K},
    {"kind": "table", "table": [(1000, K)]},
    {"ttl_s": -1.0, "static_k": K},
]


@pytest.mark.fault("drafts past what a request can take")
@pytest.mark.parametrize("changes", KINDS)
@pytest.mark.parametrize("others", [1, 100])
def test_nobody_gets_more_drafts_than_it_can_still_take(changes, others):
    """A round samples one token beside its drafts, and so does the step that is under way when it is decided.

    Where decisions don't read contexts, what is near its end is named once the step's rounds are known.
    """
    decider = make_decider(make_policy(**changes))
    more = [f"r{i}" for i in range(others)]
    for request_id in ("ends", *more):
        decider.start(request_id, "good")
        decider.requests.note_context(request_id, 100)
    decider.requests.note_context("ends", 100, end=106)
    ids, known, lengths = ["ends", *more], 100, []
    while known < 106:
        contexts = [known] if decider.reads_contexts else None
        decision = decider.decide(ids, -1, 0, 0.0, contexts, 0, len(ids))
        known += 1
        assert decision.block == max(decision.num_draft_tokens)
        length = decision.num_draft_tokens[0]
        assert length <= max(106 - known - 1, 0) or contexts is None
        decider.observe(ids, [1] * len(ids), [1, *[0] * others])  # it accepts one draft a round, and so gets two tokens
        known += 1
        lengths.append(min(length, dict(decider.requests.ending).get("ends", K)))
        assert lengths[-1] <= max(106 - known - 1, 0)
    assert lengths[-1] == 0
    if changes.get("kind") != "goodput":
        assert lengths[0] > 0
    decider.finish("ends")
    assert decider.requests.num_ceilings == 0


@pytest.mark.fault("drafts past what a request can take")
@pytest.mark.parametrize("most", [1, 3, 12])
def test_requests_near_their_end_are_found_alike_whether_or_not_contexts_are_noted(most):
    rng, policy = random.Random(7), make_policy(kind="static", static_k=K)
    waits, looks = make_decider(policy), make_decider(policy)
    tokens, end, ids, num_short = {}, {}, [], 0
    for step in range(2000):
        while len(ids) < rng.randint(1, most):
            request_id = f"r{step}-{len(ids)}"
            ids, tokens[request_id] = [*ids, request_id], 50
            end[request_id] = 50 + rng.randint(1, 600)
            for decider in (waits, looks):
                decider.start(request_id)
                decider.requests.note_context(request_id, 50, end[request_id])
        batch = ids if rng.random() < 0.9 else [one for one in ids if rng.random() < 0.5]
        every = max(-(-len(batch) // 4), 1)
        noted = [tokens[one] for one in batch[step % every :: every]], step % every, every
        lengths = looks.decide(batch, -1, 0, 0.0, *noted).num_draft_tokens
        num_short += min(lengths, default=K) < K
        longer = waits.decide(batch, -1, 0, 0.0).num_draft_tokens
        assert all(length <= most for length, most in zip(lengths, longer, strict=True))
        accepted = [rng.randint(0, length) for length in lengths]
        for decider in (waits, looks):
            decider.observe(batch, lengths, accepted)
        for one, count in zip(batch, accepted, strict=True):
            tokens[one] += count + 1
        if batch:
            assert waits.requests.ending == looks.requests.ending
            left = [(one, max(end[one] - tokens[one] - 1, 0)) for one in batch]
            assert waits.requests.ending == [(one, room) for one, room in left if room < K]
        for one in [one for one in ids if tokens[one] >= end[one]]:
            ids = [other for other in ids if other != one]
            for decider in (waits, looks):
                decider.finish(one)
    assert 10 < num_short < 2000


def test_a_request_that_goes_on_after_its_end_gets_its_own_most_drafts_again():
    decider = make_decider(make_policy(kind="static", static_k=K))
    for request_id, ceiling in (("s", -1), ("t", 3)):
        decider.start(request_id, ceiling=ceiling)
        decider.requests.note_context(request_id, 10, end=12)
    assert decider.decide(["s", "t"], -1, 0, 0.0).num_draft_tokens == [0, 0]
    for request_id in ("s", "t"):
        decider.requests.note_context(request_id, 20, end=50)
    assert decider.decide(["s", "t"], -1, 0, 0.0).num_draft_tokens == [K, 3]
    assert decider.requests.num_ceilings == 1


@pytest.mark.fault("drafts past what a request can take")
@pytest.mark.parametrize(
    "changes",
    [{"kind": "static", "static_k": K}, {}, {"kind": "table", "table": [(3, K)]}, {"step_seconds": [], "static_k": K}],
)
def test_equal_lengths_stay_equal_and_stop_where_nobody_can_take_more(changes):
    decider = make_decider(make_policy(equal_lengths=True, captured_lengths=[2, 4, K], **changes))
    for request_id, end in (("a", 104), ("b", 107)):
        decider.start(request_id, "good")
        decider.requests.note_context(request_id, 100, end)
    decider.start("c", "good")
    before = decider.decide(["c"], -1, 0, 0.0).num_draft_tokens
    assert before[0] > 4
    assert decider.decide(["a", "b", "c"], -1, 0, 0.0).num_draft_tokens == before * 3, "one of them can take all"
    decider.finish("c")
    assert decider.decide(["a", "b"], -1, 0, 0.0).num_draft_tokens == [4, 4]  # b has 102 for certain by now


@pytest.mark.parametrize("kind", ["goodput", "latency"])
def test_where_no_graph_holds_so_many_requests_lengths_are_free(kind):
    """On a default CUDA server they were 0 or K at any load."""
    decider = make_decider(make_policy(kind=kind, equal_lengths=True, captured_lengths=[K], equal_up_to=2, hysteresis=0.0))
    for request_id, workload in zip("abcd", ("good", "bad", "good", "bad"), strict=True):
        decider.start(request_id, workload)
        decider.requests.note_context(request_id, 100, 10_000)
    few, many = (decider.decide(list(ids), -1, 0, 0.0).num_draft_tokens for ids in ("ab", "abcd"))
    assert few in ([0, 0], [K, K])
    free = make_decider(make_policy(kind=kind, hysteresis=0.0))
    for request_id, workload in zip("abcd", ("good", "bad", "good", "bad"), strict=True):
        free.start(request_id, workload)
        free.requests.note_context(request_id, 100, 10_000)
    free.decide(list("ab"), -1, 0, 0.0)
    assert many == free.decide(list("abcd"), -1, 0, 0.0).num_draft_tokens
    assert len(set(many)) > 1
    assert (
        make_decider(make_policy(kind="static", static_k=4, equal_lengths=True, captured_lengths=[2], equal_up_to=2))
        .decide(list("abcd"), -1, 0, 0.0)
        .num_draft_tokens
        == [2] * 4
    ), "others keep to what they were told"


@pytest.mark.fault("drafts past what a request can take")
def test_those_that_got_nearer_to_their_end_than_it_seemed_are_named():
    decider = make_decider(make_policy(kind="static", static_k=3))
    for request_id, end in (("soon", 105), ("done", 105), ("near", 109), ("later", 500)):
        decider.start(request_id)
        decider.requests.note_context(request_id, 100, end)
    ids = ["near", "soon", "done", "later"]
    lengths = decider.decide(ids, -1, 0, 0.0).num_draft_tokens
    assert lengths == [3, 3, 3, 3]
    assert decider.requests.ending == []
    decider.observe(ids, [3] * 4, [2] * 4)
    decider.finish("done")
    found = dict(decider.requests.ending)
    found.pop("done", None)
    assert found == {"soon": 1, "near": 5}  # of the two tokens left to the one, and six to the other, one isn't a draft
    assert set(decider.requests.slot_of) == {"near", "soon", "later"}


TABLE = [(4, 6), (16, 3), (32, 0)]


@pytest.mark.parametrize(
    ("table", "batch", "length"),
    [
        (TABLE, 1, 6),
        (TABLE, 4, 6),
        (TABLE, 5, 3),
        (TABLE, 16, 3),
        (TABLE, 17, 0),
        (TABLE, 32, 0),
        (TABLE, 33, 0),
        (TABLE[:2], 50, 3),
        ([(8, 99)], 1, K),
        ([(8, -1)], 1, 0),
        ([], 1, 4),
    ],
)
def test_a_table_gives_the_first_row_that_is_large_enough(table, batch, length):
    decider = make_decider(make_policy(kind="table", table=table))
    decision = decider.decide([str(number) for number in range(batch)], 100, 0, 0.0)
    assert decision[:3] == ([length] * batch, length, "table")


def test_a_table_holds_within_the_limit_and_the_requests_ceilings():
    decider = make_decider(make_policy())
    decider.start("old", ceiling=2)
    decider.set_policy(make_policy(kind="table", table=[(4, 6)], max_k=5), 0.0)
    assert decider.decide(["old", "new"], 100, 0, 0.0).num_draft_tokens == [2, 5]
    decider.set_policy(make_policy(), 1.0)
    assert decider.decide(["new"], 100, 0, 1.0).reason == "policy"


def test_an_unknown_kind_of_policy_is_static():
    assert make_decider(make_policy(kind="of tomorrow")).decide(["a"], 10, 0, 0.0).num_draft_tokens == [4]


# --- context length ---------------------------------------------------------------------------------------------------

SHIFT = [0.5] * 5 + [4.0] * 6  # from 2,048 tokens of context on, drafts fail more often


def make_shifted_policy(shift=SHIFT, **changes):
    priors = [WorkloadPrior(workload=name, acceptance=[0.7] * K, context_shift=shift) for name in ("", "default")]
    return make_policy(priors=priors, hysteresis=0.0, **changes)


@pytest.mark.parametrize("count", [2, 200])
def test_requests_of_long_contexts_get_what_their_factor_is_worth(count):
    cheap = list(StepTimeModel.of(base=5e-3, per_token=6e-4 / count, drafting=5e-4, per_block_token=1e-4).parameters)
    decider, ids = make_decider(make_shifted_policy(step_seconds=cheap)), [f"r{i}" for i in range(count)]
    contexts = [100, 5000] * (count // 2)
    lengths = decider.decide(ids, sum(contexts), 0, 0.0, contexts).num_draft_tokens
    assert min(lengths[::2]) > max(lengths[1::2])
    plain = make_decider(make_shifted_policy([], step_seconds=cheap))
    assert len(set(plain.decide(ids, sum(contexts), 0, 0.0, contexts).num_draft_tokens)) == 1
    assert len(set(decider.decide(ids, sum(contexts), 0, 0.0).num_draft_tokens)) == 1  # not told: no difference


@pytest.mark.parametrize("context", [100, 5000])
def test_a_request_that_does_as_its_context_predicts_is_like_any_other_of_that_context(context):
    # A request's own factor is measured against the shifted curve: what the context explains isn't counted twice.
    rng, ids, theta = np.random.default_rng(0), [f"r{i}" for i in range(200)], 0.5 if context == 100 else 4.0
    decider = make_decider(make_shifted_policy())
    truth = 0.7 / (0.7 + theta * 0.3)
    for _ in range(60):
        decider.decide(ids, context * len(ids), 0, 0.0, [context] * len(ids))
        drafted = [K] * len(ids)
        decider.observe(ids, drafted, simulate_rounds(rng, [truth] * K, drafted).tolist())
    constant = decider._tables.constants[0]
    own = (constant + decider.requests.known["failures"][:200]) / (constant + decider.requests.known["successes"][:200])
    assert np.exp(np.log(own).mean()) == pytest.approx(1.0, abs=0.1)


def test_with_contexts_too_learning_from_few_rounds_is_the_same_as_from_many():
    ids, rng = [f"r{i}" for i in range(100)], np.random.default_rng(1)
    together, apart = make_decider(make_shifted_policy()), make_decider(make_shifted_policy())
    for _ in range(10):
        contexts = rng.integers(-5, 20_000, len(ids)).tolist()
        together.decide(ids, 0, 0, 0.0, contexts)
        drafted = rng.integers(0, K + 1, len(ids)).tolist()
        accepted = [int(rng.integers(0, k + 1)) for k in drafted]
        together.observe(ids, drafted, accepted)
        for at in range(0, len(ids), 10):
            few = slice(at, at + 10)
            apart.decide(ids[few], 0, 0, 0.0, contexts[few])
            apart.observe(ids[few], drafted[few], accepted[few])
        np.testing.assert_allclose(apart.requests.known["shift"][:100], together.requests.known["shift"][:100])
    np.testing.assert_allclose(apart.requests.known["failures"], together.requests.known["failures"])
    np.testing.assert_allclose(apart.requests.known["successes"], together.requests.known["successes"])


def test_a_slot_that_is_used_again_has_the_context_of_its_new_request():
    decider = make_decider(make_shifted_policy())
    decider.decide(["long"], 5000, 0, 0.0, [5000])
    slot = decider.requests.slot_of["long"]
    assert decider.requests.known["shift"][slot] > 0.0
    decider.finish("long")
    decider.start("new")
    assert decider.requests.slot_of["new"] == slot
    assert decider.requests.known["shift"][slot] == 0.0


@given(
    st.lists(st.one_of(numbers, st.floats(-100.0, 100.0)), max_size=14),
    st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=80),
    st.booleans(),
)
def test_no_factor_and_no_context_however_odd_breaks_a_decision(shift, contexts, is_short):
    decider, ids = make_decider(make_shifted_policy(shift)), [f"r{i}" for i in range(len(contexts))]
    for _ in range(2):
        lengths = decider.decide(ids, 100, 0, 0.0, contexts[:-1] if is_short else contexts).num_draft_tokens
        assert len(lengths) == len(ids)
        assert all(0 <= k <= K for k in lengths)
        decider.observe(ids, lengths, lengths)
    assert np.isfinite(decider.requests.known["failures"]).all()
    assert np.isfinite(decider.requests.known["successes"]).all()


@pytest.mark.parametrize("explore_share", [0.0, 1.0])
def test_where_lengths_have_to_be_equal_they_are(explore_share):
    decider = make_decider(make_policy(equal_lengths=True, explore_share=explore_share))
    unexplored = make_decider(make_policy(equal_lengths=True, explore_share=0.0))
    ids = [str(i) for i in range(40)]
    for at, request_id in enumerate(ids):
        decider.start(request_id, "good" if at % 2 else "bad")
        unexplored.start(request_id, "good" if at % 2 else "bad")
    chosen, seen = unexplored.decide(ids, 100, 0, 0.0).num_draft_tokens[0], set()
    for _ in range(50):
        lengths = decider.decide(ids, 100, 0, 0.0).num_draft_tokens
        assert len(set(lengths)) == 1
        seen.add(lengths[0])
    assert seen - {chosen} if explore_share else seen == {chosen}
    decider.start("short", "good", ceiling=1)
    for _ in range(50):
        *others, short = decider.decide([*ids, "short"], 100, 0, 0.0).num_draft_tokens
        assert len(set(others)) == 1
        assert short == min(others[0], 1)


@pytest.mark.parametrize(
    ("changes", "length", "reason"),
    [
        ({"kind": "static"}, 3, "static"),
        ({"kind": "static", "static_k": 2}, 0, "static"),
        ({"kind": "static", "captured_lengths": []}, 4, "static"),
        ({"kind": "static", "override": "policy"}, 3, "override"),
        ({"kind": "static", "override": "draft_tokens"}, 4, "override"),
        ({"kind": "static", "override": "capture_share,draft_tokens"}, 4, "override"),
        ({"kind": "goodput", "step_seconds": []}, 3, "cold"),
        ({"kind": "table", "table": [(8, 5)]}, 3, "table"),
        ({"kind": "table", "table": [(8, 5)], "max_k": 2}, 0, "table"),
        ({"kind": "off"}, 7, "off"),
    ],
)
def test_where_lengths_are_equal_every_rule_is_rounded_down_to_one_that_was_captured(changes, length, reason):
    decider = make_decider(make_policy(**{"equal_lengths": True, "captured_lengths": [7, 3], **changes}))
    for request_id in "ab":
        decider.start(request_id)
    decision = decider.decide(["a", "b"], 100, 0, 0.0)
    assert decision[:3] == ([length] * 2, length, reason)
    stale = decider.decide(["a", "b"], 100, 0, 99.0)
    assert set(stale.num_draft_tokens) <= ({0, 3, 7} if changes.get("captured_lengths") != [] else {4})
    if reason == "off":
        return
    decider.start("c", ceiling=2)
    assert decider.decide(["a", "b", "c"], 100, 0, 0.0)[:3] == ([length, length, min(length, 2)], length, reason)


@pytest.mark.parametrize("explore_share", [0.0, 1.0])
def test_where_graphs_were_captured_for_some_lengths_only_these_are_chosen(explore_share):
    captured = [5, 2, 600, 0]
    decider = make_decider(make_policy(equal_lengths=True, captured_lengths=captured, explore_share=explore_share))
    free = make_decider(make_policy(equal_lengths=True, explore_share=explore_share))
    ids = [str(i) for i in range(8)]
    seen, without = set(), set()
    for request_id in ids:
        decider.start(request_id, "good")
        free.start(request_id, "good")
    for _ in range(200):
        seen.update(decider.decide(ids, 100, 0, 0.0).num_draft_tokens)
        without.update(free.decide(ids, 100, 0, 0.0).num_draft_tokens)
    assert seen <= {0, 2, 5}
    assert len(seen) > 1 if explore_share else len(seen) == 1
    assert without - {0, 2, 5}, "it would have chosen these anyway: this test shows nothing"
    decider.start("short", "good", ceiling=1)
    for _ in range(50):
        *others, short = decider.decide([*ids, "short"], 100, 0, 0.0).num_draft_tokens
        assert {*others} < {0, 2, 5}
        assert short == min(others[0], 1)


def test_one_request_with_a_ceiling_takes_nobody_elses_drafts():
    """A client that asks for none would have switched them off for the whole server."""
    decider = make_decider(make_policy(equal_lengths=True, captured_lengths=[2, 5], explore_share=0.0))
    ids = [str(i) for i in range(8)]
    for request_id in ids:
        decider.start(request_id, "good")
    before = decider.decide(ids, 100, 0, 0.0).num_draft_tokens
    assert before == [before[0]] * 8
    assert before[0] > 0
    decider.start("none", "good", ceiling=0)
    decision = decider.decide([*ids, "none"], 100, 0, 0.0)
    assert decision.num_draft_tokens == [*before, 0]
    assert decision.block == before[0]
