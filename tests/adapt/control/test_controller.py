import itertools
import json
import re

import msgspec
import numpy as np
import pytest

from honed.adapt.control import acceptance_beliefs
from honed.adapt.control.controller import MOST_REASONS, EngineController
from honed.adapt.control.settings import ControllerSettings, Override
from honed.adapt.lengths.decider import Decider
from honed.adapt.protocol import wire
from honed.adapt.protocol.wire import StepColumns
from tests.adapt.simulate import make_batch, simulate_rounds

K = 7
CURVE = np.array([0.8, 0.78, 0.75, 0.7, 0.7, 0.7, 0.7])
POOR = np.array([0.25] * K)


def step_seconds(requests, tokens, block):
    return 5e-3 + 1.5e-4 * tokens + (8e-4 + 1e-4 * block if block else 0.0)


class Engine:
    """A made-up engine: its own clock, its own truth, honed's decider."""

    def __init__(self, controller, curve=CURVE, seed=0, requests=4):
        self.rng, self.controller, self.curve = np.random.default_rng(seed), controller, np.asarray(curve)
        self.decider, self.ids = Decider(K, 16, seed=seed), [f"r{i}" for i in range(requests)]
        self.now_s, self.seq, self.tokens, self.seconds = 0.0, 0, 0, 0.0
        self.reasons: set[str] = set()

    def run(self, batches, workload="default", version="v1", steps_per_batch=50):
        events = []
        for _ in range(batches):
            events += self.controller.observe(self.make_batch(steps_per_batch, workload, version))
            self.decider.set_policy(self.controller.propose(self.now_s), self.now_s)
        return events

    def make_batch(self, count, workload, version):
        columns, drafted, accepted, owners = wire.StepColumns(), [], [], []
        for _ in range(count):
            decision = self.decider.decide(self.ids, 400 * len(self.ids), 0, self.now_s)
            lengths = decision.num_draft_tokens
            passed = self.verify(lengths)
            self.decider.observe(self.ids, lengths, passed)
            self.reasons.add(decision.reason)
            tokens = len(self.ids) + sum(lengths)
            seconds = step_seconds(len(self.ids), tokens, decision.block) * self.rng.lognormal(0.0, 0.05)
            self.now_s += seconds
            self.tokens += len(self.ids) + sum(passed)
            self.seconds += seconds
            row = (
                1,
                round(self.now_s * 1e9),
                round(seconds * 1e6),
                len(self.ids),
                tokens,
                0,
                sum(lengths),
                400 * len(self.ids),
                decision.block,
                decision.reason,
            )
            for name, value in zip(wire.StepColumns.__struct_fields__, row, strict=True):
                getattr(columns, name).append(value)
            drafted, accepted, owners = drafted + lengths, accepted + passed, owners + [int(name[1:]) for name in self.ids]
            self.end_some()
        self.seq += 1
        batch = make_batch(drafted, accepted, workload, version, owners, columns, self.seq)
        return wire.decode_to_daemon(wire.encode(batch))

    def verify(self, lengths):
        return simulate_rounds(self.rng, self.curve, lengths).tolist()

    def end_some(self):
        """Requests here are never over."""


class MixedEngine(Engine):
    """Half of the requests are easy and half are hard; each is over after a hundred steps or so, and another one begins."""

    EASY, HARD = 0.93, 0.35

    def __init__(self, controller):
        super().__init__(controller, requests=8)
        self.is_easy = {name: at % 2 == 0 for at, name in enumerate(self.ids)}
        self.lengths = {True: [], False: []}

    def verify(self, lengths):
        passed = []
        for name, length in zip(self.ids, lengths, strict=True):
            curve = np.full(K, self.EASY if self.is_easy[name] else self.HARD)
            passed.append(int(simulate_rounds(self.rng, curve, [length])[0]))
            self.lengths[self.is_easy[name]].append(length)
        return passed

    def end_some(self):
        for at, name in enumerate(self.ids):
            if self.rng.random() < 0.01:
                self.decider.finish(name)
                self.ids[at] = f"r{len(self.is_easy)}"
                self.is_easy[self.ids[at]] = bool(self.rng.random() < 0.5)
                self.decider.start(self.ids[at])


