"""A replay says what a rule would have given: exactly where the log knows, else within a few per cent of really running it."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulated.dictated import Dictated
from benchmarks.simulated.engine import simulate
from benchmarks.simulated.traffic import Cost, Load, Trace, Traffic, Workload, linear, roofline
from honed.adapt.control.controller import EngineController
from honed.adapt.control.settings import ControllerSettings
from honed.adapt.lengths.decider import Decider
from honed.adapt.lengths.length_policy import Decision
from honed.adapt.protocol import wire
from honed.adapt.replay.log import Log, LogBuilder
from honed.adapt.replay.replay import LEAST_REQUESTS, MOST_CLUSTERS, Replay, _clusters
from honed.adapt.replay.rules import Rule, lengths_of, parse_rule

K = 7
MS = 1_000_000

# --- logs by hand -----------------------------------------------------------------------------------------------------


def batch(rounds, *, steps=None, seq=1, boot="boot", workloads=("default",), version="v1", **changes):
    """Rounds (step, request, drafted, accepted[, workload]) in steps (number, end_ms, duration_ms)."""
    numbers = sorted({r[0] for r in rounds})
    steps = steps or [(number, 10 * number, 10) for number in numbers]
    of_step = {number: [r for r in rounds if r[0] == number] for number, *_ in steps}
    columns = wire.StepColumns(
        step=[number for number, *_ in steps],
        end_ns=[round(end * MS) for _, end, _ in steps],
        duration_us=[round(1000 * duration) for *_, duration in steps],
        num_requests=[max(len(of_step[number]), 1) for number, *_ in steps],
        num_tokens=[max(sum(r[2] + 1 for r in of_step[number]), 1) for number, *_ in steps],
        num_prefill_tokens=[0] * len(steps),
        num_draft_tokens=[sum(r[2] for r in of_step[number]) for number, *_ in steps],
        context_tokens=[100] * len(steps),
        num_drafting=[max((r[2] for r in of_step[number]), default=0) for number, *_ in steps],
        decision=["policy"] * len(steps),
    )
    logged = wire.RoundColumns(
        step=[r[0] for r in rounds],
        request=[r[1] for r in rounds],
        workload=[r[4] if len(r) > 4 else 0 for r in rounds],
        position=[10] * len(rounds),
        num_draft_tokens=[r[2] for r in rounds],
        num_accepted_tokens=[r[3] for r in rounds],
        num_invalid_tokens=changes.pop("invalid", [0] * len(rounds)),
        temperature=[0.0] * len(rounds),
        num_emitted=changes.pop("emitted", [r[3] + 1 for r in rounds]),
    )
    return wire.EventBatch(
        engine_id="e",
        boot_id=boot,
        seq=seq,
        sent_unix_ns=10**18,
        sent_mono_ns=10**9,
        drafter_version=version,
        workloads=list(workloads),
        steps=columns,
        rounds=logged,
        **changes,
    )


def log_of(*batches, **arguments) -> Log:
    builder = LogBuilder(**arguments)
    for one in batches:
        builder.add(one)
    return builder.log()


def static(k: int) -> Rule:
    return Rule(f"static:{k}", "static", k)


def test_a_steps_time_is_counted_from_the_step_before_only_while_the_engine_was_busy():
    first = batch([(1, 5, 1, 1), (2, 5, 1, 1)], steps=[(1, 10, 4), (2, 17, 4)])
    idle = batch([(5, 6, 1, 1)], steps=[(4, 100, 3), (5, 104.5, 4)], seq=2)  # step 3 was lost; step 4 is all prompt
    other = batch([(6, 6, 1, 1)], steps=[(6, 110, 2)], seq=3, boot="another")
    assert log_of(first, idle, other).seconds.tolist() == pytest.approx([4e-3, 7e-3, 3e-3, 4.5e-3, 2e-3])


def test_requests_are_told_apart_by_boot_and_by_drafter():
    rounds = [(1, 5, 1, 1, 0), (1, 6, 1, 1, 1), (2, 5, 1, 0, 0)]
    log = log_of(
        batch(rounds, workloads=("a", "b")), batch(rounds[:1], boot="2"), batch([(3, 5, 1, 1, 0)], workloads="a", version="v2")
    )
    assert len(log.cell) == 4
    assert [log.cells[c] for c in log.cell[log.request]] == [
        ("a", "v1"),
        ("b", "v1"),
        ("a", "v1"),
        ("default", "v1"),
        ("a", "v2"),
    ]


def test_only_steps_of_the_span_are_taken():
    one = batch([(1, 5, 1, 1), (2, 5, 1, 0), (3, 5, 1, 1)])
    at = lambda ms: 10**18 - 10**9 + ms * MS  # noqa: E731
    log = log_of(one, since_unix_ns=at(20), until_unix_ns=at(30))
    assert log.accepted.tolist() == [0]
    assert log.step.tolist() == [0]
    assert len(log_of(one, since_unix_ns=at(31)).step) == 0


@pytest.mark.fault("tokens past a request's end that counted as gain")
def test_a_text_ends_where_its_request_ended():
    ended = batch([(1, 5, 3, 3), (2, 6, 3, 1)])
    ended.rounds.num_delivered[:] = [2, 2]
    assert log_of(ended).emitted.tolist() == [2, 2]


@pytest.mark.parametrize(
    "spoilt",
    [
        batch([(1, 5, 1, 1)], steps=[(2, 10, 4)]),
        batch([(1, 5, 1, 1, 3)]),
        batch([(1, 5, 1, 1), (1, 6, 1, 1)], invalid=[0]),
        batch([(1, 5, 1, 1)], emitted=[]),
        batch([(1, 5, 1 << 70, 1)]),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused_whole(spoilt):
    builder = LogBuilder()
    with pytest.raises(ValueError, match="batch"):
        builder.add(spoilt)
    assert len(builder.log().seconds) == 0


def test_a_log_without_rounds_is_refused():
    with pytest.raises(ValueError, match="no verify rounds"):
        Replay(LogBuilder().log(), K)


# --- what the log knows -----------------------------------------------------------------------------------------------

rounds_of_requests = st.lists(
    st.lists(st.integers(0, 4).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), min_size=1, max_size=12),
    min_size=1,
    max_size=5,
)


def log_of_requests(requests) -> Log:
    rounds = [(step, number, k, a) for number, mine in enumerate(requests) for step, (k, a) in enumerate(mine, 1)]
    return log_of(batch(sorted(rounds)))


@given(rounds_of_requests)
def test_what_was_drafted_gives_what_was_logged(requests):
    log = log_of_requests(requests)
    replay = Replay(log, 4)
    begins = replay._text.walk(log.drafted, replay._whole.odds)
    assert replay._text.rounds(begins) == pytest.approx(np.ones(len(log.step)))
    assert begins[replay._text.begin] == pytest.approx(np.ones(len(log.step)))


@given(rounds_of_requests)
def test_without_drafts_every_token_is_a_round_and_with_some_never_more(requests):
    log = log_of_requests(requests)
    replay = Replay(log, 4)
    rounds = [replay._text.rounds(replay._text.walk(np.full(len(log.step), k), replay._whole.odds)).sum() for k in range(5)]
    assert rounds[0] == pytest.approx(log.emitted.sum())
    assert all(len(requests) - 1e-9 <= count <= rounds[0] + 1e-9 for count in rounds)


def test_shorter_drafts_are_exact_where_rounds_begin_alike():
    """Rounds of 3 of which 1 is accepted: with 2 or 1 drafts they break, or end, at the same place."""
    log = log_of_requests([[(3, 1)] * 40] * 4)
    for k, exact in ((3, 1.0), (2, 1.0)):
        prediction = Replay(log, 4).predict(static(k))
        assert prediction.acceptance_length == pytest.approx(2.0, rel=0.02)
        assert prediction.exact_rounds == pytest.approx(exact, abs=0.02)


def test_a_broken_round_says_what_a_longer_draft_would_have_given_and_a_full_one_does_not():
    broken = Replay(log_of_requests([[(2, 1)] * 40] * 4), 4).predict(static(4))
    full = Replay(log_of_requests([[(2, 2)] * 40] * 4), 4).predict(static(4))
    assert (broken.exact_rounds, broken.exact_tokens) == pytest.approx((1.0, 1.0))
    assert broken.acceptance_length == pytest.approx(2.0)
    assert full.exact_rounds == 0.0
    assert full.acceptance_length > 3.0


def test_struck_out_drafts_end_a_round_as_a_wrong_one_does():
    rounds = [(step, 1, 3, 1) for step in range(1, 40)]
    log = log_of(batch(rounds, invalid=[2] * len(rounds)))
    assert Replay(log, 4).predict(static(4)).acceptance_length == pytest.approx(2.0)


def test_what_a_stop_cuts_off_is_no_exact_token():
    rounds = [(step, step, 3, 3) for step in range(1, 40)]
    log = log_of(batch(rounds, emitted=[1 + step % 2 for step, *_ in rounds]))
    assert Replay(log, 3).predict(static(3)).exact_tokens == pytest.approx(1.0)


def test_with_one_draft_length_nobody_knows_what_another_costs():
    replay = Replay(log_of_requests([[(2, 1), (2, 2), (2, 0)] * 30] * 4), 4)
    assert replay.predict(static(3)).tokens_per_s is None
    assert replay.predict(static(3)).acceptance_length > 2.0
    same = replay.predict(static(2))
    assert same.tokens_per_s is not None
    assert same.tokens_per_s.value == pytest.approx(replay.logged.tokens_per_s)
    assert same.ratio is not None
    assert same.ratio.value == pytest.approx(1.0)


def test_a_mask_gives_one_workloads_figures():
    rounds = [(step, request, 2, 2 if request == 1 else 0, request - 1) for step in range(1, 50) for request in (1, 2)]
    log = log_of(batch(rounds, workloads=("a", "b")))
    taus = [Replay(log, 2, mask=log.request == log.request[i]).predict(static(2)).acceptance_length for i in (0, 1)]
    assert taus == pytest.approx([3.0, 1.0])
    assert Replay(log, 2).logged.acceptance_length == pytest.approx(2.0)


UNKNOWN = {
    "static": "isn't a draft length",
    "static:8": "more than the engine's 7",
    "static:-1": "isn't a draft length",
    "static:x": "isn't a draft length",
    "table": "table:4=7,16=2",
    "table:4": "isn't a draft length",
    "table:4=9": "more than",
    "table:-3=2,0=1": "at least 1",
    "table:8=1,4=2": "ascending",
    "table:4=1,4=2": "ascending",
    "table:4=1,": "BATCH=K",
    "goodput:1": "no figures",
    "latency:2": "no figures",
    "off": "static:7",
    "": "no such policy",
    "x": "no such policy",
    "kelly": "no such policy",
}


@pytest.mark.parametrize(("text", "why"), UNKNOWN.items())
def test_a_rule_that_cannot_be_replayed_is_answered_with_why_and_with_those_there_are(text, why):
    listed = r".*static:0 … static:7, table:.*goodput, latency$"
    with pytest.raises(ValueError, match=why + listed):
        parse_rule(text, K)


def test_rules_by_name():
    assert parse_rule("static:3", K) == Rule("static:3", "static", 3)
    assert parse_rule("table:4=7,16=2", K).table == ((4, 7), (16, 2))
    assert parse_rule("table", K, [(4, 7), (16, 2)]) == Rule("table", "table", table=((4, 7), (16, 2)))
    assert parse_rule("goodput", K).name == "goodput"
    assert parse_rule("latency", K).name == "latency"


# --- made-up engines, whose truth is known ----------------------------------------------------------------------------

COST = Cost(12e-3, linear(1.2e-4), per_request_s=2e-4, per_context_token_s=2e-7, drafting_s=2e-3, per_block_token_s=3e-4)
EASY = Workload("easy", (0.8, 0.75, 0.72, 0.7, 0.68, 0.66, 0.65), 12, output_tokens=(64, 256), prompt_tokens=(32, 256))
HARD = dataclasses.replace(EASY, name="hard", acceptance=(0.45, 0.4, 0.38, 0.36))
BASE = Trace("t", 1, K, 8, 30_000, (EASY,), Load(concurrency=((0.0, 8),)), ((0.0, COST),))
TRACES = {
    "easy": BASE,
    "hard": dataclasses.replace(BASE, workloads=(HARD,)),
    "two": dataclasses.replace(BASE, workloads=(EASY, HARD)),
    "batch": dataclasses.replace(BASE, max_num_seqs=32, num_tokens=50_000, load=Load(concurrency=((0.0, 32),))),
    "arrivals": dataclasses.replace(BASE, load=Load(utilisation=0.6)),
    "whole blocks": dataclasses.replace(BASE, is_block_shortened=False),
    "stairs": dataclasses.replace(
        BASE,
        load=Load(concurrency=((0.0, 16),)),
        max_num_seqs=16,
        is_block_shortened=False,
        costs=((0.0, Cost(2e-3, roofline(1.2e-2, 1.5e-4, tile=16), drafting_s=2e-3)),),
        stall_share=0.01,
    ),
}


class Steered:
    """honed as it runs: the engine decides, the controller sees its batches and sends a policy every second."""

    def __init__(self, trace: Trace, seed: int, settings: ControllerSettings) -> None:
        self._decider = Decider(trace.num_spec_tokens, trace.max_num_seqs, seed)
        self._controller = EngineController("e", trace.num_spec_tokens, trace.max_num_seqs, settings)
        self.batches: list[wire.EventBatch] = []
        self.start, self.finish, self.observe = self._decider.start, self._decider.finish, self._decider.observe
        self.decide = self._decider.decide
        self._at_s = -1.0
        self.on_batch(None, 0.0)

    def on_batch(self, one, now_s):
        if one is not None:
            self._controller.observe(one)
            self.batches.append(one)
        if now_s - self._at_s >= 1.0:
            self._at_s = now_s
            self._decider.set_policy(self._controller.propose(now_s), now_s)


def goodput_log(traffic: Traffic, seed: int, *, is_pipelined: bool = False, **settings) -> Log:
    steered = Steered(traffic.trace, seed, ControllerSettings(**settings))
    simulate(traffic, steered, on_batch=steered.on_batch, is_pipelined=is_pipelined)
    return log_of(*steered.batches)


def run(traffic: Traffic, rule: Rule, *, is_pipelined: bool = False) -> float:
    """Tokens per second when the rule is really run."""
    trace, batches = traffic.trace, []
    played = Dictated(trace.num_spec_tokens, max(rule.static_k, 0), rule.table)
    simulate(traffic, played, on_batch=lambda one, _: batches.append(one), is_pipelined=is_pipelined)
    log = log_of(*batches)
    return float(log.emitted.sum() / log.seconds.sum())


def replay_of(log: Log, trace: Trace, seed: int = 0) -> Replay:
    return Replay(log, trace.num_spec_tokens, seed, can_shorten=trace.is_block_shortened)


def errors(trace: Trace, traffic: Traffic, *, is_pipelined: bool = False) -> list[float]:
    """Predicted over real tokens per second, less 1, for every k, from a log of honed's own decisions."""
    replay = replay_of(goodput_log(traffic, 1, is_pipelined=is_pipelined), trace)
    found = []
    for k in range(trace.num_spec_tokens + 1):
        speed = replay.predict(static(k)).tokens_per_s
        assert speed is not None
        found.append(speed.value / run(traffic, static(k), is_pipelined=is_pipelined) - 1.0)
    return found


