"""Decides, where an engine can verify draft trees, whether a step gets trees or the drafter's chains, and how many drafts.

There are two deciders: one of chains, which counts tokens of the drafter's block, and one of trees, which counts nodes. Both
know all requests. Their acceptance and their step times are learned apart. A tree accepts more than the chain in it, and a step
with trees takes longer. So under "goodput" and "latency" the side with the higher predicted rate decides, for `_RUN_STEPS`
steps: finding it takes two searches, and the first step of a run still verifies what the other side has drafted. The other side
is tried for a run now and then (`explore.trial_share`), since what it costs and accepts is learned in its steps alone.

Sides are compared by what is typical of workloads. A request's own rounds say how good its chains are, but not its trees: with
them, trees would seem better just where chains are bad.

Other kinds of policy give lengths for trees. Without a policy that holds, vLLM's own chains are verified.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from honed.adapt.lengths.block_size import PRICED
from honed.adapt.lengths.decider import COLD_EXPLORE_SHARE, Decider
from honed.adapt.lengths.explore import TRIAL_STEPS, trial_share
from honed.adapt.lengths.length_policy import Decision
from honed.adapt.lengths.policy_tables import PolicyTables
from honed.adapt.protocol.wire import Policy
from honed.adapt.steps.step_time import StepTimeModel

_RUN_STEPS = 16
_REMEMBERED_STEPS = 4096.0


class TreeTables(NamedTuple):
    """A policy's tables for both sides."""

    policy: Policy | None
    chains: PolicyTables
    trees: PolicyTables

    @property
    def model(self) -> StepTimeModel:
        """Step times of chains."""
        return self.chains.model


