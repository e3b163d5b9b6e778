import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated.dictated import Dictated
from benchmarks.simulated.engine import Truth, simulate
from benchmarks.simulated.oracle import Oracle, Steered, best_lengths, judge, run_oracle, run_steered
from benchmarks.simulated.traffic import Cost, Drift, Load, Trace, Traffic, Workload, linear, roofline
from honed.adapt.acceptance.rounds import rounds_by_workload
from honed.adapt.control.controller import EngineController
from honed.adapt.protocol import wire

GOOD, FAIR, POOR = (0.85, 0.8, 0.78, 0.75), (0.65, 0.6, 0.55, 0.5), (0.2, 0.18, 0.15)
COST = Cost(5e-3, linear(4e-4), 1e-5, 1e-8, 1e-6, 0.6e-3, 0.0, 1e-4)
SHORT = {"output_tokens": (10, 60), "prompt_tokens": (5, 50)}


def make_trace(num_tokens=4000, requests=4, **changes):
    trace = Trace(
        "small",
        7,
        5,
        8,
        num_tokens,
        (Workload("chat", GOOD, **SHORT), Workload("code", FAIR, **SHORT)),
        Load(concurrency=((0.0, requests),)),
        ((0.0, COST),),
    )
    return replace(trace, **changes)


POISSON = make_trace(load=Load(utilisation=0.8, burst=2))
TRACES = {
    "closed": make_trace(),
    "poisson": POISSON,
    "v2": make_trace(is_block_shortened=False),
    "drift": make_trace(workloads=(Workload("chat", GOOD, drift=(Drift(0.4, POOR, over=0.2),), **SHORT),)),
}


def static(length, k=5):
    return Dictated(k, length)


def run_logged(traffic, policy, **options):
    batches = []
    outcome = simulate(traffic, policy, on_batch=lambda batch, now_s: batches.append((batch, now_s)), **options)
    return outcome, batches


def rounds_of(batches):
    """(request, position) -> (drafted, accepted, emitted)."""
    found = {}
    for batch, _ in batches:
        r = batch.rounds
        columns = (r.request, r.position, r.num_draft_tokens, r.num_accepted_tokens, r.num_emitted)
        for request, position, *rest in zip(*columns, strict=True):
            assert (request, position) not in found
            found[request, position] = tuple(rest)
    return found


# --- traffic ----------------------------------------------------------------------------------------------------------


def test_requests_scatter_around_their_workloads_curve():
    for is_one_rank in (True, False):
        workload = Workload("chat", GOOD, strength=12.0, is_one_rank=is_one_rank)
        traffic = Traffic(make_trace(1_000_000, workloads=(workload,)))
        acceptance = 1.0 / (1.0 + np.exp(-traffic.log_odds))
        mean = np.array([*GOOD, GOOD[-1]])  # the last figure is repeated up to K
        assert np.allclose(acceptance.mean(axis=0), mean, atol=0.01)
        assert np.allclose(acceptance.var(axis=0), mean * (1 - mean) / 13.0, rtol=0.1)
        correlation = np.corrcoef(acceptance[:, 0], acceptance[:, 1])[0, 1]
        assert correlation > 0.95 if is_one_rank else abs(correlation) < 0.05


def test_a_workload_may_begin_late_and_shares_follow_the_weights():
    workloads = (Workload("a", GOOD, weight=3.0), Workload("b", FAIR), Workload("late", POOR, since=0.5))
    traffic = Traffic(make_trace(500_000, workloads=workloads))
    half = int(0.5 * 500_000 / np.mean(Workload("a", GOOD).output_tokens))
    assert not (traffic.workload[:half] == 2).any()
    assert np.mean(traffic.workload[:half] == 0) == pytest.approx(0.75, abs=0.05)
    assert (traffic.workload == 2).any()


def test_drift_moves_the_log_odds_and_ends_where_it_should():
    trace = make_trace(workloads=(Workload("chat", GOOD, drift=(Drift(0.4, POOR, over=0.2), Drift(0.8, FAIR))),))
    traffic = Traffic(trace)

    def mean_at(share):
        at = traffic.shift(traffic.stage(share * trace.num_tokens))[0]
        return 1.0 / (1.0 + np.exp(-(np.log(GOOD[0] / (1 - GOOD[0])) + at[0])))

    assert mean_at(0.39) == pytest.approx(GOOD[0])
    assert POOR[0] < mean_at(0.5) < GOOD[0]
    assert mean_at(0.7) == pytest.approx(POOR[0])
    assert mean_at(0.8) == pytest.approx(FAIR[0])