class UnlikeAtDepthEngine(MixedEngine):
    """Easy requests get their first draft accepted, and do no better than others from then on."""

    LATER = 0.75

    def verify(self, lengths):
        passed = []
        for name, length in zip(self.ids, lengths, strict=True):
            curve = np.array([self.EASY if self.is_easy[name] else self.HARD] + [self.LATER] * (K - 1))
            passed.append(int(simulate_rounds(self.rng, curve, [length])[0]))
            self.lengths[self.is_easy[name]].append(length)
        return passed


def make_controller(**settings):
    return EngineController("engine-0", K, 16, ControllerSettings(**settings))


def test_the_loop_from_events_to_policy_finds_a_good_draft_length():
    engine = Engine(make_controller())
    engine.run(30)
    assert {"no_policy", "cold", "policy", "explore"} <= engine.reasons
    engine.tokens, engine.seconds = 0, 0.0
    engine.run(20)
    survivors = np.cumprod(CURVE)
    best = max(4 * (1 + survivors[:k].sum()) / step_seconds(4, 4 * (1 + k), k) for k in range(K + 1))
    assert engine.tokens / engine.seconds > 0.95 * best


def test_a_drafter_that_never_hits_is_switched_off():
    engine = Engine(make_controller(explore_share=0.05), curve=np.full(K, 0.03))
    engine.run(40)
    assert engine.decider.decide(engine.ids, 1600, 0, engine.now_s).block <= 1
    lengths = [engine.decider.decide(engine.ids, 1600, 0, engine.now_s).block for _ in range(100)]
    assert lengths.count(0) > 80


def test_drafting_for_easy_requests_does_not_make_all_of_them_look_easy():
    """A plain count of what was tried, at late positions of easy ones only, said .78 for the first and .51 for the last."""
    engine = MixedEngine(make_controller())
    engine.run(60)
    assert np.mean(engine.lengths[True]) > 3.0 * np.mean(engine.lengths[False])
    survived = engine.controller.beliefs()["workloads"]["default"]["survival"]
    truth = [(engine.EASY**j + engine.HARD**j) / 2 for j in range(1, K + 1)]
    assert survived[0] == pytest.approx(truth[0], abs=0.06)
    assert np.abs(np.array(survived) - truth).max() < 0.15
    assert engine.controller.beliefs()["workloads"]["default"]["reliability"]["expected_calibration_error"] < 0.07


def test_what_easy_requests_do_at_depth_is_told_from_what_they_do_at_first():
    engine = UnlikeAtDepthEngine(make_controller())
    engine.run(80)
    policy = engine.controller.propose(0.0)
    prior = next(one for one in policy.priors if one.workload)
    assert prior.depth_slopes[1] < 0.8 < prior.depth_slopes[0]
    unlined = [msgspec.structs.replace(one, depth_intercepts=[], depth_slopes=[]) for one in policy.priors]

    def off(priors):
        """By how much an engine with that policy is wrong about a draft of easy requests, on average over depths and them."""
        decider, rng = Decider(K, 16), np.random.default_rng(0)
        decider.set_policy(msgspec.structs.replace(policy, priors=priors), 0.0)
        ids = [f"easy-{number}" for number in range(16)]
        for name in ids:
            decider.start(name)
        for _ in range(40):
            accepted = simulate_rounds(rng, [engine.EASY] + [engine.LATER] * (K - 1), [K] * len(ids))
            decider.observe(ids, [K] * len(ids), [int(one) for one in accepted])
        survived = decider.requests.gains_of(ids, K, are_contexts_known=True)
        acceptance = survived / np.hstack([np.ones((len(ids), 1)), survived[:, :-1]])
        return float(np.abs(acceptance.mean(axis=0) - ([engine.EASY] + [engine.LATER] * (K - 1))).mean())

    assert off(policy.priors) < 0.7 * off(unlined)


def test_beliefs_are_json_and_close_to_the_truth():
    controller = make_controller()
    json.dumps(controller.beliefs(), allow_nan=False)
    Engine(controller).run(40)
    beliefs = json.loads(json.dumps(controller.beliefs(), allow_nan=False))
    assert np.allclose(beliefs["workloads"]["default"]["acceptance"][:3], CURVE[:3], atol=0.04)
    assert beliefs["workloads"]["default"]["drift"]["state"] == "stable"
    assert beliefs["step_time"]["predicted_seconds"] == pytest.approx(beliefs["step_time"]["measured_seconds"], rel=0.1)
    plans = beliefs["draft_tokens_by_batch"]
    assert [plan["num_requests"] for plan in plans] == [1, 2, 4, 8, 16]
    assert all(a["draft_tokens_per_request"] >= b["draft_tokens_per_request"] for a, b in itertools.pairwise(plans))
    assert beliefs["speedup_estimate"] == pytest.approx(
        max((1 + np.cumprod(CURVE)[:k].sum()) / step_seconds(4, 4 + 4 * k, k) for k in range(K + 1)) * step_seconds(4, 4, 0),
        rel=0.1,
    )