@dataclass(slots=True)
class _Side:
    """Holds the choice for batches of one size (to a power of two)."""

    has_trees: bool = False
    is_best_trees: bool = False
    until: int = 0
    """Step before which this isn't asked again."""
    seen: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Recent steps with chains, and with trees."""


class TreeDecider:
    """Holds the state of one engine's running requests, and turns it into a side and draft lengths.

    Args:
        num_nodes: most nodes of a tree.
        chain_tokens: draft tokens of the drafter's block.
    """

    def __init__(self, num_nodes: int, max_num_seqs: int, chain_tokens: int, seed: int = 0) -> None:
        self._chains, self._trees = Decider(chain_tokens, max_num_seqs, seed), Decider(num_nodes, max_num_seqs, seed + 1)
        self._random = random.Random(seed + 2)
        self.has_trees = False
        """Whether the engine verifies trees now."""
        self._spare = num_nodes - chain_tokens
        self._keeping: set[str] = set()
        """Running requests that keep their chain."""
        self._policy: Policy | None = None
        self._sides: dict[int, _Side] = {}
        self._num_steps = 0
        self._is_on_trees = False
        """Whether the last step's lengths are of trees."""

    # --- policy -------------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy | None:
        """The policy that arrived last, stale or not."""
        return self._policy

    @property
    def fallback(self) -> str:
        """See `Decider.fallback`."""
        return self._chains.fallback

    @property
    def reads_contexts(self) -> bool:
        """See `Decider.reads_contexts`."""
        return True  # rounds of trees teach the one side no contexts, and those of chains not the other

    def set_policy(self, policy: Policy | None, now_s: float) -> None:
        """Put a policy that just arrived in force; its time to live starts again."""
        self.use(self.tabulate(policy, now_s))

    def tabulate(self, policy: Policy | None, arrived_s: float) -> TreeTables:
        """Any thread: do the slow part of `set_policy`."""
        chains, trees = (None, None) if policy is None else _sides_of(policy)
        return TreeTables(policy, self._chains.tabulate(chains, arrived_s), self._trees.tabulate(trees, arrived_s))

    def use(self, tables: TreeTables) -> None:
        """Put a tabulated policy in force from now on."""
        self._policy = tables.policy
        self._chains.use(tables.chains)
        self._trees.use(tables.trees)

    def policy_age(self, now_s: float) -> float:
        """Return the seconds since the policy arrived, −1 when there is none."""
        return self._chains.policy_age(now_s)

    def prepare(self) -> None:
        """Compile the decision's code now."""
        self._chains.prepare()

    # --- requests -----------------------------------------------------------------------------------------------------

    @property
    def ending(self) -> list[tuple[str, int]]:
        """See `RequestBeliefs.ending`."""
        return (self._trees if self._is_on_trees else self._chains).ending

    def start(self, request_id: str, workload: str = "default", ceiling: int = -1, *, keeps_chain: bool = False) -> None:
        """Add a request, see `RequestBeliefs.start`; a second time changes nothing."""
        self._chains.start(request_id, workload, ceiling)
        if keeps_chain:
            self._keeping.add(request_id)
            most = self._chains.num_spec_tokens
            ceiling = most if ceiling < 0 else min(ceiling, most)
        self._trees.start(request_id, workload, ceiling, keeps_chain=keeps_chain)

    def finish(self, request_id: str) -> None:
        """Forget a request; an unknown one is fine."""
        self._keeping.discard(request_id)
        self._chains.finish(request_id)
        self._trees.finish(request_id)

    def note_context(self, request_id: str, num_tokens: int, end: int, room: int) -> None:
        """As `Decider.note_context`. A tree of more nodes than the block has tokens isn't deeper than the block."""
        self._chains.note_context(request_id, num_tokens, end, room)
        self._trees.note_context(request_id, num_tokens, end + self._spare * (request_id not in self._keeping), room)

    def observe(
        self,
        request_ids: Sequence[str],
        num_draft_tokens: Sequence[int],
        num_accepted_tokens: Sequence[int],
    ) -> None:
        """Learn from a step's finished rounds of chains, after those of trees."""
        if not request_ids:
            return
        of_trees = self._chains.ending
        self._chains.observe(request_ids, num_draft_tokens, num_accepted_tokens)
        self._chains.requests.ending = of_trees + self._chains.ending
        keeping = [request_id in self._keeping for request_id in request_ids]
        if any(keeping):
            rows = zip(request_ids, num_draft_tokens, num_accepted_tokens, keeping, strict=True)
            kept = [(name, drafted, accepted) for name, drafted, accepted, keeps in rows if keeps]
            self._trees.observe(*(list(column) for column in zip(*kept, strict=True)))
        if not all(keeping):
            rows_of = zip(request_ids, num_accepted_tokens, keeping, strict=True)
            others = [(name, accepted) for name, accepted, keeps in rows_of if not keeps]
            self._trees.requests.advance(*(list(column) for column in zip(*others, strict=True)))

    def observe_trees(
        self,
        request_ids: Sequence[str],
        num_accepted_tokens: Sequence[int],
        chain_tokens: Sequence[int],
        chain_accepted: Sequence[int],
    ) -> None:
        """Learn from finished rounds of trees: what the chains in them would have given, and where requests are now."""
        if not request_ids:
            return
        self._trees.requests.advance(request_ids, num_accepted_tokens)  # what nodes are worth the policy says
        more = [whole - of_chain for whole, of_chain in zip(num_accepted_tokens, chain_accepted, strict=True)]
        self._chains.requests.advance(request_ids, more)  # first: `observe` looks at who is near the end
        self._chains.observe(request_ids, chain_tokens, chain_accepted)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def decide(
        self,
        request_ids: Sequence[str],
        context_tokens: int,
        num_prefill_tokens: int,
        now_s: float,
        contexts: Sequence[int] | None = None,
        first: int = 0,
        every: int = 1,
    ) -> Decision:
        """Choose trees or chains, and the draft lengths; arguments as of `Decider.decide`."""
        self._num_steps += 1
        self._is_on_trees = self._wants_trees(request_ids, num_prefill_tokens, now_s)
        side, other = (self._trees, self._chains) if self._is_on_trees else (self._chains, self._trees)
        other.follow(request_ids, contexts, first, every)
        decision = side.decide(request_ids, context_tokens, num_prefill_tokens, now_s, contexts, first, every)
        return decision._replace(has_trees=self._is_on_trees and decision.block > 0)

    def _wants_trees(self, request_ids: Sequence[str], num_prefill_tokens: int, now_s: float) -> bool:
        policy = self._policy
        if not self.has_trees or policy is None:
            return False
        if policy.kind == "off" or self.policy_age(now_s) > policy.ttl_s:
            return False
        return policy.kind not in PRICED or (bool(request_ids) and self._side(request_ids, num_prefill_tokens))

    def _side(self, request_ids: Sequence[str], num_prefill_tokens: int) -> bool:
        if all(request_id in self._keeping for request_id in request_ids):
            return False
        side = self._sides.setdefault(len(request_ids).bit_length(), _Side())
        if self._num_steps >= side.until:
            side.until = self._num_steps + _RUN_STEPS
            self._choose(side, request_ids, num_prefill_tokens)
        for which in (0, 1):
            side.seen[which] += (which == side.has_trees) - side.seen[which] / _REMEMBERED_STEPS
        return side.has_trees

    def _choose(self, side: _Side, request_ids: Sequence[str], num_prefill_tokens: int) -> None:
        assert self._policy is not None
        share, hysteresis = self._policy.explore_share, self._policy.hysteresis
        chains, trees = (one.best(request_ids, num_prefill_tokens) for one in (self._chains, self._trees))
        if chains is None or trees is None:
            side.is_best_trees, trying = chains is None and trees is not None, COLD_EXPLORE_SHARE if share > 0.0 else 0.0
        else:
            margin = trees.rate_drafting / chains.rate - 1.0  # where nothing pays, chains are as good
            side.is_best_trees = margin > (-hysteresis if side.is_best_trees else hysteresis)
            trying = TRIAL_STEPS * trial_share(share, margin, side.seen[not side.is_best_trees])
        side.has_trees = side.is_best_trees != (self._random.random() < trying)


def _sides_of(policy: Policy) -> tuple[Policy, Policy]:
    """Split a policy into one for chains and one for trees."""
    of_chains = [prior for prior in policy.priors if prior.keeps_chain]
    chains = msgspec.structs.replace(
        policy, priors=[msgspec.structs.replace(prior, keeps_chain=False) for prior in of_chains] or policy.priors
    )
    trees = msgspec.structs.replace(policy, step_seconds=policy.tree_step_seconds, kind_effects=policy.tree_kind_effects)
    return chains, trees
