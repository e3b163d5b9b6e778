"""Tree policies to replay: each round's tree in a step, and its number of verified nodes.

    none         nothing is drafted
    chain:K      the first K tokens of the drafter's greedy chain
    tree:B       DDTree of B nodes, with the drafter's own log-probabilities
    caddtree     DDTree; each request alone takes the number n of nodes with the highest (1 + Φ_n) / (C_d + C_v(n)), C of a
                 batch of one. (The published rule stops where that first falls, which at a captured size is too soon.)
    shared       DDTree's scores, one budget over the batch (`budget`), the drafter skipped where it isn't worth it
    calibrated   DDTree with calibrated scores (`node_scores`), B nodes: `calibrated:B`
    honed        calibrated scores and the shared budget

Policies that learn do so from the verified nodes of their own trees, a round at a time.

Source: arXiv 2604.12989 for DDTree and the cost-aware rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.steps.step_time import StepTimeModel
from honed.adapt.trees.budget import TreeBudget, TreeBudgetSettings
from honed.adapt.trees.candidate_log import CandidateRequest
from honed.adapt.trees.draft_tree import ROOT, DraftTree, build_tree
from honed.adapt.trees.node_scores import UNKNOWN, NodeCalibration, NodeScores

MOST_NODES = 64
POLICIES = ("none", "chain", "tree", "caddtree", "shared", "calibrated", "honed")


@dataclass(frozen=True, eq=False, slots=True)
class Round:
    """The next verify round of a request, and the row of its candidates."""

    request: CandidateRequest
    row: int
    context_tokens: int


@dataclass(frozen=True, eq=False, slots=True)
class Planned:
    """Verified part of a round: the first `num_nodes` of the admitted nodes, and those of all nodes that the text passes."""

    num_nodes: int
    gains: Floats  # [B]
    path: list[int]  # node of depth 1, 2, … that the text passes, as far as the largest tree has it
    said: Floats  # [B] probability of each node by the drafter's own figures

    @property
    def num_accepted_tokens(self) -> int:
        """Nodes on the text's path that are verified; parents come first, so they are a prefix."""
        return sum(node < self.num_nodes for node in self.path)


class TreePolicy(Protocol):
    """A policy with its learned state."""

    name: str

    def plan(self, rounds: Sequence[Round], model: StepTimeModel) -> list[Planned] | None:
        """Choose for a step's rounds; None: the drafter is skipped."""

    def observe(self, rounds: Sequence[Round], plans: Sequence[Planned]) -> None:
        """Learn from the outcome."""


def text_path(tree: DraftTree, taken: Ints) -> list[int]:
    """Follow the text, given by the candidate it takes at each depth, through a tree."""
    children, node, path = tree.children(), ROOT, []
    for rank in taken.tolist():
        node = children.get((node, rank), ROOT)
        if node == ROOT:
            break
        path.append(node)
    return path


def parse_tree_policy(text: str, num_depths: int, model: StepTimeModel) -> TreePolicy:
    """Make a policy from its name.

    Raises:
        ValueError: there is no such policy, or its figure is invalid.
    """
    name, _, figure = text.partition(":")
    names = f"none, chain:1 … chain:{num_depths}, tree:B, calibrated:B, caddtree, shared, honed"
    known = f"unknown tree policy {text!r}: there are {names}"
    if name in ("chain", "tree", "calibrated"):
        if not figure.isdecimal() or not 1 <= int(figure) <= (num_depths if name == "chain" else 4096):
            raise ValueError(known)
        if name == "chain":
            return Chain(int(figure))
        return FixedTree(int(figure), num_depths, is_calibrated=name == "calibrated")
    if figure or name not in POLICIES:
        raise ValueError(known)
    if name == "none":
        return NoDrafts()
    if name == "caddtree":
        return CostAware(model, num_depths)
    return SharedBudget(name, num_depths, is_calibrated=name == "honed")


class NoDrafts:
    """Plain decoding."""

    name = "none"

    def plan(self, rounds: Sequence[Round], model: StepTimeModel) -> list[Planned] | None:
        """Draft nothing."""
        return None

    def observe(self, rounds: Sequence[Round], plans: Sequence[Planned]) -> None:
        """Learn nothing."""


class Chain(NoDrafts):
    """The drafter's first choices, one after the other."""

    def __init__(self, length: int) -> None:
        self.name, self.length = f"chain:{length}", length

    def plan(self, rounds: Sequence[Round], model: StepTimeModel) -> list[Planned] | None:
        plans = []
        for one in rounds:
            taken, first = one.request.taken[one.row], one.request.log_probs[one.row, :, 0]
            passed = int(np.logical_and.accumulate(taken == 0).sum())
            gains = np.exp(np.cumsum(first))
            plans.append(Planned(self.length, gains, list(range(passed)), gains))
        return plans