@pytest.fixture(scope="module")
def seen():
    """Batches of an engine whose lengths varied: step times are known after them."""
    engine = Engine(make_controller(), curve=[0.9, 0.88, 0.85, 0.82, 0.8, 0.78, 0.75])
    batches = []
    for _ in range(30):
        batches.append(engine.make_batch(50, "default", "v1"))
        engine.controller.observe(batches[-1])
        engine.decider.set_policy(engine.controller.propose(engine.now_s), engine.now_s)
    return batches


@pytest.mark.parametrize(
    ("settings", "overrides"),
    [
        ({}, []),
        ({"mode": "latency"}, []),
        ({"max_k": 2}, []),
        ({"max_k": 0}, []),
        ({"request_ceiling": 1}, []),
        ({"captured_lengths": (2,)}, []),
        ({"captured_lengths": (2, 7)}, []),
        ({"captured_lengths": (2, 7), "captured_tokens": (6, 12)}, []),
        ({"equal_lengths": "always", "mode": "latency", "max_k": 3}, []),
        ({"mode": "static", "static_k": 5}, []),
        ({"mode": "static", "static_k": 5, "max_k": 3}, []),
        ({"mode": "table", "table": ((4, 5), (8, 1))}, []),
        ({"mode": "table", "table": ((4, 5), (8, 1)), "request_ceiling": 2}, []),
        ({"mode": "off", "static_k": 2}, []),
        ({}, [Override("draft_tokens", 1, 1e9)]),
        ({"max_k": 2}, [Override("draft_tokens", 6, 1e9)]),
        ({"mode": "static", "static_k": 1}, [Override("policy", "goodput", 1e9)]),
    ],
)
def test_what_is_planned_is_what_the_engine_then_does(seen, settings, overrides):
    controller = make_controller(explore_share=0.0, **settings)
    for batch in seen:
        controller.observe(batch)
    policy = controller.propose(1.0, overrides)
    beliefs = controller.beliefs()
    plans = {plan["num_requests"]: plan for plan in beliefs["draft_tokens_by_batch"]}
    assert list(plans) == [1, 2, 4, 8, 16]
    for count in (1, 2, 4, 8):
        decider, ids = Decider(K, 16), [f"r{i}" for i in range(count)]
        decider.set_policy(policy, 1.0)
        for one in ids:
            decider.start(one, "not seen yet")
        decided = decider.decide(ids, 400 * count, 0, 1.0)
        assert plans[count]["draft_tokens_per_request"] * count == pytest.approx(sum(decided.num_draft_tokens), abs=0.01)
        assert plans[count]["block"] == decided.block
    assert beliefs["speedup_estimate"] == controller.headline()["speedup"] == plans[4]["speedup"]


def test_a_policy_changes_only_when_something_material_did():
    controller = make_controller()
    first = controller.propose(0.0)
    assert controller.propose(1.0) is first
    engine = Engine(controller)
    engine.run(60)
    settled = controller.propose(engine.now_s)
    assert settled.generation > first.generation
    assert controller.propose(engine.now_s + 1.0) is settled


def test_overrides_hold_until_their_time_and_name_themselves():
    controller = make_controller(capture_share=0.1)
    policy = controller.propose(0.0, Override("draft_tokens", 2, until_s=10.0))
    assert (policy.kind, policy.static_k, policy.override) == ("static", 2, "draft_tokens")
    assert policy.fallback_k == K  # if the daemon can't end it any more
    after = controller.propose(10.0, Override("draft_tokens", 2, until_s=10.0))
    assert (after.kind, after.static_k, after.override) == ("goodput", K, "")
    assert after.generation == policy.generation + 1
    both = controller.propose(11.0, [Override("capture_share", 1.0, 99.0), Override("policy", "off", 99.0)])
    assert (both.kind, both.capture_share, both.override) == ("off", 1.0, "capture_share,policy")


def test_an_override_may_draft_more_than_the_automatic_limit():
    controller = make_controller(max_k=3)
    assert controller.propose(0.0).max_k == 3
    policy = controller.propose(0.0, Override("draft_tokens", 6, 9.0))
    assert (policy.static_k, policy.max_k) == (6, 6)