@pytest.mark.parametrize("name", TRACES)
def test_every_static_length_is_foretold_within_5_per_cent(name):
    trace = TRACES[name]
    assert np.abs(errors(trace, Traffic(trace), is_pipelined=name in ("two", "arrivals"))).max() < 0.05


@pytest.mark.parametrize("name", ["easy", "hard"])
def test_easy_and_hard_stretches_of_a_text_are_kept(name):
    """Rounds of a request were once taken to be exchangeable: with clustered errors that foretold 8 % too little at k = 1."""
    trace = TRACES[name]
    traffic = Traffic(trace)
    traffic.luck = clustered(len(traffic.luck), 0.6)
    assert np.abs(errors(trace, traffic, is_pipelined=True)).max() < 0.05


def clustered(count: int, correlation: float) -> np.ndarray:
    """Uniform variates, neighbours of which are alike: those of an AR(1) process, by their ranks."""
    noise = np.random.default_rng(5).standard_normal(count + 40)
    kernel = correlation ** np.arange(40)
    ranks = np.convolve(noise, kernel, mode="valid")[:count].argsort().argsort()
    return ((ranks + 0.5) / count).astype(np.float32)


class OneToFive:
    """Draws each step's draft length from 1, 3 and 5."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def decide(self, request_ids, *_):
        length = self._random.choice((1, 3, 5))
        return Decision([length] * len(request_ids), length, "policy")

    def start(self, *_):
        pass

    finish = observe = start


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_step_that_is_all_prompt_says_nothing_of_what_decoding_without_drafts_costs(is_pipelined):
    """Those steps alone drafted nothing, and what they cost was once taken for all the evidence there was of that."""
    cost = Cost(6e-3, roofline(6e-3, 4e-5), per_request_s=1e-5, drafting_s=2e-3, per_block_token_s=3e-4)
    trace = dataclasses.replace(BASE, num_tokens=15_000, costs=((0.0, cost),))
    traffic, batches = Traffic(trace), []
    simulate(traffic, OneToFive(1), on_batch=lambda one, _: batches.append(one), is_pipelined=is_pipelined)
    log = log_of(*batches)
    assert (log.rounds_in_step == 0).any()
    assert (log.block[log.rounds_in_step > 0] > 0).all()
    without = replay_of(log, trace).predict(static(0))
    assert without.tokens_per_s is not None
    assert without.exact_seconds == 0.0
    assert without.tokens_per_s.value == pytest.approx(run(traffic, static(0), is_pipelined=is_pipelined), rel=0.25)
    assert without.tokens_per_s.high > 1.3 * without.tokens_per_s.value


def test_prompts_alone_do_not_make_a_second_draft_length():
    rounds = [(step, request, 3, step % 4) for step in range(5, 60) for request in (1, 2)]
    steps = [(number, 10 * number, 10) for number in range(1, 60)]
    replay = Replay(log_of(batch(rounds, steps=steps)), 3)
    assert replay.predict(static(0)).tokens_per_s is None
    assert replay._shape(np.zeros(len(rounds), dtype=np.int64)).block.max() == 3


def test_a_table_is_foretold():
    traffic = Traffic(TRACES["easy"])
    replay = replay_of(goodput_log(traffic, 1), traffic.trace)
    rule = parse_rule("table:4=5,16=2", K)
    speed = replay.predict(rule).tokens_per_s
    assert speed is not None
    assert speed.value == pytest.approx(run(traffic, rule), rel=0.07)


def test_honeds_own_rule_is_foretold_to_do_what_it_did():
    log = goodput_log(Traffic(TRACES["two"]), 1)
    prediction = replay_of(log, TRACES["two"]).predict(parse_rule("goodput", K))
    assert prediction.ratio is not None
    assert prediction.ratio.value == pytest.approx(1.0, abs=0.05)
    assert prediction.exact_rounds > 0.6


BUSY = dataclasses.replace(TRACES["batch"], workloads=(EASY, HARD))


def test_latency_is_foretold_to_be_kinder_to_slow_requests():
    """The log is of goodput; what it foretells for latency is compared with latency as it really runs."""
    traffic = Traffic(BUSY)
    replay = replay_of(goodput_log(traffic, 1), BUSY)
    goodput, latency = (replay.predict(parse_rule(text, K)) for text in ("goodput", "latency"))
    really = Replay(goodput_log(traffic, 1, mode="latency"), K).logged
    assert latency.tokens_per_s is not None
    assert latency.tpot_s is not None
    assert goodput.tpot_p95_s is not None
    assert latency.tpot_p95_s is not None
    assert latency.tokens_per_s.value == pytest.approx(really.tokens_per_s, rel=0.05)
    assert latency.tpot_s.value == pytest.approx(really.tpot_s, rel=0.05)
    assert latency.tpot_s.low < latency.tpot_s.value < latency.tpot_s.high
    assert latency.tpot_p95_s == pytest.approx(really.tpot_p95_s, rel=0.08)
    assert latency.tpot_p95_s < 0.97 * goodput.tpot_p95_s


def test_time_per_output_token_is_each_requests_own_waiting():
    """Request 1 has steps of 10 and 20 ms for 3 tokens, request 2 only the second, for 1."""
    log = log_of(batch([(1, 1, 1, 1), (2, 1, 0, 0), (2, 2, 0, 0)], steps=[(1, 10, 10), (2, 30, 20)]))
    assert Replay(log, 2).logged.tpot_s == pytest.approx((0.010 + 0.020) / 2)
    assert Replay(log, 2, mask=log.request == log.request[2]).logged.tpot_s == pytest.approx(0.020)


GRAPHS = {"equal_lengths": "always", "captured_lengths": (0, 3, 7)}
ONE_GRAPH_A_LENGTH = dataclasses.replace(BASE, costs=((0.0, dataclasses.replace(COST, mixed_s=5e-3)),))


def test_honeds_own_rule_keeps_to_the_lengths_that_the_engine_has_graphs_for():
    log = goodput_log(Traffic(ONE_GRAPH_A_LENGTH), 1, **GRAPHS)
    bound = Replay(log, K, settings=ControllerSettings(**GRAPHS))
    for text in ("goodput", "latency"):
        lengths = lengths_of(parse_rule(text, K), log, K, bound._beliefs, bound._whole.prices.model, bound._settings, 0)
        assert set(lengths.tolist()) <= {0, 3, 7}
        shortest, longest = np.full(len(log.seconds), K), np.zeros(len(log.seconds), dtype=int)
        np.minimum.at(shortest, log.step, lengths)
        np.maximum.at(longest, log.step, lengths)
        assert (shortest[log.step] == longest[log.step]).all()
    goodput = bound.predict(parse_rule("goodput", K))
    assert goodput.ratio is not None
    assert goodput.ratio.value == pytest.approx(1.0, abs=0.03)
    assert goodput.graph_steps == 1.0


def test_steps_that_have_no_graph_are_told():
    log = log_of(batch([(step, request, 3, request) for step in range(1, 40) for request in (1, 2)]))
    bound = Replay(log, 7, settings=ControllerSettings(captured_lengths=(0, 3, 7)))
    shares = {
        text: bound.predict(parse_rule(text, 7)).graph_steps for text in ("static:3", "static:0", "static:5", "table:8=5")
    }
    assert (shares["static:3"], shares["static:0"], shares["static:5"]) == (1.0, 1.0, 0.0)
    assert shares["table:8=5"] == 1.0, "rules keep to lengths that have one, as in the engine"
    assert Replay(log, 7).predict(static(5)).graph_steps is None
    of_any_length = Replay(log, 7, settings=ControllerSettings(equal_lengths="always"))
    assert of_any_length.predict(static(5)).graph_steps == 1.0


def chosen(log: Log, text: str, **settings) -> np.ndarray:
    replay = Replay(log, K)
    bound = ControllerSettings(**settings)
    return lengths_of(parse_rule(text, K), log, K, replay._beliefs, replay._whole.prices.model, bound, 0)


def test_rules_that_choose_obey_the_settings_limits_hysteresis_and_exploring():
    log = goodput_log(Traffic(dataclasses.replace(BASE, num_tokens=6_000)), 1, explore_share=0.1)
    for text in ("goodput", "latency", "table:16=7"):
        assert chosen(log, text).max() > 3
        assert chosen(log, text, max_k=3).max() == 3
        assert chosen(log, text, request_ceiling=2).max() == 2
    assert chosen(log, "static:7", max_k=3).min() == 7
    settled = chosen(log, "goodput", explore_share=0.0)
    assert (chosen(log, "goodput", explore_share=1.0) != settled).mean() > 0.25  # of small batches' steps so many, and trials
    assert (chosen(log, "goodput", explore_share=0.0, hysteresis=0.0) != settled).any()


def test_a_seed_gives_one_answer():
    log = goodput_log(Traffic(dataclasses.replace(BASE, num_tokens=12_000)), 1, explore_share=0.1)
    for text in ("static:3", "goodput", "table:4=5,16=2"):
        assert replay_of(log, BASE, 3).predict(parse_rule(text, K)) == replay_of(log, BASE, 3).predict(parse_rule(text, K))


@pytest.mark.proof
def test_intervals_cover():
    """Of 30 short logs at least 25 each, and most of the intervals are worth having: below ± 15 %."""
    trace = dataclasses.replace(
        BASE,
        num_spec_tokens=4,
        num_tokens=4_000,
        max_num_seqs=4,
        load=Load(concurrency=((0.0, 4),)),
        workloads=(dataclasses.replace(EASY, output_tokens=(32, 96)),),
    )
    lengths = (0, 1, 2, 4)
    covered, widths = dict.fromkeys(lengths, 0), []
    for seed in range(30):
        traffic = Traffic(dataclasses.replace(trace, seed=seed))
        replay = replay_of(goodput_log(traffic, seed, explore_share=0.1), trace, seed)
        for k in lengths:
            speed = replay.predict(static(k)).tokens_per_s
            assert speed is not None
            covered[k] += speed.low <= run(traffic, static(k)) <= speed.high
            widths.append(speed.high / speed.value - 1.0)
    assert min(covered.values()) >= 25, covered
    assert np.median(widths) < 0.15


@pytest.mark.proof
def test_intervals_of_a_rare_workload_cover():
    """Rounds were once grouped by sixty-fourths of all of the log: a handful of requests were one group, and didn't differ."""
    few = dataclasses.replace(HARD, name="rare", output_tokens=(16, 48), strength=3.0, weight=0.01)
    often = dataclasses.replace(EASY, output_tokens=(16, 48))
    values, widths = [], []
    for seed in range(40):
        trace, batches = dataclasses.replace(BASE, seed=seed, num_tokens=20_000, workloads=(often, few)), []
        simulate(Traffic(trace), OneToFive(seed), on_batch=lambda one, _, batches=batches: batches.append(one))
        log = log_of(*batches)
        is_rare = np.array([cell[0] == "rare" for cell in log.cells])[log.cell[log.request]]
        if len(np.unique(log.request[is_rare])) >= LEAST_REQUESTS:
            speed = Replay(log, K, seed, can_shorten=True, mask=is_rare).predict(static(3)).tokens_per_s
            assert speed is not None
            values.append(np.log(speed.value))
            widths.append(np.log(speed.high / speed.value))
    assert len(values) >= 25
    assert (np.abs(values - np.mean(values)) <= widths).mean() >= 0.85
    assert np.median(widths) < 0.4


