"""Chains or trees: which side decides a step, and that both sides know where requests are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from honed.adapt.control.controller import EngineController
from honed.adapt.lengths.tree_decider import TreeDecider
from honed.adapt.protocol.wire import Policy, StepColumns, WorkloadPrior
from honed.adapt.steps.step_time import StepTimeModel
from tests.adapt.simulate import make_batch

NODES, CHAIN = 15, 7
CHAIN_STEP = StepTimeModel.of(base=10e-3, per_token=0.2e-3)
VALUES = 0.75 * 0.85 ** np.arange(NODES)
SURVIVAL = np.cumprod(np.full(CHAIN, 0.7))


def parameters(model: StepTimeModel) -> list[float]:
    return list(model.parameters)


def policy(tree_base: float | None = 10e-3, **changes: Any) -> Policy:
    nodes = (VALUES / np.concatenate(([1.0], VALUES[:-1]))).tolist()
    priors = [WorkloadPrior("", nodes, 512.0), WorkloadPrior("", [0.7] * CHAIN, keeps_chain=True)]
    base: dict[str, Any] = {
        "generation": 1,
        "ttl_s": 10.0,
        "kind": "goodput",
        "static_k": CHAIN,
        "max_k": NODES,
        "priors": priors,
        "step_seconds": parameters(CHAIN_STEP),
        "explore_share": 0.0,
    }
    if tree_base is not None:
        base["tree_step_seconds"] = parameters(StepTimeModel.of(base=tree_base, per_token=0.2e-3))
    return Policy(**(base | changes))


def decider(*given: Any, has_trees: bool = True, requests: str = "ab", **changes: Any) -> TreeDecider:
    made = TreeDecider(NODES, 8, CHAIN)
    made.has_trees = has_trees
    made.set_policy(policy(*given, **changes), 0.0)
    for request_id in requests:
        made.start(request_id)
        made.note_context(request_id, 100, 10**9, 10**9)
    return made


def sides(made: TreeDecider, steps: int, ids: list[str] | None = None, now_s: float = 0.0) -> Counter[bool]:
    return Counter(made.decide(ids or ["a", "b"], -1, 0, now_s).has_trees for _ in range(steps))


@pytest.mark.parametrize("kind", ["goodput", "latency"])
@pytest.mark.parametrize(("tree_base", "wanted"), [(10e-3, True), (20e-3, False)])
def test_the_side_with_the_higher_rate_decides(kind: str, tree_base: float, wanted: bool) -> None:
    decision = decider(tree_base, kind=kind).decide(["a", "b"], -1, 0, 0.0)
    assert decision.has_trees == wanted
    assert (max(decision.num_draft_tokens) > CHAIN) == wanted
    assert decision.block == max(decision.num_draft_tokens)


def test_its_rate_is_that_of_the_lengths_it_chooses() -> None:
    made = decider()
    for side, gains, model in ((made._chains, SURVIVAL, CHAIN_STEP), (made._trees, VALUES, CHAIN_STEP)):
        rates = [2 * (1 + gains[:k].sum()) / model.seconds(2, 2 + 2 * k, 200, 0, k) for k in range(side.num_spec_tokens + 1)]
        best = side.best(["a", "b"], 0)
        assert best is not None
        assert best.rate == pytest.approx(max(rates), rel=0.01)


def test_nothing_is_compiled_again_for_the_comparison() -> None:
    """It took seconds on the engine's thread."""
    from honed.adapt.lengths import compiled

    made = decider()
    made.prepare()
    before = len(compiled.search.signatures)
    assert made._chains.best(["a", "b"], 0) is not None
    assert len(compiled.search.signatures) == before


@pytest.mark.parametrize(
    ("changes", "now_s", "has_trees", "wanted"),
    [
        ({"kind": "static", "static_k": 3}, 0.0, True, True),
        ({"kind": "static", "static_k": 13}, 99.0, True, False),
        ({"kind": "static", "static_k": 0}, 0.0, True, False),
        ({"kind": "threshold"}, 0.0, True, True),
        ({"kind": "off"}, 0.0, True, False),
        ({"kind": "off"}, 99.0, True, False),
        ({}, 99.0, True, False),
        ({}, 0.0, False, False),
        ({"kind": "static", "static_k": 15}, 0.0, False, False),
    ],
)
def test_other_policies(changes: dict[str, Any], now_s: float, has_trees: bool, wanted: bool) -> None:
    decision = decider(has_trees=has_trees, **changes).decide(["a", "b"], -1, 0, now_s)
    assert decision.has_trees == wanted
    assert wanted or decision.block <= CHAIN, "what isn't a tree is never longer than the drafter's block"


