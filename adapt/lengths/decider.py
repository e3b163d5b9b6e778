"""Decides, inside the engine and every step, how many draft tokens each request gets.

The requests' state is in `adapt.lengths.request_beliefs`. This table gives the decision in each case:

    policy             reason          draft lengths
    none               no_policy       K for all requests
    older than ttl_s   stale_policy    fallback_k
    kind "off"         off             K (the attachment leaves vLLM alone)
    kind "static"      static          static_k ("override" for an operator's override)
    kind "table"       table           of the policy's rows by batch size
    kind "goodput",    cold            static_k, until the policy carries a step-time model
    or "latency"       policy          adapt.lengths.block_size.choose
                       explore         `explore_share` of the steps or less (`explore.alone_share`), and a quarter of the cold
                                       ones: a neighbour of the choice in the two rows above. Where the choice is close or has
                                       few data, some steps in a row draft instead of not drafting, or the reverse
                                       (`explore.Trials`). Some try other lengths (`explore.LengthTrials`).
                       While drafters are compared, `compare_share` of the steps draft where a request would get no draft

Where a policy wants equal lengths, all requests of a step get one allowed length: the table's, rounded down. Only K and an
operator's override of `draft_tokens` stay as they are. So do, under "goodput" and "latency", larger batches than
`Policy.equal_up_to`: no graph holds their drafts.

No request gets more drafts than it can still take before it ends, except under equal lengths: then the step gets no more than
the one of its requests that can take the most. Without a policy, and under "off", vLLM's lengths stay.

Where the decider isn't called, the attachment gives the reason: "observe" (this engine allows no decisions), "off", "error"
(disabled after too many errors) or "unplanned" (deciding this step failed).

A decision depends on finished rounds, the batch's shape, the policy and a seeded generator, never on the drafts to be cut.
Nothing here raises on odd input: unknown requests start as workload "default", unusable figures of a policy are replaced.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from honed.adapt.lengths.block_size import PRICED, Choice, OperatingPoint, choose_equal, rates_of, to_hold
from honed.adapt.lengths.explore import (
    MOST_EXPLORING,
    MOST_STARTING,
    UNSEEN,
    LengthTrials,
    Option,
    Trials,
    alone_share,
    neighbour,
)
from honed.adapt.lengths.length_policy import Decision, dictated_length, round_down
from honed.adapt.lengths.policy_tables import PolicyTables
from honed.adapt.lengths.request_beliefs import RequestBeliefs
from honed.adapt.protocol.wire import Policy

COLD_EXPLORE_SHARE = 0.25
"""Share while there is no step-time model, unless exploring is off: missing the model costs more than exploring."""


class Decider:
    """Holds the state of one engine's running requests, and turns it into draft lengths."""

    def __init__(self, num_spec_tokens: int, max_num_seqs: int, seed: int = 0) -> None:
        self.num_spec_tokens = max(int(num_spec_tokens), 0)
        self._random = random.Random(seed)
        self._fallback = "no_policy"
        self._is_priced = False
        """Whether the policy's lengths come from prices."""
        self.reads_contexts = False
        """Whether decisions depend on the lengths of the requests' contexts, while the policy isn't stale."""
        self._point: OperatingPoint | None = None
        self._most_tokens = 0  # most tokens of any step so far
        self._trials, self._length_trials = Trials(), LengthTrials()
        self._tables = PolicyTables.of(None, self.num_spec_tokens)
        self._model = self._tables.model
        self.requests = RequestBeliefs(self.num_spec_tokens, max_num_seqs, self._tables)

    # --- policy -------------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy | None:
        """The policy that arrived last, stale or not."""
        return self._tables.policy

    @property
    def fallback(self) -> str:
        """Fallback at the last decision: "" (none), "no_policy" or "stale_policy"."""
        return self._fallback

    def set_policy(self, policy: Policy | None, now_s: float) -> None:
        """Put a policy that just arrived in force; its time to live starts again."""
        self.use(self.tabulate(policy, now_s))

    def tabulate(self, policy: Policy | None, arrived_s: float) -> PolicyTables:
        """Any thread: do the slow part of `set_policy`. For the same policy as before that is only its time of arrival."""
        now = self._tables
        if policy is not None and policy == now.policy:
            return replace(now, policy=policy, arrived_s=arrived_s)
        return PolicyTables.of(policy, self.num_spec_tokens, self._most_tokens, arrived_s)

    def use(self, tables: PolicyTables) -> None:
        """Put a tabulated policy in force from now on. Its time to live began with its arrival, however long ago that was."""
        if tables.curves is not self._tables.curves:
            self._use(tables)
        self._tables = tables
        self._refresh_fallback(tables.arrived_s)

    def policy_age(self, now_s: float) -> float:
        """Return the seconds since the policy arrived, −1 when there is none."""
        self._refresh_fallback(now_s)
        return -1.0 if self._tables.policy is None else max(now_s - self._tables.arrived_s, 0.0)

    def _refresh_fallback(self, now_s: float) -> None:
        policy = self._tables.policy
        if policy is None:
            self._fallback = "no_policy"
        elif now_s - self._tables.arrived_s > policy.ttl_s:
            self._fallback = "stale_policy"
        else:
            self._fallback = ""

    def _use(self, tables: PolicyTables) -> None:
        self._tables, self._model = tables, tables.model
        self.requests.use(tables)
        policy = tables.policy
        self._is_priced = policy is not None and policy.kind in PRICED and tables.model.is_ready
        self.reads_contexts = self._is_priced or (policy is not None and policy.equal_lengths)

    def prepare(self) -> None:
        """Compile the decision's code now, which takes seconds the first time."""
        from honed.adapt.lengths import compiled

        compiled.prepare()

    # --- requests -----------------------------------------------------------------------------------------------------

    def start(self, request_id: str, workload: str = "default", ceiling: int = -1, *, keeps_chain: bool = False) -> None:
        """Add a request, see `RequestBeliefs.start`; a second time changes nothing."""
        if request_id not in self.requests.slot_of:
            self.requests.start(request_id, workload, ceiling, keeps_chain=keeps_chain)

    def finish(self, request_id: str) -> None:
        """Forget a request; an unknown one is fine."""
        self.requests.finish(request_id)

    def observe(
        self,
        request_ids: Sequence[str],
        num_draft_tokens: Sequence[int],
        num_accepted_tokens: Sequence[int],
    ) -> None:
        """Learn from finished rounds; see `RequestBeliefs.observe`."""
        if request_ids:
            self.requests.observe(request_ids, num_draft_tokens, num_accepted_tokens)

    def note_context(self, request_id: str, num_tokens: int, end: int, room: int) -> None:
        """Note the length of a request's context, and the one at which it ends at the latest; an unknown request is fine.

        Args:
            room: most tokens that any context may have.
        """
        self.requests.note_context(request_id, num_tokens, min(end, room))

    @property
    def ending(self) -> list[tuple[str, int]]:
        """See `RequestBeliefs.ending`."""
        return self.requests.ending

    # --- decisions ----------------------------------------------------------------------------------------------------

    def best(self, request_ids: Sequence[str], num_prefill_tokens: int) -> Choice | None:
        """The lengths with the highest predicted rate, without exploring and without hysteresis; None: nothing is priced."""
        if not self._is_priced or not request_ids:
            return None
        return self.requests.best(request_ids, max(num_prefill_tokens, 0))

    def follow(self, request_ids: Sequence[str], contexts: Sequence[int] | None, first: int, every: int) -> None:
        """Count on a step whose lengths another decides; arguments as of `decide`."""
        self.requests.expect(request_ids, contexts, first, every, are_equal=self._tables.are_equal(len(request_ids)))

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
        """Choose the draft lengths of the decoding requests of a step.

        Args:
            request_ids: the decoding requests.
            context_tokens: sum of their contexts; −1: use the noted ones, from here or `requests.note_context`.
            num_prefill_tokens: prompt tokens in the same step.
            now_s: a monotonic time.
            contexts: contexts to note, of every `every`-th request from `first` on; None: none.
        """
        decision = self._choose(request_ids, context_tokens, num_prefill_tokens, now_s, (contexts, first, every))
        policy, requests = self._tables.policy, self.requests
        if policy is None or not decision.block or decision.reason == "off":
            return decision
        if not self._tables.are_equal(len(request_ids)) or decision.block <= requests.most_room:
            return decision
        most = round_down(requests.most_room, self._tables.shared_lengths)
        lengths = np.minimum(decision.num_draft_tokens, most).tolist()
        return Decision(lengths, max(lengths), decision.reason)

    def _choose(
        self,
        request_ids: Sequence[str],
        context_tokens: int,
        num_prefill_tokens: int,
        now_s: float,
        noted: tuple[Sequence[int] | None, int, int],
    ) -> Decision:
        """Choose for `decide`, which holds equal lengths to what the requests can still take."""
        self._refresh_fallback(now_s)
        tables = self._tables
        policy, static_k = tables.policy, tables.static_k
        if policy is None:
            return self._uniform(request_ids, self.num_spec_tokens, "no_policy", is_exact=True)
        if policy.kind == "off" and self._fallback != "stale_policy":
            return self._uniform(request_ids, self.num_spec_tokens, "off", is_exact=True)
        is_priced, are_equal = self._is_priced and not self._fallback, tables.are_equal(len(request_ids))
        if not is_priced or are_equal or not request_ids:  # else `RequestBeliefs.search` does it
            self.requests.expect(request_ids, *noted, are_equal=are_equal)
        if self._fallback == "stale_policy":
            return self._uniform(request_ids, tables.fallback_k, "stale_policy")
        if policy.kind not in PRICED:
            length, is_ordered = dictated_length(policy, len(request_ids), tables.limit), "draft_tokens" in policy.override
            reason = "table" if policy.kind == "table" else "override" if policy.override else "static"
            return self._uniform(request_ids, length, reason, is_exact=is_ordered)
        share, chance = policy.explore_share, self._random.random()
        if not self._is_priced:
            if chance >= (max(share, COLD_EXPLORE_SHARE) if share > 0.0 else 0.0):
                self._note(request_ids, [static_k] * len(request_ids))
                return self._uniform(request_ids, static_k, "cold")
            lengths = self._explore(request_ids, [static_k] * len(request_ids), static_k)
            self._note(request_ids, lengths)
        elif not request_ids:
            return Decision([], 0, "policy")
        else:
            lengths, block, margin = self._best(request_ids, context_tokens, max(num_prefill_tokens, 0), policy, noted)
            count = len(lengths)
            is_trial = self._trials.is_on(chance, share, margin, count, block > 0)
            has_trials = not are_equal  # of lengths that are nearly as good
            moved = lengths
            if block and not is_trial:
                # The same draw, rescaled, given that the step neither explores alone nor belongs to the other trials.
                begins = (1.0 - chance) / max(min(share, MOST_STARTING), 1e-9)
                moved = self._moved(request_ids, lengths, max(num_prefill_tokens, 0), begins, has_trials)
            is_exploring = is_trial or chance < alone_share(share, margin, block > 0, has_trials) or moved is not lengths
            if is_trial and block:
                lengths = [0] * count
            elif moved is not lengths:
                lengths = moved
            elif is_exploring:
                lengths = self._explore(request_ids, lengths, None)
            if policy.compare_share and not all(lengths) and self._random.random() < policy.compare_share:
                lengths, before = self._with_drafts(request_ids, lengths), lengths
                is_exploring = is_exploring or lengths != before
            self._note(request_ids, lengths)
            if not is_exploring:
                return Decision(lengths, block, "policy")
        return Decision(lengths, max(lengths, default=0), "explore")

    def _note(self, request_ids: Sequence[str], lengths: list[int]) -> None:
        """Note what a step does, for trials."""
        if count := len(request_ids):
            num_drafts = sum(lengths)
            self._trials.note(count, num_drafts > 0)
            self._length_trials.note(count, num_drafts / count)

    def _explore(self, request_ids: Sequence[str], lengths: list[int], cold_length: int | None) -> list[int]:
        ceilings = self.requests.ceiling[self.requests.slots_of(request_ids)] if self.requests.num_ceilings else None
        if not self._tables.are_equal(len(lengths)):
            lengths = neighbour(self._random, lengths, self._tables.limit, cold_length=cold_length)
            return lengths if ceilings is None else np.minimum(lengths, ceilings).tolist()
        allowed = self._tables.shared_lengths
        cold = None if cold_length is None else bisect_right(allowed, cold_length) - 1
        now = bisect_right(allowed, max(lengths, default=0)) - 1
        length = allowed[neighbour(self._random, [now], len(allowed) - 1, is_equal=True, cold_length=cold)[0]]
        return [length] * len(lengths) if ceilings is None else np.minimum(ceilings, length).tolist()

    def _with_drafts(self, request_ids: Sequence[str], lengths: list[int]) -> list[int]:
        """Give some of the requests without drafts one; where all lengths are equal, all the shortest."""
        tables = self._tables
        if tables.are_equal(len(lengths)):
            found = np.full(len(lengths), max(lengths) or tables.shared_lengths[:2][-1])
        else:
            found = np.array(lengths)
            idle = np.flatnonzero(found == 0).tolist()
            found[self._random.sample(idle, min(len(idle), MOST_EXPLORING))] = min(tables.limit, 1)
        ceilings = self.requests.ceiling[self.requests.slots_of(request_ids)]
        raised: list[int] = np.minimum(found, ceilings).tolist()
        return raised

    def _moved(
        self, request_ids: Sequence[str], lengths: list[int], num_prefill_tokens: int, begins: float, tries_near: bool
    ) -> list[int]:
        """The same list, or one with a trial of other lengths, which may begin where `begins` is below 1."""
        trials = self._length_trials
        moves = trials.go_on()
        if not moves:
            if begins >= UNSEEN:
                return lengths
            if not trials.is_planned(len(lengths)):
                self._plan_trials(request_ids, lengths, num_prefill_tokens, tries_near)
            trials.begin(begins, len(lengths), max(lengths))
            moves = trials.go_on()
            if not moves:
                return lengths
        ceilings = np.minimum(self.requests.ceiling[self.requests.slots_of(request_ids)], self._tables.limit)
        found: list[int] = np.clip(np.array(lengths) + moves, 0, ceilings).tolist()
        return found if found != lengths else lengths

    def _plan_trials(self, request_ids: Sequence[str], lengths: list[int], num_prefill_tokens: int, tries_near: bool) -> None:
        limit, requests = self._tables.limit, self.requests
        now, ceilings = np.array(lengths), np.minimum(requests.ceiling[requests.slots_of(request_ids)], limit)
        # Where requests may take less than any allowed length, the present one isn't among these.
        allowed = self._tables.shared_lengths if self._tables.are_equal(len(lengths)) else range(limit + 1)
        ways = np.union1d(allowed, [max(lengths)]) - max(lengths)
        moved = np.clip(now + ways[:, None], 0, ceilings)
        rates, seconds = rates_of(
            moved,
            requests.gains_of(request_ids, limit, are_contexts_known=True),
            self._model,
            is_latency=self._tables.is_latency,
            context_tokens=requests.noted_tokens(request_ids),
            num_prefill_tokens=num_prefill_tokens,
        )
        options = map(Option, ways.tolist(), moved.mean(axis=1).tolist(), rates.tolist(), seconds.tolist())
        self._length_trials.plan(len(lengths), max(lengths), list(options), tries_near=tries_near)

    def _best(
        self,
        request_ids: Sequence[str],
        context_tokens: int,
        num_prefill_tokens: int,
        policy: Policy,
        noted: tuple[Sequence[int] | None, int, int],
    ) -> tuple[list[int], int, float]:
        """Draft lengths, their maximum, and the margin of drafting."""
        requests, limit, hysteresis = self.requests, self._tables.limit, self._tables.hysteresis
        are_contexts_known = context_tokens < 0 or noted[0] is not None
        most_tokens = len(request_ids) * (limit + 1) + num_prefill_tokens
        if most_tokens > self._most_tokens:
            self._most_tokens = most_tokens
        if not self._tables.are_equal(len(request_ids)):
            lengths, longest, threshold, cap, margin = requests.search(
                request_ids,
                context_tokens,
                num_prefill_tokens,
                to_hold(self._point, hysteresis),
                *noted,
                are_contexts_known=are_contexts_known,
            )
            self._point = OperatingPoint(threshold, cap)
            return lengths, longest, margin
        gains = requests.sums_of(request_ids, limit, are_contexts_known=are_contexts_known)
        if context_tokens < 0:
            context_tokens = requests.noted_tokens(request_ids)
        choice = choose_equal(
            gains,
            len(request_ids),
            self._model,
            is_latency=self._tables.is_latency,
            context_tokens=context_tokens,
            num_prefill_tokens=num_prefill_tokens,
            previous=self._point,
            hysteresis=hysteresis,
            captured_lengths=policy.captured_lengths,
            ceilings=requests.ceiling[requests.slots_of(request_ids)] if requests.num_ceilings else None,
        )
        self._point = choice.point
        return choice.num_draft_tokens, max(choice.num_draft_tokens, default=0), choice.margin

    def _uniform(self, request_ids: Sequence[str], length: int, reason: str, *, is_exact: bool = False) -> Decision:
        """Give all requests this length, within their ceilings; `is_exact`: even without a graph for that length."""
        lengths = self._tables.shared_lengths
        if lengths and not is_exact:
            length = round_down(length, lengths)
        if self.requests.num_ceilings and request_ids:
            chosen = np.minimum(self.requests.ceiling[self.requests.slots_of(request_ids)], length).tolist()
            return Decision(chosen, max(chosen), reason)
        return Decision([length] * len(request_ids), length if request_ids else 0, reason)