def test_of_few_requests_there_is_no_interval():
    log = log_of(batch([(step, request, step % 3, 0) for step in range(1, 80) for request in range(LEAST_REQUESTS)]))
    enough = Replay(log, 2).predict(static(1))
    too_few = Replay(log, 2, mask=log.request > 0).predict(static(1))
    for name in ("tokens_per_s", "ratio", "tpot_s"):
        known, unknown = getattr(enough, name), getattr(too_few, name)
        assert known.low < known.value < known.high
        assert (unknown.low, unknown.high) == (None, None)
        assert unknown.value > 0.0


def test_requests_that_are_alone_in_their_cells_show_how_requests_differ():
    """As when each comes from another tenant: two thirds accept everything, a third nothing."""
    rounds = [
        (step, request, step % 3, step % 3 * (request % 3 > 0), request) for step in range(1, 80) for request in range(12)
    ]
    log = log_of(batch(rounds, workloads=[f"tenant-{number}" for number in range(12)]))
    together = log_of(batch([(*each[:4], 0) for each in rounds]))
    apart, same = (Replay(one, 2).predict(static(2)).tokens_per_s for one in (log, together))
    assert apart is not None
    assert same is not None
    assert apart.high / apart.value - 1.0 > 0.7 * (same.high / same.value - 1.0)


def test_groups_are_of_whole_requests_of_one_cell():
    rounds = [(step, request, 1, 1, request % 3 == 0) for request in range(300) for step in range(request, request + 5)]
    log = log_of(batch(sorted(rounds), workloads=("often", "rare")))
    cluster, stratum = _clusters(log)
    assert len(set(zip(log.request.tolist(), cluster.tolist(), strict=True))) == len(log.cell)
    assert (log.cell[log.request] == stratum[cluster]).all()
    assert np.bincount(stratum).tolist() == [MOST_CLUSTERS, MOST_CLUSTERS]


@pytest.mark.parametrize(
    ("fields", "blocks"),
    [
        ({"can_shorten": True}, [0, 2]),
        ({"can_shorten": False}, [4, 4]),
        ({"can_shorten": False, "can_skip": True}, [0, 4]),
    ],
)
def test_what_is_drafted_for_other_lengths_is_the_runners_way(fields, blocks):
    log = log_of(batch([(1, 5, 4, 1), (2, 5, 4, 1)]))
    replay = Replay(log, 4, **fields)
    assert replay._shape(np.array([0, 2])).block.tolist() == blocks