def test_without_a_policy_chains_are_verified() -> None:
    made = TreeDecider(NODES, 8, CHAIN)
    made.has_trees = True
    assert made.decide(["a"], -1, 0, 0.0)[:4] == ([CHAIN], CHAIN, "no_policy", False)


def test_a_request_with_bad_chains_gets_no_trees_for_that() -> None:
    """Its own rounds lowered what chains promise, and not what trees do: half of a server's steps had trees that didn't pay."""
    made = decider(18e-3)
    assert sides(made, 17) == {False: 17}
    for _ in range(30):
        made.observe(["a", "b"], [CHAIN, CHAIN], [0, 0])
    assert sides(made, 100) == {False: 100}


def test_where_nothing_pays_chains_decide() -> None:
    """Both sides would then draft nothing, and seem equally good: trees were tried as often as can be."""
    dear = parameters(StepTimeModel.of(base=1e-3, per_token=10e-3, drafting=20e-3))
    made, count = decider(step_seconds=dear, tree_step_seconds=dear, explore_share=0.02), 0
    for _ in range(20_000):
        made.decide(["a", "b"], -1, 0, 0.0)
        count += made._is_on_trees
    assert count < 600


def test_requests_that_all_keep_their_chain_get_chains() -> None:
    made = decider(requests="")
    for request_id in "ab":
        made.start(request_id, keeps_chain=True)
    assert sides(made, 40) == {False: 40}
    made.start("c")
    made.note_context("c", 100, 10**9, 10**9)
    assert sides(made, 40, ["a", "b", "c"])[True] == 40
    lengths = made.decide(["a", "b", "c"], -1, 0, 0.0).num_draft_tokens
    assert max(lengths[:2]) <= CHAIN < lengths[2]


def test_the_other_side_is_tried_the_less_the_worse_it_is() -> None:
    tried = []
    for worse in (0.99, 0.9, 0.5):
        made = decider()
        chains, trees = (side.best(["a", "b"], 0) for side in (made._chains, made._trees))
        assert chains is not None
        assert trees is not None
        slower = [seconds * trees.rate / (worse * chains.rate) for seconds in CHAIN_STEP.parameters]  # every step of trees
        made = decider(tree_step_seconds=slower, explore_share=0.02)
        tried.append(sides(made, 60_000)[True] / 60_000)
    assert 0.12 > tried[0] > 4 * tried[1] > 6 * tried[2] > 0.0, tried


def test_while_a_price_is_unknown_chains_decide_and_trees_are_tried() -> None:
    assert 0.15 < sides(decider(None, explore_share=0.02), 8000)[True] / 8000 < 0.35
    assert sides(decider(None, explore_share=0.0), 100) == {False: 100}
    assert sides(decider(step_seconds=[], explore_share=0.0), 100) == {True: 100}


def test_both_sides_know_where_requests_are() -> None:
    made = decider(requests="")
    made.start("a")
    made.start("b", keeps_chain=True)
    for request_id in "ab":
        made.note_context(request_id, 100, 400, 10_000)
    wanted, rng = {"a": 100, "b": 100}, np.random.default_rng(0)
    for step in range(60):
        made.has_trees = step % 7 < 4
        decision = made.decide(["a", "b"], -1, 0, 0.0)
        nodes, chain = decision.num_draft_tokens
        took = int(rng.integers(0, min(chain, CHAIN) + 1))
        if decision.has_trees:
            of_chain = int(rng.integers(0, min(nodes, 3) + 1))
            whole = min(of_chain + int(rng.integers(0, 3)), nodes)
            made.observe_trees(["a"], [whole], [min(nodes, 3)], [of_chain])
            made.observe(["b"], [chain], [took])
        else:
            whole = int(rng.integers(0, nodes + 1))
            made.observe(["a", "b"], [nodes, chain], [whole, took])
        wanted = {"a": wanted["a"] + 1 + whole, "b": wanted["b"] + 1 + took}
        for side in (made._chains, made._trees):
            held = side.requests
            held._catch_up()
            assert {name: int(held.context[slot]) for name, slot in held.slot_of.items()} == wanted
    assert wanted["a"] > 250