@pytest.mark.parametrize(("name", "value"), [("capture_share", 1.0), ("policy", "latency"), ("policy", "static")])
def test_no_other_override_lifts_the_automatic_limit(name, value):
    assert make_controller(max_k=2).propose(0.0, Override(name, value, 9.0)).max_k == 2


def test_of_a_length_and_a_policy_the_one_set_later_counts():
    length, rule = Override("draft_tokens", 6, 9.0), Override("policy", "static", 9.0)
    controller = make_controller(max_k=4, static_k=3)
    policy = controller.propose(0.0, [length, rule])
    assert (policy.kind, policy.static_k, policy.max_k) == ("static", 3, 4)
    policy = controller.propose(0.0, [rule, length])
    assert (policy.kind, policy.static_k, policy.max_k) == ("static", 6, 6)


@pytest.mark.parametrize(
    ("name", "value"), [("speed", 1), ("policy", "fast"), ("draft_tokens", "many"), ("capture_share", -0.1)]
)
def test_an_override_that_means_nothing_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        Override(name, value, 1.0)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="goodput, latency, off, static"):
        ControllerSettings(mode="clever")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"workload_strength": 0}, "workload_strength must be at least 0.1, not 0"),
        ({"request_strength": 0.004}, "request_strength must be 0 or at least 0.1, not 0.004"),
        ({"policy_ttl_s": 0.2}, "policy_ttl_s must be from 3 to 3_600, not 0.2"),
        ({"table": ((16, 1), (4, 5))}, "ascending order of their largest batch, each once, not ((16, 1), (4, 5))"),
        ({"table": ((4, 1), (4, 5))}, "ascending order of their largest batch, each once, not ((4, 1), (4, 5))"),
    ],
)
def test_settings_that_a_controller_could_not_work_with_are_refused(settings, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        ControllerSettings(**settings)


@pytest.mark.parametrize("name", ["workload_strength", "request_strength"])
def test_the_least_strength_works(name):
    controller = make_controller(**{name: 0.1})
    for now_s in range(3):
        controller.observe(make_batch([5], [5]))
        assert all(prior.strength >= 0.1 for prior in controller.propose(now_s).priors)


@pytest.mark.parametrize("mode", ["static", "off"])
def test_other_modes_pass_through(mode):
    policy = make_controller(mode=mode, static_k=3).propose(0.0)
    assert (policy.kind, policy.static_k) == (mode, 3)


def test_a_new_domain_that_the_drafter_does_badly_on_is_reported():
    engine = Engine(make_controller(mode="static", static_k=5))
    assert engine.run(20, "chat") == []
    engine.curve = POOR
    events = engine.run(10, "code")
    assert [(event.kind, event.workload) for event in events] == [("low_for_new_workload", "code")]
    assert events[0].acceptance_length == pytest.approx(1.33, abs=0.15)


def test_a_workload_that_falls_off_is_reported():
    engine = Engine(make_controller(mode="static", static_k=5))
    assert engine.run(20) == []
    engine.curve = CURVE * 0.7
    assert [event.kind for event in engine.run(15)] == ["regressed"]


def test_new_weights_start_with_a_clean_slate():
    controller = make_controller(mode="static", static_k=5)
    engine = Engine(controller)
    engine.run(20)
    engine.curve = POOR
    engine.run(2, version="v1")
    batches = [engine.make_batch(50, "default", "v2") for _ in range(4)]
    assert [controller.observe(batch) for batch in batches] == [[]] * 4  # no drift alarm: other weights, other reference
    curve = controller.beliefs()["workloads"]["default"]["acceptance"]
    assert curve[0] == pytest.approx(POOR[0], abs=0.08)


def test_naming_the_version_that_runs_already_is_no_swap():
    controller = make_controller(mode="static", static_k=5)
    engine = Engine(controller)
    engine.run(5, version="")
    before = rounds_known(controller)
    engine.run(1, version="v1")
    assert rounds_known(controller) > before


def test_an_engine_that_has_not_heard_yet_what_it_runs_takes_nothing_back():
    controller = make_controller(mode="static", static_k=5)
    engine = Engine(controller)
    engine.run(20, version="v3")
    drift = controller.beliefs()["workloads"]["default"]["drift"]
    assert drift["state"] == "stable"
    known = rounds_known(controller)
    for version in ("", "v3"):
        engine.run(1, version=version)
        known, before = rounds_known(controller), known
        assert known > before
        assert controller.beliefs()["workloads"]["default"]["drift"]["state"] == "stable"
        assert controller.beliefs()["drafter_version"] == "v3"
    engine.run(1, version="")
    engine.run(1, version="v4")  # what it ran before it was named doesn't hide a swap
    assert rounds_known(controller) < known


def test_versions_that_take_turns_are_believed_in_together():
    controller = make_controller(mode="static", static_k=5)
    engine = Engine(controller)
    engine.run(5, version="v1")
    assert controller.propose(0.0).compare_share == 0.0
    controller.take_turns(["v1", "v2"])
    assert controller.propose(0.0).compare_share > 0.0  # their drafts are compared: there must be some
    known = rounds_known(controller)
    for version in ("v2", "v1", "v2"):
        engine.run(1, version=version)
        known, before = rounds_known(controller), known
        assert known > before  # nothing was forgotten: both drafters get the same lengths
    controller.end_turns()
    assert controller.propose(0.0).compare_share == 0.0
    for version in ("v2", "v1"):  # the one that stays needn't be the one that served last
        engine.run(1, version=version)
        known, before = rounds_known(controller), known
        assert known > before
    engine.run(1, version="v2")
    assert rounds_known(controller) < known


def test_of_versions_that_took_turns_long_ago_the_other_is_a_swap():
    controller = make_controller(mode="static", static_k=5)
    engine = Engine(controller)
    controller.take_turns(["v1", "v2"])
    for version in ("v1", "v2"):
        engine.run(1, version=version)
    controller.end_turns()
    for _ in range(64):
        controller.observe(make_batch([], [], version="v2"))
    known = rounds_known(controller)
    engine.run(1, version="v1")
    assert rounds_known(controller) < known


def test_more_workloads_than_have_curves_are_learned_from_and_share_the_engines(monkeypatch):
    monkeypatch.setattr(acceptance_beliefs, "MAX_WORKLOADS", 3)
    controller, rng = make_controller(), np.random.default_rng(0)
    names = [f"w{number}" for number in range(8)]
    for _ in range(60):
        for name in names:
            controller.observe(make_batch([5] * 20, simulate_rounds(rng, CURVE, [5] * 20), name))
        policy = controller.propose(0.0)
    assert [prior.workload for prior in policy.priors] == ["", "w0", "w1", "w2"]
    beliefs = controller.beliefs()
    assert beliefs["engine"]["rounds"] == 60 * 20 * len(names)
    assert {one["rounds"] for one in beliefs["workloads"].values()} == {60 * 20}
    assert {one["drift"]["state"] for one in beliefs["workloads"].values()} == {"stable"}
    assert not any("is forgotten" in change["reason"] for change in beliefs["changes"])


def test_a_workload_that_was_silent_for_long_makes_room_for_another(monkeypatch):
    monkeypatch.setattr(acceptance_beliefs, "MAX_WORKLOADS", 3)
    controller = make_controller(forgetting_rounds=100.0)

    def observe(*names):
        for name in names:
            controller.observe(make_batch([3] * 100, [1] * 100, name))
        return list(controller.beliefs()["workloads"])

    assert observe("a", "b", "c") == ["a", "b", "c"]
    assert observe(*"acacac", "d") == ["b", "a", "c"]  # b was silent for 700 rounds only
    assert observe(*"acac", "d") == ["a", "c", "d"]
    assert [prior.workload for prior in controller.propose(0.0).priors] == ["", "a", "c", "d"]


@pytest.mark.parametrize(
    "damage",
    [
        {"workload": [0]},
        {"workload": [5, 5]},
        {"workload": [-1, 0]},
        {"num_accepted_tokens": [1, 2, 3]},
        {"request": [-1, 2]},
        {"request": [1]},
        {"num_draft_tokens": [2**64 - 1, 1]},
    ],
)
def test_a_batch_that_does_not_fit_together_changes_nothing(damage):
    controller = make_controller()
    batch = make_batch([3, 3], [1, 2])
    bad = msgspec.structs.replace(batch, rounds=msgspec.structs.replace(batch.rounds, **damage))
    with pytest.raises(ValueError, match="batch"):
        controller.observe(bad)
    assert controller.beliefs()["workloads"] == {}


def test_steps_of_unequal_columns_are_refused():
    batch = make_batch([3], [1], steps=wire.StepColumns(step=[1], end_ns=[1], duration_us=[1]))
    with pytest.raises(ValueError, match="unequal"):
        make_controller().observe(batch)


def test_under_asynchronous_scheduling_a_step_takes_the_time_between_ends():
    # Each step is in flight for 20 ms, yet one ends every 10 ms: two overlap.
    controller, count = make_controller(), 200
    lengths = [(0, 4)[i % 2] for i in range(count)]
    steps = wire.StepColumns(
        step=list(range(count)),
        end_ns=[(i + 1) * 10_000_000 for i in range(count)],
        duration_us=[20_000] * count,
        num_requests=[1] * count,
        num_tokens=[1 + k for k in lengths],
        num_prefill_tokens=[0] * count,
        num_draft_tokens=lengths,
        context_tokens=[100] * count,
        num_drafting=lengths,
        decision=["policy"] * count,
    )
    controller.observe(make_batch([], [], steps=steps))
    controller.observe(make_batch([], [], steps=wire.StepColumns()))
    assert controller.beliefs()["step_time"]["measured_seconds"] == pytest.approx(0.010, rel=0.1)


def test_an_engine_that_does_not_speculate_is_fine():
    controller = EngineController("e", 0, 4)
    controller.observe(make_batch([], []))
    assert controller.propose(0.0).static_k == 0
    json.dumps(controller.beliefs(), allow_nan=False)


def test_acceptance_that_falls_with_the_context_is_shipped_explained_and_calibrated():
    def run(slope, version="v1"):
        for _ in range(60):
            contexts = np.exp(rng.uniform(np.log(128), np.log(16_000), 200)).astype(np.int64)
            odds = np.exp(slope * (np.log2(contexts / 128) - 3.0))[:, None]
            passed = rng.random((200, K)) < CURVE / (CURVE + odds * (1.0 - CURVE))
            accepted = np.cumprod(passed, axis=1).sum(axis=1)
            batch = make_batch([K] * 200, accepted, version=version, requests=rng.integers(0, 2**60, 200))
            batch = msgspec.structs.replace(batch, rounds=msgspec.structs.replace(batch.rounds, position=contexts.tolist()))
            controller.observe(batch)
            controller.propose(0.0)
            reasons.update(change["reason"] for change in controller.beliefs()["changes"])
        return controller.propose(0.0)

    reasons = set()
    rng, controller = np.random.default_rng(0), make_controller()
    plain = run(0.0)
    assert [prior.context_shift for prior in plain.priors] == [[], []]
    assert not any("of context" in reason for reason in reasons)
    rng, controller = np.random.default_rng(0), make_controller()
    policy = run(0.4)
    engine, mine = policy.priors
    assert mine.context_shift == engine.context_shift
    assert mine.context_shift[7] / mine.context_shift[1] == pytest.approx(np.exp(0.4 * 6), rel=0.2)
    middle = np.array(mine.acceptance) / (np.array(mine.acceptance) + mine.context_shift[4] * (1 - np.array(mine.acceptance)))
    odds = np.exp(0.4 * 0.5)  # in the middle of the bucket from 1,024 to 2,047
    assert np.allclose(middle, CURVE / (CURVE + odds * (1.0 - CURVE)), atol=0.04)
    beliefs = json.loads(json.dumps(controller.beliefs(), allow_nan=False))["workloads"]["default"]
    assert [factor for _, factor in beliefs["context_shift"]] == mine.context_shift
    assert beliefs["reliability"]["expected_calibration_error"] < 0.02
    assert any("tokens of context" in reason for reason in reasons)
    again = run(0.0, "v2")  # other weights: what the old ones did hardly counts
    assert not again.priors[1].context_shift or max(again.priors[1].context_shift) < 1.3


def rounds_known(controller):
    """Weight of the rounds that the default workload's curve rests on."""
    return controller.beliefs()["workloads"]["default"]["trials"][0]


def test_however_many_reasons_an_engine_names_few_are_kept():
    controller = make_controller()
    steps = StepColumns(
        **{name: [1] * 100 for name in StepColumns.__struct_fields__} | {"decision": [f"r{n}" for n in range(100)]}
    )
    controller.observe(make_batch([], [], steps=steps))
    decisions = controller.beliefs()["decisions"]
    assert len(decisions) == MOST_REASONS + 1
    assert decisions["other"] == 100 - MOST_REASONS
