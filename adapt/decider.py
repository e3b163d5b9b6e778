"""Decides, inside the engine and every step, how many draft tokens each request gets.

Numbers per request live in arrays over slots; `decide` works on those alone, in well under 100 µs for 256 requests. What it
does when is a table:

    policy             reason          draft lengths
    none               no_policy       K for everybody
    older than ttl_s   stale_policy    static_k
    kind "off"         off             K (the attachment leaves vLLM alone)
    kind "static"      static          static_k ("override" when an operator asked for it)
    a contender        its name        adapt.contenders
    kind "goodput",    cold            static_k, until the policy carries a step-time model
    or "latency"       policy          adapt.block_size.choose
                       explore         `explore_share` of the steps, and a quarter of the cold ones: a neighbour of what the two
                                       rows above would give

A decision depends on finished rounds, the batch's shape, the policy and a seeded generator, never on the drafts it is about.
Where the policy says that acceptance depends on the length of the context, a request's failure odds are its own factor times
that of its context (`adapt.context_shift`), and its own is measured against the curve of its context.
Nothing here raises on odd input: unknown requests start as workload "default", unusable figures of a policy are replaced.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from honed.adapt.acceptance import Floats, Ints
from honed.adapt.block_size import choose, choose_shared
from honed.adapt.block_size_exact import MOST_ENTRIES, Choice, OperatingPoint, choose_equal, choose_exact, work
from honed.adapt.contenders import CONTENDERS, make_contender
from honed.adapt.contenders_base import Contender
from honed.adapt.context_shift import NUM_BUCKETS, bucket_of, buckets_of
from honed.adapt.draft_features import MOST_LOG_ODDS
from honed.adapt.length_policy import Decision
from honed.adapt.policy_tables import NUM_THETAS, THETA_STEPS, PolicyTables, limit_of, within
from honed.adapt.wire import Policy

REQUEST_FORGETTING_ROUNDS = 128.0
_MOST_SLOTS = 65_536
_MOST_LABELS = 1024
_FEW_REQUESTS = 64
"""Up to so many requests it pays to learn without numpy."""
_MOST_EXPLORING = 16
_COLD_EXPLORE_SHARE = 0.25
"""While there is no step-time model, unless exploring is switched off: not knowing costs more than finding out."""
_EXPLORE_MOVES = ("less", "more", "half", "none")
_EXPLORE_ALL_MOVES = ("less", "more", "less", "more", "less", "more", "half", "none")
"""Where the whole batch moves: what is far from the best costs most, and is tried less."""


class Decider:
    """Holds what one engine knows of its running requests, and turns it into draft lengths."""

    def __init__(self, num_spec_tokens: int, max_num_seqs: int, seed: int = 0) -> None:
        self.num_spec_tokens = max(int(num_spec_tokens), 0)
        self._random = random.Random(seed)
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._labels: dict[str, int] = {"default": 0}
        size = max(int(max_num_seqs), 1)
        self._label: Ints = np.zeros(size, dtype=np.int64)
        self._ceiling: Ints = np.full(size, self.num_spec_tokens, dtype=np.int64)
        self._failures: Floats = np.zeros(size)
        self._successes: Floats = np.zeros(size)
        self._shift: Floats = np.zeros(size)  # steps of theta, for the length of the context
        self._shown: Floats = np.zeros(size)  # sum of what earlier rounds' drafts showed
        self._num_shown: Floats = np.zeros(size)
        self._num_ceilings = 0
        self._last_ids: list[str] = []
        self._last_slots: Ints = np.zeros(0, dtype=np.int64)
        self._policy_at_s = 0.0
        self._fallback = "no_policy"
        self._point: OperatingPoint | None = None
        self._rule: Contender | None = None
        self._use(PolicyTables.of(None, self.num_spec_tokens))

    # --- policy -------------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy | None:
        """The policy that arrived last, stale or not."""
        return self._tables.policy

    @property
    def fallback(self) -> str:
        """What was fallen back to when last asked: "" (nothing), "no_policy", "stale_policy" or "observe_only"."""
        return self._fallback

    def set_policy(self, policy: Policy | None, now_s: float) -> None:
        """Put a policy in force from now on; its time to live starts again."""
        self.use(self.tabulate(policy), now_s)

    def tabulate(self, policy: Policy | None) -> PolicyTables:
        """Any thread: do the part of `set_policy` that takes time. The tables in force are given back for the same policy."""
        now = self._tables
        if policy is not None and policy == now.policy:
            return replace(now, policy=policy)
        return PolicyTables.of(policy, self.num_spec_tokens)

    def use(self, tables: PolicyTables, now_s: float) -> None:
        """Put a tabulated policy in force from now on; its time to live starts again."""
        self._policy_at_s = now_s
        if tables.by_depth is not self._tables.by_depth:
            self._use(tables)
        self._refresh_fallback(now_s)

    def policy_age(self, now_s: float) -> float:
        """Return the seconds since the policy arrived, −1 when there is none."""
        self._refresh_fallback(now_s)
        return -1.0 if self._tables.policy is None else max(now_s - self._policy_at_s, 0.0)

    def _refresh_fallback(self, now_s: float) -> None:
        policy = self._tables.policy
        if policy is None:
            self._fallback = "no_policy"
        elif now_s - self._policy_at_s > policy.ttl_s:
            self._fallback = "stale_policy"
        else:
            self._fallback = "observe_only" if policy.kind == "off" else ""

    def _use(self, tables: PolicyTables) -> None:
        self._tables, self._model = tables, tables.model
        self._failure_odds: list[list[float]] = tables.on_failure.tolist()
        self._success_odds: list[list[float]] = tables.on_success.tolist()
        self._row_of_label = np.zeros(_MOST_LABELS, dtype=np.int64)
        for name, label in self._labels.items():
            self._row_of_label[label] = tables.row_of_workload.get(name, 0)
        self._use_rule(tables.policy)

    def _use_rule(self, policy: Policy | None) -> None:
        if policy is None or policy.kind not in CONTENDERS or policy.kind == "static":
            self._rule = None
            return
        if self._rule is None or self._rule.name != policy.kind:
            self._rule = make_contender(policy.kind, self.num_spec_tokens)
            for request_id, slot in self._slots.items():
                self._rule.start(request_id, ceiling=int(self._ceiling[slot]))
        self._rule.set_limits(limit_of(policy, self.num_spec_tokens), policy.static_k, policy.table, self._model)

    # --- requests -----------------------------------------------------------------------------------------------------

    def start(self, request_id: str, workload: str = "default", ceiling: int = -1) -> None:
        """Take up a request; a second time changes nothing."""
        if request_id in self._slots:
            return
        slot = self._take_slot()
        self._slots[request_id] = slot
        self._label[slot] = self._label_of(workload)
        self._failures[slot] = self._successes[slot] = self._shift[slot] = self._shown[slot] = self._num_shown[slot] = 0.0
        limit = min(ceiling, self.num_spec_tokens) if ceiling >= 0 else self.num_spec_tokens
        self._ceiling[slot] = limit
        self._num_ceilings += limit < self.num_spec_tokens
        if self._rule is not None:
            self._rule.start(request_id, workload, ceiling)

    def finish(self, request_id: str) -> None:
        """Forget a request; an unknown one is fine."""
        slot = self._slots.pop(request_id, -1)
        if slot >= 0:
            self._num_ceilings -= int(self._ceiling[slot]) < self.num_spec_tokens
            self._free.append(slot)
            self._last_ids = []
        if self._rule is not None:
            self._rule.finish(request_id)

    def observe(
        self,
        request_ids: Sequence[str],
        num_draft_tokens: Sequence[int],
        num_accepted_tokens: Sequence[int],
        features: Sequence[float] | None = None,
    ) -> None:
        """Learn from finished rounds; `num_draft_tokens` counts what was verified, without drafts a grammar struck out.

        `features` is what each round's drafts showed, see `RoundColumns.feature`; NaN where unknown.
        """
        if not request_ids:
            return
        if features is not None:
            self._note_features(self._slot_list(request_ids), features)
        if self._rule is not None:
            self._rule.observe(request_ids, num_draft_tokens, num_accepted_tokens)
        if len(request_ids) <= _FEW_REQUESTS:
            self._observe_few(self._slot_list(request_ids), num_draft_tokens, num_accepted_tokens)
            return
        slots = self._slots_of(request_ids)
        drafted = np.clip(np.asarray(num_draft_tokens, dtype=np.int64), 0, self.num_spec_tokens)
        accepted = np.clip(np.asarray(num_accepted_tokens, dtype=np.int64), 0, drafted)
        row = self._row_of_label[self._label[slots]]
        decay = np.where(drafted > 0, _REQUEST_DECAY, 1.0)
        failed = self._tables.on_failure[row, accepted] * (accepted < drafted)
        passed = self._tables.on_success[row, accepted]
        if self._tables.shift is not None:
            root = np.exp(self._shift[slots] * _HALF_STEP)
            failed, passed = failed / root, passed * root
        self._failures[slots] = self._failures[slots] * decay + failed
        self._successes[slots] = self._successes[slots] * decay + passed

    def _observe_few(self, slots: list[int], num_draft_tokens: Sequence[int], num_accepted_tokens: Sequence[int]) -> None:
        # The same without numpy: between two steps its code has left the caches, and a dozen calls of it cost 100 us.
        failures: Any = self._failures.data
        successes: Any = self._successes.data
        label, row_of_label = self._label.data, self._row_of_label.data
        shift: Any = None if self._tables.shift is None else self._shift.data
        for slot, num_drafted, num_accepted in zip(slots, num_draft_tokens, num_accepted_tokens, strict=True):
            drafted = min(max(num_drafted, 0), self.num_spec_tokens)
            if drafted:
                accepted = min(max(num_accepted, 0), drafted)
                row = row_of_label[label[slot]]
                failed = self._failure_odds[row][accepted] if accepted < drafted else 0.0
                root = 1.0 if shift is None else math.exp(shift[slot] * _HALF_STEP)
                failures[slot] = failures[slot] * _REQUEST_DECAY + failed / root
                successes[slot] = successes[slot] * _REQUEST_DECAY + self._success_odds[row][accepted] * root

    def _note_features(self, slots: list[int], features: Sequence[float]) -> None:
        shown: Any = self._shown.data
        num_shown: Any = self._num_shown.data
        for slot, feature in zip(slots, features, strict=False):
            if math.isfinite(feature):
                shown[slot] += min(max(feature, -MOST_LOG_ODDS), MOST_LOG_ODDS)
                num_shown[slot] += 1.0

    def _slots_of(self, request_ids: Sequence[str]) -> Ints:
        if request_ids == self._last_ids:
            return self._last_slots
        slots = np.array(self._slot_list(request_ids), dtype=np.int64)
        self._last_ids, self._last_slots = list(request_ids), slots
        return slots

    def _slot_list(self, request_ids: Sequence[str]) -> list[int]:
        try:
            return [self._slots[request_id] for request_id in request_ids]
        except KeyError:
            for request_id in request_ids:
                self.start(request_id)
            return [self._slots.get(request_id, 0) for request_id in request_ids]

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        used = len(self._slots)
        if used >= _MOST_SLOTS:  # somebody never finishes requests: forget the oldest rather than grow for ever
            self.finish(next(iter(self._slots)))
            return self._free.pop()
        if used == len(self._label):
            for name in ("_label", "_ceiling", "_failures", "_successes", "_shift", "_shown", "_num_shown"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        return used

    def _label_of(self, workload: str) -> int:
        label = self._labels.get(workload)
        if label is None:
            if len(self._labels) >= _MOST_LABELS:
                return 0
            label = self._labels[workload] = len(self._labels)
            self._row_of_label[label] = self._tables.row_of_workload.get(workload, 0)
        return label

    # --- decisions ----------------------------------------------------------------------------------------------------

    def decide(
        self,
        request_ids: Sequence[str],
        context_tokens: int,
        num_prefill_tokens: int,
        now_s: float,
        contexts: Sequence[int] | None = None,
    ) -> Decision:
        """Choose the draft lengths of the decoding requests of a step."""
        self._refresh_fallback(now_s)
        policy = self._tables.policy
        if policy is None:
            return self._uniform(request_ids, self.num_spec_tokens, "no_policy")
        if policy.kind == "off" and self._fallback != "stale_policy":
            return self._uniform(request_ids, self.num_spec_tokens, "off")
        limit = limit_of(policy, self.num_spec_tokens)
        static_k = min(max(policy.static_k, 0), limit)
        if self._fallback == "stale_policy":
            return self._uniform(request_ids, static_k, "stale_policy")
        if self._rule is not None:
            return self._rule.decide(request_ids, context_tokens, num_prefill_tokens, now_s)
        if policy.kind not in ("goodput", "latency"):
            return self._uniform(request_ids, static_k, "override" if policy.override else "static")
        share = policy.explore_share
        if not self._model.is_ready and share > 0.0:
            share = max(share, _COLD_EXPLORE_SHARE)
        is_exploring = self._random.random() < share
        if not self._model.is_ready:
            if not is_exploring:
                return self._uniform(request_ids, static_k, "cold")
            lengths = [static_k] * len(request_ids)
        elif not request_ids:
            return Decision([], 0, "policy")
        else:
            if self._tables.shift is not None:
                self._place(request_ids, contexts, self._tables.shift)
            lengths = self._best(request_ids, max(context_tokens, 0), max(num_prefill_tokens, 0), limit, policy)
        if is_exploring:
            lengths = self._neighbour(lengths, static_k, limit, policy.equal_lengths)
            if self._num_ceilings:
                lengths = np.minimum(lengths, self._ceiling[self._slots_of(request_ids)]).tolist()
                if policy.equal_lengths and request_ids:
                    lengths = [min(lengths)] * len(lengths)
        return Decision(lengths, max(lengths, default=0), "explore" if is_exploring else "policy")

    def _place(self, request_ids: Sequence[str], contexts: Sequence[int] | None, shift: Floats) -> None:
        """Look up what the lengths of the contexts make of the requests' failure odds; nothing where they aren't told."""
        if contexts is None or len(contexts) != len(request_ids):
            self._shift.fill(0.0)
        elif len(request_ids) <= _FEW_REQUESTS:
            few = self._slot_list(request_ids)  # before the arrays are looked at: it may make them longer
            mine: Any = self._shift.data
            label, row_of_label, steps = self._label.data, self._row_of_label.data, shift.data
            for slot, context in zip(few, contexts, strict=True):
                mine[slot] = steps[row_of_label[label[slot]] * NUM_BUCKETS + bucket_of(context)]
        else:
            slots = self._slots_of(request_ids)
            self._shift[slots] = shift[self._row_of_label[self._label[slots]] * NUM_BUCKETS + buckets_of(contexts)]

    def _best(
        self, request_ids: Sequence[str], context_tokens: int, num_prefill_tokens: int, limit: int, policy: Policy
    ) -> list[int]:
        hysteresis = within(policy.hysteresis, 0.0, 10.0, 0.0)
        if policy.equal_lengths:
            slots = self._slots_of(request_ids)
            shared = min(limit, int(self._ceiling[slots].min())) if self._num_ceilings else limit
            choice = choose_equal(
                self._tables.by_depth[:shared, self._curve_of(slots)].sum(axis=1).tolist(), len(slots), self._model,
                is_latency=self._tables.is_latency, context_tokens=context_tokens, num_prefill_tokens=num_prefill_tokens,
                previous=self._point, hysteresis=hysteresis,
            )  # fmt: skip
        elif work(len(request_ids), limit, self._model) <= MOST_ENTRIES:
            choice = choose_exact(
                self._curves_of(self._slot_list(request_ids), limit), self._model, is_latency=self._tables.is_latency,
                context_tokens=context_tokens, num_prefill_tokens=num_prefill_tokens,
                previous=self._point, hysteresis=hysteresis,
            )  # fmt: skip
        else:
            choice = self._choose_many(self._slots_of(request_ids), context_tokens, num_prefill_tokens, limit, hysteresis)
        self._point = choice.point
        return choice.num_draft_tokens

    def _curves_of(self, slots: list[int], limit: int) -> list[list[float]]:
        # As in `_choose_many`, without numpy: see `block_size_exact`.
        failures, successes, ceilings = self._failures.data, self._successes.data, self._ceiling.data
        label, row_of_label, constants = self._label.data, self._row_of_label.data, self._tables.constant.data
        shift = None if self._tables.shift is None else self._shift.data
        curves: list[list[float]] = []
        weights, means = self._tables.feature_weight, self._tables.feature_mean
        shown, num_shown = self._shown.data, self._num_shown.data
        for slot in slots:
            row = row_of_label[label[slot]]
            theta = (constants[row] + failures[slot]) / (constants[row] + successes[slot])
            if weights and weights[row]:
                seen = num_shown[slot]
                tilt = math.exp(-0.5 * weights[row] * (shown[slot] - seen * means[row]) / (seen + 1.0))
                theta = (constants[row] * tilt + failures[slot]) / (constants[row] / tilt + successes[slot])
            middle = _MIDDLE if shift is None else _MIDDLE + shift[slot]
            step = min(max(int(math.log(theta) * THETA_STEPS + middle), 0), NUM_THETAS - 1)
            curve = self._tables.curves[row * NUM_THETAS + step]
            most = min(ceilings[slot], limit)
            curves.append(curve if most >= len(curve) else curve[:most])
        return curves

    def _curve_of(self, slots: Ints) -> Ints:
        row = self._row_of_label[self._label[slots]]
        constant = self._tables.constant[row]
        tilt: Floats | float = 1.0
        if self._tables.feature_weight:
            seen, mean = self._num_shown[slots], np.array(self._tables.feature_mean)[row]
            tilt = np.exp(-0.5 * np.array(self._tables.feature_weight)[row] * (self._shown[slots] - seen * mean) / (seen + 1.0))
        theta = (constant * tilt + self._failures[slots]) / (constant / tilt + self._successes[slots])
        middle = _MIDDLE if self._tables.shift is None else self._shift[slots] + _MIDDLE
        step = (np.log(theta) * THETA_STEPS + middle).astype(np.int64)
        curve: Ints = np.minimum(np.maximum(step, 0), NUM_THETAS - 1) + row * NUM_THETAS
        return curve

    def _choose_many(
        self, slots: Ints, context_tokens: int, num_prefill_tokens: int, limit: int, hysteresis: float
    ) -> Choice:
        curve = self._curve_of(slots)
        if not self._num_ceilings and not self._model.is_block_priced:
            return choose_shared(
                self._tables.shared, curve, self._model, is_latency=self._tables.is_latency,
                context_tokens=context_tokens, num_prefill_tokens=num_prefill_tokens,
                previous=self._point, hysteresis=hysteresis,
            )  # fmt: skip
        by_depth, group, ceilings = self._tables.by_depth[:limit], curve, None
        if self._num_ceilings:  # requests of one curve may differ in their ceilings: every request is a curve of its own
            by_depth, group, ceilings = by_depth[:, curve], None, self._ceiling[slots]
        return choose(
            by_depth.T, self._model, is_latency=self._tables.is_latency, group=group,
            context_tokens=context_tokens, num_prefill_tokens=num_prefill_tokens, ceilings=ceilings,
            previous=self._point, hysteresis=hysteresis,
        )  # fmt: skip

    def _neighbour(self, lengths: list[int], static_k: int, limit: int, is_equal: bool) -> list[int]:
        """Try something else nearby, so that the prices and the acceptance of lengths that aren't in use stay known.

        In a large batch a few requests try it, else a step of exploring would cost as much as many steps of one request.
        """
        is_all = is_equal or len(lengths) <= _MOST_EXPLORING
        move = self._random.choice(_EXPLORE_ALL_MOVES if is_all and self._model.is_ready else _EXPLORE_MOVES)
        if not any(lengths):
            few = (1, 2) if self._model.is_ready else (1, 2, max(static_k, 1))
            other = [min(self._random.choice(few), limit)] * len(lengths)
        elif move == "less":
            other = [max(k - 1, 0) for k in lengths]
        elif move == "more":
            other = [min(k + 1, limit) for k in lengths]
        elif move == "half":
            other = [k // 2 for k in lengths]
        else:
            return [0] * len(lengths)
        if is_all or not self._model.is_ready:
            return other
        chosen = lengths.copy()
        for at in self._random.sample(range(len(lengths)), _MOST_EXPLORING):
            chosen[at] = other[at]
        return chosen

    def _uniform(self, request_ids: Sequence[str], length: int, reason: str) -> Decision:
        if self._num_ceilings and request_ids:
            chosen = np.minimum(self._ceiling[self._slots_of(request_ids)], length).tolist()
            return Decision(chosen, max(chosen), reason)
        return Decision([length] * len(request_ids), length if request_ids else 0, reason)


_MIDDLE = NUM_THETAS // 2 + 0.5
_HALF_STEP = 0.5 / THETA_STEPS
_REQUEST_DECAY = math.exp(-1.0 / REQUEST_FORGETTING_ROUNDS)