def test_a_chain_ends_where_its_request_does_and_a_tree_has_more_nodes_than_it_is_deep() -> None:
    made = decider(requests="")
    made.start("a")
    made.note_context("a", 100, 105, 10_000)
    assert made._chains.decide(["a"], -1, 0, 0.0).num_draft_tokens[0] <= 3
    assert made._trees.decide(["a"], -1, 0, 0.0).num_draft_tokens[0] > 3
    made.note_context("a", 100, 105, 105)  # no room in the context either
    assert made._trees.decide(["a"], -1, 0, 0.0).num_draft_tokens[0] <= 3


class Engine:
    """An engine whose chains and trees accept and cost what is known, with its daemon's controller."""

    def __init__(self, tree_base: float, seed: int = 0) -> None:
        self.tree = StepTimeModel.of(base=tree_base, drafting=1e-3, per_token=0.2e-3)
        self.chain = StepTimeModel.of(base=10e-3, drafting=1e-3, per_token=0.2e-3)
        self.rng, self.controller = np.random.default_rng(seed), EngineController("engine-0", NODES, 8, chain_tokens=CHAIN)
        self.decider = decider(requests="ab")
        self.decider.set_policy(self.controller.propose(0.0), 0.0)
        self.step, self.now_ns = 0, 0

    def run(self, steps: int) -> float:
        """Play so many steps; return the share of those with trees."""
        count, lengths, has_trees = 0, [0, 0], False
        rows, rounds, nodes = [], [], list[int]()
        for _ in range(steps):
            decision = self.decider.decide(["a", "b"], -1, 0, self.now_ns / 1e9, [100, 100])
            model = self.tree if has_trees else self.chain
            drafted = sum(lengths)
            seconds = model.seconds(2, 2 + drafted, 200, 0, decision.block, drafted > 0) * self.rng.normal(1.0, 0.02)
            self.step, self.now_ns = self.step + 1, self.now_ns + int(1e9 * seconds)
            rows.append((self.step, self.now_ns, int(1e6 * seconds), 2, 2 + drafted, 0, drafted, 200, decision.block, "policy"))
            for number, k in enumerate(lengths):
                if has_trees and k:
                    hit = self.rng.random(k) < VALUES[:k]
                    kept = int(np.logical_and.accumulate(hit).sum())
                    nodes += np.flatnonzero(hit).tolist()
                    rounds.append((self.step, number, k, int(hit.sum()), min(k, CHAIN), min(kept, CHAIN)))
                else:
                    took = int(np.logical_and.accumulate(self.rng.random(k) < 0.7).sum())
                    rounds.append((self.step, number, k, took, 0, 0))
            count += has_trees
            lengths, has_trees = decision.num_draft_tokens, decision.has_trees
            if len(rows) == 50:
                self.tell(rows, rounds, nodes)
                rows, rounds, nodes = [], [], []
        return count / steps

    def tell(self, rows: list[Any], rounds: list[Any], nodes: list[int]) -> None:
        step, request, drafted, accepted, chain, kept = (list(column) for column in zip(*rounds, strict=True))
        batch = make_batch(drafted, accepted, requests=request, seq=self.step)
        columns = msgspec.structs.replace(batch.rounds, step=step, chain_tokens=chain, chain_accepted=kept, nodes=nodes)
        steps = StepColumns(*(list(column) for column in zip(*rows, strict=True)))
        self.controller.observe(msgspec.structs.replace(batch, rounds=columns, steps=steps))
        self.decider.set_policy(self.controller.propose(self.now_ns / 1e9), self.now_ns / 1e9)


@pytest.mark.parametrize(("tree_base", "least", "most"), [(10e-3, 0.8, 1.0), (22e-3, 0.0, 0.1)])
def test_an_engine_learns_which_side_is_better_and_follows_a_change(tree_base: float, least: float, most: float) -> None:
    engine = Engine(tree_base)
    engine.run(3000)
    assert least <= engine.run(4000) <= most
    other = 32e-3 - tree_base
    engine.tree = StepTimeModel.of(base=other, drafting=1e-3, per_token=0.2e-3)
    engine.run(20_000 if other < tree_base else 3000)
    assert 1.0 - most <= engine.run(4000) <= 1.0 - least
