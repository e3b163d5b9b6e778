"""What an engine that verifies draft trees teaches, from its rounds to the number of nodes that is chosen."""

import msgspec
import numpy as np
import pytest

from honed.adapt.control.controller import EngineController
from honed.adapt.lengths.decider import Decider
from honed.adapt.protocol.wire import StepColumns
from honed.adapt.steps.step_time import StepTimeModel
from tests.adapt.simulate import make_batch

SLOTS, CHAIN = 31, 7


def tree_batch(rng, values, sizes, seq, workload="default"):
    """Rounds of trees whose node i is passed with chance values[i]; the chain in them is their first nodes."""
    hit = (rng.random((len(sizes), SLOTS)) < values) & (np.arange(SLOTS) < sizes[:, None])
    chain = np.minimum(sizes, CHAIN)
    kept = np.logical_and.accumulate(hit, axis=1).sum(1)
    batch = make_batch(sizes, hit.sum(1), workload, seq=seq, requests=10 * seq + rng.integers(0, 30, size=len(sizes)))
    rounds = msgspec.structs.replace(
        batch.rounds,
        chain_tokens=chain.tolist(),
        chain_accepted=np.minimum(kept, chain).tolist(),
        nodes=np.nonzero(hit)[1].tolist(),
    )
    return msgspec.structs.replace(batch, rounds=rounds, steps=StepColumns())