class FixedTree(NoDrafts):
    """A tree with the same number of nodes for every request."""

    def __init__(self, num_nodes: int, num_depths: int, *, is_calibrated: bool = False) -> None:
        self.name = f"{'calibrated' if is_calibrated else 'tree'}:{num_nodes}"
        self.num_nodes = num_nodes
        self.grower = Grower(num_nodes, num_depths, is_calibrated=is_calibrated)

    def plan(self, rounds: Sequence[Round], model: StepTimeModel) -> list[Planned] | None:
        return [self.grower.grow(one) for one in rounds]

    def observe(self, rounds: Sequence[Round], plans: Sequence[Planned]) -> None:
        self.grower.observe(rounds, plans)


class CostAware(NoDrafts):
    """DDTree cut by predicted cost, for each request as if it were alone."""

    name = "caddtree"

    def __init__(self, model: StepTimeModel, num_depths: int) -> None:
        self.grower = Grower(MOST_NODES, num_depths, is_calibrated=False)
        self._num_depths = num_depths

    def plan(self, rounds: Sequence[Round], model: StepTimeModel) -> list[Planned] | None:
        plans = []
        for one in rounds:
            tree = self.grower.grow(one)
            context = one.context_tokens
            fixed = model.fixed_seconds(1, context, 0) + model.block_seconds(1, self._num_depths, context)
            seconds = fixed + model.token_seconds(1 + np.arange(len(tree.gains) + 1))
            rates = (1.0 + np.concatenate([[0.0], np.cumsum(tree.gains)])) / seconds
            plans.append(replace(tree, num_nodes=int(rates.argmax())))
        return plans

    def observe(self, rounds: Sequence[Round], plans: Sequence[Planned]) -> None:
        self.grower.observe(rounds, plans)


class SharedBudget(NoDrafts):
    """One budget over the batch, from the nodes' expected gains and the tokens' costs."""

    def __init__(self, name: str, num_depths: int, *, is_calibrated: bool, settings: TreeBudgetSettings | None = None) -> None:
        settings = settings or TreeBudgetSettings(most_nodes_per_request=MOST_NODES)
        self.name = name
        self.budget = TreeBudget(num_depths, settings)
        self.grower = Grower(settings.most_nodes_per_request, num_depths, is_calibrated=is_calibrated)

    def plan(self, rounds: Sequence[Round], model: StepTimeModel) -> list[Planned] | None:
        workloads, context = [one.request.workload for one in rounds], sum(one.context_tokens for one in rounds)
        if not self.budget.is_worth_drafting(workloads, model, context_tokens=context):
            return None
        trees = [self.grower.grow(one) for one in rounds]
        choice = self.budget.allocate([tree.gains for tree in trees], workloads, model, context_tokens=context)
        return [replace(tree, num_nodes=num) for num, tree in zip(choice.num_draft_tokens, trees, strict=True)]

    def observe(self, rounds: Sequence[Round], plans: Sequence[Planned]) -> None:
        self.grower.observe(rounds, plans)


class Grower:
    """Builds the largest tree a round may have; with calibrated scores if asked."""

    def __init__(self, most_nodes: int, num_depths: int, *, is_calibrated: bool) -> None:
        self._most_nodes = most_nodes
        self.scores = NodeScores(num_depths) if is_calibrated else None
        self.calibration, self.calibration_before = NodeCalibration(), NodeCalibration()
        """Calibration of the verified nodes: by the scores that built the trees, and by the drafter's own."""

    def grow(self, one: Round) -> Planned:
        """Build a tree, not cut yet."""
        log_probs, off_chain = one.request.log_probs[one.row], None
        if self.scores is not None:
            log_probs, off_chain = self.scores.scores(log_probs, one.request.temperature)
        tree = build_tree(log_probs, self._most_nodes, off_chain=off_chain)
        gains = np.exp(tree.score)
        said = gains if self.scores is None else np.exp(tree.rescored(one.request.log_probs[one.row]))
        return Planned(len(tree), gains, text_path(tree, one.request.taken[one.row]), said)

    def observe(self, rounds: Sequence[Round], plans: Sequence[Planned]) -> None:
        """Learn from rounds: the token at each node that the walk reached is known, none beyond."""
        taken = np.stack([one.request.taken[one.row] for one in rounds])
        for plan, ranks in zip(plans, taken, strict=True):
            ranks[plan.num_accepted_tokens + 1 :] = UNKNOWN
            if UNKNOWN not in ranks[: plan.num_accepted_tokens + 1]:  # the text went on as far as the walk reached
                is_reached = np.zeros(plan.num_nodes)
                is_reached[plan.path[: plan.num_accepted_tokens]] = 1.0
                self.calibration.observe(plan.gains[: plan.num_nodes], is_reached)
                self.calibration_before.observe(plan.said[: plan.num_nodes], is_reached)
        if self.scores is not None:
            log_probs = np.stack([one.request.log_probs[one.row] for one in rounds])
            self.scores.observe(log_probs, taken, np.array([one.request.temperature for one in rounds]))