def test_costs_may_have_stairs_knees_and_captured_sizes():
    tokens, one = np.arange(1, 200), np.array(1)
    flat = Cost(1e-3, roofline(5e-3, 5e-5, tile=32))
    seconds = flat.seconds(1, tokens, 0, 0, one)
    assert (np.diff(seconds) >= 0).all()
    assert seconds[0] == pytest.approx(6e-3, rel=1e-3)
    assert seconds[-1] > 9e-3
    assert len(np.unique(seconds)) <= 200 // 32 + 1
    captured = Cost(1e-3, linear(1e-4, (64, 1e-4)), captured_tokens=(8, 100)).seconds(1, tokens, 0, 0, one)
    assert captured[0] == captured[7] == pytest.approx(1.8e-3)
    assert captured[20] == captured[99] == pytest.approx(1e-3 + 100e-4 + 36e-4)
    drafting = Cost(0.0, linear(0.0), drafting_s=1.0, drafting_per_request_s=0.1, per_block_token_s=10.0)
    assert drafting.seconds(5, one, 0, 0, np.array([0, 1, 3])).tolist() == [0.0, 11.5, 31.5]


def test_acceptance_decays_with_the_context_beyond_its_length():
    traffic = Traffic(make_trace(workloads=(Workload("chat", GOOD, decay=0.5, decay_from=1000), Workload("code", FAIR))))
    requests = np.array([int(np.flatnonzero(traffic.workload == row)[0]) for row in (0, 0, 0, 1)])
    assert traffic.decay(requests, np.array([1, 1000, 4000, 4000])).tolist() == [0.0, 0.0, 1.0, 0.0]
    plain = Traffic(make_trace(workloads=(Workload("chat", GOOD), Workload("code", FAIR))))
    assert (traffic.log_odds == plain.log_odds).all()  # the same requests, with the same luck
    assert (traffic.luck == plain.luck).all()
    assert traffic.is_decaying
    assert not plain.is_decaying


# --- engine -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRACES)
def test_every_token_is_accounted_for(name):
    traffic = Traffic(TRACES[name])
    for policy, options in ((static(3), {}), (static(3), {"is_pipelined": True}), (Oracle(), {})):
        outcome, batches = run_logged(traffic, policy, **options)
        wanted = dict(zip(traffic.request_ids, traffic.output_tokens.tolist(), strict=True))
        assert outcome.finished
        assert all(tokens == wanted[request] for request, tokens in outcome.finished.items())
        assert all(0 < tokens < wanted[request] for request, tokens in outcome.unfinished.items())
        assert not outcome.finished.keys() & outcome.unfinished.keys()
        counted = sum(outcome.finished.values()) + sum(outcome.unfinished.values())
        # In the last step newcomers have their first token already.
        assert counted == outcome.tokens.sum()
        prompts = len(outcome.finished) + len(outcome.unfinished)
        assert sum(emitted for *_, emitted in rounds_of(batches).values()) == counted - prompts
        assert outcome.work[-1] >= traffic.trace.num_tokens > outcome.work[-2]
        assert outcome.seconds_between(0.0, float(outcome.work[-1])) == pytest.approx(outcome.seconds.sum())
        assert sum(seconds for _, seconds in outcome.phases(1000.0, 2500.0)) == pytest.approx(outcome.seconds.sum())


def test_all_rules_have_the_same_luck():
    traffic = Traffic(make_trace())
    short, long = (rounds_of(run_logged(traffic, static(k))[1]) for k in (2, 5))
    shared = short.keys() & long.keys()
    assert len(shared) > 500
    for key in shared:
        assert short[key][1] == min(long[key][1], 2)


def test_luck_follows_the_true_curves():
    outcome = simulate(Traffic(make_trace(40_000)), static(4), judge=judge)
    accepted = outcome.tokens.sum() - len(outcome.finished) - len(outcome.unfinished)
    assert accepted == pytest.approx(outcome.expected.sum(), rel=0.06)  # a request's last round is cut at its length
    assert accepted <= outcome.expected.sum()