def learned(values, rounds=3000, seed=0):
    rng, controller = np.random.default_rng(seed), EngineController("engine-0", SLOTS, 8, chain_tokens=CHAIN)
    events = []
    for seq in range(1, rounds // 100 + 1):
        sizes = rng.integers(1, SLOTS + 1, size=100)
        events += controller.observe(tree_batch(rng, values, sizes, seq))
    return controller, events


def chosen(controller, **step_time):
    policy = controller.propose(0.0)
    model = StepTimeModel.of(base=5e-3, drafting=5e-4, **step_time)
    policy = msgspec.structs.replace(policy, step_seconds=list(model.parameters), explore_share=0.0, kind="goodput")
    decider = Decider(SLOTS, 8)
    decider.set_policy(policy, 0.0)
    return decider.decide(["a"], 100, 0, 0.0).num_draft_tokens[0]


def test_priors_are_what_nodes_are_worth():
    values = 0.7 * 0.85 ** np.arange(SLOTS)
    controller, _ = learned(values)
    priors = {prior.workload: prior for prior in controller.propose(0.0).priors if not prior.keeps_chain}
    assert np.cumprod(priors["default"].acceptance) == pytest.approx(values, abs=0.08)
    assert np.cumprod(priors[""].acceptance).sum() == pytest.approx(values.sum(), rel=0.08)


def test_the_budget_follows_the_price_of_a_row_and_the_worth_of_nodes():
    good, _ = learned(0.7 * 0.9 ** np.arange(SLOTS))
    free, cheap, dear = (chosen(good, per_token=price) for price in (1e-7, 3e-4, 3e-3))
    assert free == SLOTS
    assert 0 < dear < cheap < SLOTS
    worthless, _ = learned(np.full(SLOTS, 0.004))
    assert chosen(worthless, per_token=3e-3) == 0


def test_budgets_that_change_are_no_drift():
    rng, controller = np.random.default_rng(5), EngineController("engine-0", SLOTS, 8, chain_tokens=CHAIN)
    values = 0.7 * 0.85 ** np.arange(SLOTS)
    alarms = []
    for seq in range(1, 81):
        size = 31 if seq % 20 < 10 else 3
        alarms += controller.observe(tree_batch(rng, values, np.full(100, size), seq))
    assert not alarms
    for seq in range(81, 121):
        alarms += controller.observe(tree_batch(rng, values / 4, np.full(100, 15), seq))
    assert alarms


@pytest.mark.fault("values of nodes that follow no change")
def test_nodes_follow_a_change_as_the_chain_does():
    """After 300 rounds nodes were still believed worth nine tenths of what they had been."""
    controller, _ = learned(0.8 * 0.95 ** np.arange(SLOTS), rounds=8000)
    rng, values = np.random.default_rng(9), 0.3 * 0.7 ** np.arange(SLOTS)
    for seq in range(100, 130):
        controller.observe(tree_batch(rng, values, np.full(10, 31), seq))
    priors = [p for p in controller.propose(0.0).priors if not p.keeps_chain]
    assert len(priors) == 2
    for prior in priors:
        assert np.cumprod(prior.acceptance).sum() < 2.0 * values.sum()


@pytest.mark.fault("values of nodes that stay while chains show a change")
def test_nodes_follow_what_chains_show_while_trees_rest():
    """Trees that had been learned on hard traffic were hardly tried on easy traffic, where they were the faster by a tenth."""
    hard, easy = 0.2 * 0.8 ** np.arange(SLOTS), 0.6 * 0.85 ** np.arange(SLOTS)
    controller, _ = learned(hard)
    rng = np.random.default_rng(4)
    for first, least, most in ((easy[0], 2.0 * hard.sum(), 1.5 * easy.sum()), (hard[0], 0.0, 1.5 * hard.sum())):
        for seq in range(100, 130):
            drafted = rng.integers(1, CHAIN + 1, size=40)
            passed = np.logical_and.accumulate(rng.random((40, CHAIN)) < first, axis=1).sum(1)
            requests = rng.integers(0, 10, size=40) + 40 * seq
            batch = make_batch(drafted, np.minimum(passed, drafted), seq=seq + int(1e3 * first), requests=requests)
            controller.observe(batch)
        for prior in (one for one in controller.propose(0.0).priors if not one.keeps_chain):
            assert prior.acceptance[0] == pytest.approx(first, abs=0.1)
            assert least < np.cumprod(prior.acceptance).sum() < most


def test_the_drafters_chain_is_told_apart_from_the_nodes():
    """Told by as many positions as there are slots, its acceptance length never was that of the drafter."""
    values = 0.85 ** np.arange(1, SLOTS + 1)
    controller, _ = learned(values)
    engine = controller.beliefs()["engine"]
    assert len(engine["acceptance"]) == CHAIN
    assert controller.propose(0.0).static_k == CHAIN


def test_a_swap_forgets_what_nodes_were_worth():
    controller, _ = learned(0.7 * 0.9 ** np.arange(SLOTS))
    rng, values = np.random.default_rng(9), 0.2 * 0.9 ** np.arange(SLOTS)
    for seq in range(100, 104):
        batch = tree_batch(rng, values, np.full(100, 31), seq)
        controller.observe(msgspec.structs.replace(batch, drafter_version="v2"))
    prior = next(p for p in controller.propose(0.0).priors if p.workload == "default")
    assert np.cumprod(prior.acceptance)[0] == pytest.approx(0.2, abs=0.08)


def test_requests_that_keep_chains_are_priced_by_chains():
    """By what nodes are worth, they drafted all seven tokens for ever, where none pays."""
    rng, values = np.random.default_rng(3), 0.7 * 0.9 ** np.arange(SLOTS)
    controller, _ = learned(values)
    for seq in range(100, 120):
        for workload, chances in (("forms", np.full(CHAIN, 0.1)), ("default", values[:CHAIN])):
            drafted = rng.integers(1, CHAIN + 1, size=100)
            passed = np.logical_and.accumulate(rng.random((100, CHAIN)) < chances, axis=1).sum(1)
            requests = rng.integers(0, 30, size=100)
            controller.observe(make_batch(drafted, np.minimum(passed, drafted), workload, seq=seq, requests=requests))
    policy = controller.propose(0.0)
    model = StepTimeModel.of(base=5e-3, drafting=5e-4, per_token=1e-3)
    policy = msgspec.structs.replace(policy, step_seconds=list(model.parameters), explore_share=0.0, kind="goodput")
    decider = Decider(SLOTS, 8)
    decider.set_policy(policy, 0.0)
    decider.start("tree", "default")
    decider.start("chain", "default", CHAIN, keeps_chain=True)
    decider.start("form", "forms", CHAIN, keeps_chain=True)
    decider.start("new", "unheard", CHAIN, keeps_chain=True)
    tree, chain, form, new = (
        decider.decide([name], 100, 0, 0.0).num_draft_tokens[0] for name in ("tree", "chain", "form", "new")
    )
    assert tree > chain > form
    assert form <= 1
    assert form <= new <= chain, "of a workload that nobody knows, the engine's chains tell"


def test_an_engine_that_verifies_no_trees_any_more_is_priced_by_chains():
    """What it had learned of nodes would have held until its drafter is swapped."""
    controller, _ = learned(0.7 * 0.9 ** np.arange(SLOTS))
    before = controller.propose(0.0)
    controller.has_trees = False
    after = controller.propose(0.0)
    assert not any(prior.keeps_chain for prior in after.priors)
    of_chains = next(prior for prior in before.priors if prior.keeps_chain)
    assert after.priors[0].acceptance == of_chains.acceptance != before.priors[0].acceptance


def test_chains_are_told_of_beside_trees():
    controller, _ = learned(0.7 * 0.9 ** np.arange(SLOTS))
    assert [prior.workload for prior in controller.propose(0.0).priors if prior.keeps_chain] == ["", "default"]


def paths(rng, requests, chances, seq, workload="default", left=None):
    """Rounds of trees that are the drafter's chain: as many nodes, one below the other; `left`: tokens until texts end."""
    passed = np.logical_and.accumulate(rng.random((len(requests), CHAIN)) < chances[:, None], axis=1).sum(1)
    batch = make_batch([CHAIN] * len(requests), passed, workload, seq=seq, requests=requests)
    nodes = [node for count in passed.tolist() for node in range(count)]
    chain = {"chain_tokens": [CHAIN] * len(requests), "chain_accepted": passed.tolist(), "nodes": nodes}
    if left is not None:
        chain["num_delivered"] = np.minimum(passed + 1, left).tolist()
    return msgspec.structs.replace(batch, rounds=msgspec.structs.replace(batch.rounds, **chain))


def test_a_tree_that_is_the_chain_promises_what_the_chain_does_though_requests_differ():
    """Hard requests have more rounds: by rounds, their trees seemed worth a tenth less than the same chains.

    People are told what rounds get: less than a request without history is promised.
    """
    rng, controller = np.random.default_rng(2), EngineController("engine-0", CHAIN, 32, chain_tokens=CHAIN)
    emitted = []
    chances, left, requests = np.zeros(32), np.zeros(32), np.zeros(32, dtype=np.int64)
    for seq in range(1, 301):
        is_over = left <= 0
        chances[is_over] = 1.0 / (1.0 + np.exp(-rng.normal(1.1, 1.0, size=int(is_over.sum()))))
        requests[is_over], left[is_over] = rng.integers(1, 2**62, size=int(is_over.sum())), 200
        batch = paths(rng, requests, chances, seq)
        left -= batch.rounds.num_emitted
        emitted.append(np.mean(batch.rounds.num_emitted))
        controller.observe(batch)
    told = controller.beliefs()
    for one in (told["engine"], told["workloads"]["default"]):
        assert one["acceptance_length"] == pytest.approx(np.mean(emitted[-100:]), rel=0.06)
    assert 1.0 + np.cumprod(controller._acceptance.typical_nodes()).sum() == pytest.approx(np.mean(emitted[-100:]), rel=0.06)
    gains = {one.keeps_chain: np.cumprod(one.acceptance).sum() for one in controller.propose(0.0).priors if one.workload}
    assert gains[False] == pytest.approx(gains[True], rel=0.08)
    assert gains[True] > 1.1 * (np.mean(emitted[-100:]) - 1.0)


def test_trees_of_short_answers_are_worth_what_chains_are():
    """Rounds that ended a text counted only where they failed: of answers of 8 tokens a quarter of the gain was missing."""
    rng, controller = np.random.default_rng(4), EngineController("engine-0", CHAIN, 32, chain_tokens=CHAIN)
    left, requests = np.zeros(32, dtype=np.int64), np.zeros(32, dtype=np.int64)
    for seq in range(1, 101):
        is_over = left <= 0
        requests[is_over], left[is_over] = rng.integers(1, 2**62, size=int(is_over.sum())), 8
        batch = paths(rng, requests, np.full(32, 0.75), seq, left=left)
        left -= batch.rounds.num_delivered
        controller.observe(batch)
    nodes = next(one for one in controller.propose(0.0).priors if one.workload and not one.keeps_chain)
    assert np.cumprod(nodes.acceptance).sum() == pytest.approx((0.75 ** np.arange(1, CHAIN + 1)).sum(), rel=0.06)