def test_the_same_seed_gives_the_same_outcome():
    first, again = (run_steered(Traffic(make_trace())) for _ in range(2))
    assert (first.tokens == again.tokens).all()
    assert (first.seconds == again.seconds).all()
    assert first.reasons == again.reasons
    other = run_steered(Traffic(make_trace(seed=8)))
    assert len(other.tokens) != len(first.tokens) or (other.tokens != first.tokens).any()


def test_nothing_runs_before_it_arrives_or_beyond_the_limits():
    traffic = Traffic(make_trace(load=Load(utilisation=2.0, burst=5), max_num_seqs=3))
    outcome = simulate(traffic, static(1))
    assert outcome.num_requests.max() == 3
    idle = simulate(Traffic(make_trace(load=Load(utilisation=0.1))), static(1))
    assert idle.work[-1] - idle.tokens.sum() > 1000  # most of the clock was waiting, and took no time
    changing = make_trace(load=Load(concurrency=((0.0, 2), (0.5, 8))))
    outcome = simulate(Traffic(changing), static(1))
    middle = np.searchsorted(outcome.work, 0.5 * changing.num_tokens)
    assert outcome.num_requests[:middle].max() == 2
    assert outcome.num_requests.max() == 8


def test_a_runner_that_cannot_shorten_always_drafts_all():
    assert set(simulate(Traffic(TRACES["v2"]), static(2)).block.tolist()) == {5}
    assert set(simulate(Traffic(TRACES["closed"]), static(2)).block.tolist()) == {0, 2}
    none = simulate(Traffic(TRACES["closed"]), static(0))
    assert none.block.max() == 0
    assert none.tokens.sum() == none.num_requests.sum() + len(none.finished) + len(none.unfinished)


def test_costs_change_when_they_should():
    dear = replace(COST, base_s=50e-3)
    outcome = simulate(Traffic(make_trace(costs=((0.0, COST), (0.5, dear)))), static(2))
    middle = int(np.searchsorted(outcome.work, 2000))
    assert outcome.seconds[:middle].max() < 0.04 < outcome.seconds[middle + 1 :].min()


# --- events -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRACES)
def test_batches_are_what_an_engine_would_send(name):
    trace = TRACES[name]
    outcome, batches = run_logged(Traffic(trace), static(3))
    controller = EngineController("synthetic", trace.num_spec_tokens, trace.max_num_seqs)
    assert [batch.seq for batch, _ in batches] == list(range(1, len(batches) + 1))
    steps = itertools.chain.from_iterable(batch.steps.step for batch, _ in batches)
    assert list(steps) == list(range(1, len(outcome.seconds) + 1))
    drafted = 0
    for (batch, now_s), (_, before_s) in zip(batches[1:-1], batches[:-2], strict=True):
        assert 0.25 <= now_s - before_s < 0.35
        batch = wire.decode_to_daemon(wire.encode(batch))
        controller.observe(batch)
        s = batch.steps
        assert len({len(getattr(s, name)) for name in s.__struct_fields__}) == 1
        for row, number in enumerate(s.step):
            mine = [i for i, step in enumerate(batch.rounds.step) if step == number]
            assert sum(batch.rounds.num_draft_tokens[i] for i in mine) == s.num_draft_tokens[row]
            assert s.num_tokens[row] == len(mine) + s.num_draft_tokens[row] + s.num_prefill_tokens[row]
            assert s.end_ns[row] <= round(now_s * 1e9)
        for workload, rounds in rounds_by_workload(batch):
            assert workload in [one.name for one in trace.workloads]
            assert (rounds.num_accepted_tokens <= rounds.num_draft_tokens).all()
            drafted += int(rounds.num_draft_tokens.sum())
    ends = sum(sum(batch.rounds.num_draft_tokens) for batch, _ in (batches[0], batches[-1]))
    assert drafted + ends == outcome.num_draft_tokens.sum()
    assert controller.beliefs()["workloads"].keys() <= {one.name for one in trace.workloads}


# --- oracle -----------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.booleans(), st.integers(0, 60))
def test_the_oracle_finds_the_optimum_of_any_cost(seed, count, is_block_shortened, prefill):
    rng = np.random.default_rng(seed)
    stairs = np.cumsum(rng.exponential(1e-3, 400) * (rng.random(400) < 0.3))
    cost = Cost(
        rng.uniform(0, 5e-3),
        lambda tokens: stairs[np.minimum(tokens, 399).astype(int)],
        drafting_s=rng.uniform(0, 1e-3),
        per_block_token_s=rng.uniform(0, 5e-4),
    )
    survival = np.cumprod(rng.uniform(0.2, 0.98, (count, 3)), axis=1)
    truth = Truth(survival, cost, count + (prefill > 0), 0, prefill, is_block_shortened)

    def goodput(lengths):
        expected = count + sum(row[:k].sum() for row, k in zip(survival, lengths, strict=True))
        tokens, block = count + prefill + sum(lengths), max(lengths) if is_block_shortened else 3
        seconds = cost.seconds(truth.num_requests, np.array(tokens), 0, prefill, np.array(block))
        return expected / (float(seconds) - truth.prompt_s)

    lengths, found = best_lengths(truth)
    assert found == pytest.approx(goodput(lengths.tolist()))
    assert found == pytest.approx(max(goodput(ks) for ks in itertools.product(range(4), repeat=count)))


@pytest.mark.parametrize("is_block_shortened", [True, False])
@pytest.mark.parametrize("curve", [GOOD, POOR])
@pytest.mark.parametrize("requests", [1, 8])
def test_no_fixed_length_beats_the_oracle(curve, requests, is_block_shortened):
    trace = make_trace(
        5000, requests, workloads=(Workload("chat", curve, strength=10.0),), is_block_shortened=is_block_shortened
    )
    traffic = Traffic(trace)
    oracle, end = run_oracle(traffic), float(trace.num_tokens)
    for length in range(trace.num_spec_tokens + 1):
        seconds = simulate(traffic, static(length)).seconds_between(0.0, end)
        assert oracle.seconds_between(0.0, end) <= 1.005 * seconds


CONTEXTS = make_trace(
    150_000,
    16,
    max_num_seqs=16,
    noise=0.03,
    workloads=(Workload("chat", GOOD, output_tokens=(16, 128), prompt_tokens=(64, 16_000), decay=0.5),),
)


class WithoutContexts(Steered):
    """Honed's loop, its decider not told how long contexts are."""

    def __init__(self, traffic):
        super().__init__(traffic)
        self.decide = lambda ids, context, prefill, now_s, contexts: self.decider.decide(ids, context, prefill, now_s)


@pytest.mark.proof
def test_knowing_the_contexts_brings_lengths_nearer_to_the_best():
    traffic, shares = Traffic(CONTEXTS), []
    for policy in (Steered(traffic), WithoutContexts(traffic)):
        run = simulate(traffic, policy, on_batch=policy.take, judge=judge)
        late = (run.work > 50_000) & (run.num_requests > 0)
        shares.append(1.0 - run.expected[late].sum() / (run.best * run.round_seconds)[late].sum())
    assert shares[0] < 0.95 * shares[1]


@pytest.mark.proof
def test_where_contexts_make_no_difference_none_is_found():
    workloads = tuple(replace(one, decay=0.0) for one in CONTEXTS.workloads)
    traffic = Traffic(replace(CONTEXTS, workloads=workloads))
    policy = Steered(traffic)
    simulate(traffic, policy, on_batch=policy.take)
    assert [prior.context_shift for prior in policy.controller.propose(1e9).priors] == [[], []]


# --- honed's own loop -------------------------------------------------------------------------------------------------

REGRET_BARS = {"closed": 0.04, "v2": 0.04, "drift": 0.05}


@pytest.mark.parametrize("name", REGRET_BARS)
def test_regret_stays_small(name):
    traffic = Traffic(replace(TRACES[name], num_tokens=30_000, noise=0.03))
    oracle, honed = run_oracle(traffic), run_steered(traffic)
    assert {"policy", "explore"} <= set(honed.reasons)
    begin, end = 6000.0, 30_000.0
    regret = 1.0 - oracle.seconds_between(begin, end) / honed.seconds_between(begin, end)
    assert regret < REGRET_BARS[name]
