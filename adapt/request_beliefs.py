"""What the engine's side knows of its running requests, in arrays over slots.

A request's failure odds relative to its workload's, theta, are estimated by Mantel-Haenszel sums over its own recent rounds,
drawn to 1 by `constant` (what the workload's curve weighs), tilted by what its drafts showed (`adapt.draft_features`). Where
acceptance depends on the length of the context, theta is times the factor of that (`adapt.context_shift`), and the request's
own is measured against the curve of its context.

Up to `FEW_REQUESTS` nothing here uses numpy: between two steps its code has left the caches, and a dozen calls cost 100 us.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from honed.adapt.acceptance import Floats, Ints
from honed.adapt.context_shift import NUM_BUCKETS, bucket_of, buckets_of
from honed.adapt.draft_features import MOST_LOG_ODDS
from honed.adapt.policy_tables import NUM_THETAS, THETA_STEPS, PolicyTables

REQUEST_FORGETTING_ROUNDS = 128.0
FEW_REQUESTS = 64
"""Up to so many requests it pays to do without numpy."""
_MOST_SLOTS = 65_536
_MOST_LABELS = 1024
_MIDDLE = NUM_THETAS // 2 + 0.5
_HALF_STEP = 0.5 / THETA_STEPS
_REQUEST_DECAY = math.exp(-1.0 / REQUEST_FORGETTING_ROUNDS)


class RequestBeliefs:
    """The running requests of one engine. Letters: n = requests asked about, K = draft tokens."""

    def __init__(self, num_spec_tokens: int, max_num_seqs: int, tables: PolicyTables) -> None:
        self.num_spec_tokens = num_spec_tokens
        self.num_ceilings = 0
        """Requests with a ceiling below K."""
        size = max(int(max_num_seqs), 1)
        self.slot_of: dict[str, int] = {}
        self.free: list[int] = []
        self.ceiling: Ints = np.full(size, num_spec_tokens, dtype=np.int64)
        self.failures: Floats = np.zeros(size)
        self.successes: Floats = np.zeros(size)
        self.shift: Floats = np.zeros(size)  # steps of theta, for the length of the context
        self._label: Ints = np.zeros(size, dtype=np.int64)
        self._shown: Floats = np.zeros(size)  # sum of what earlier rounds' drafts showed
        self._num_shown: Floats = np.zeros(size)
        self._labels: dict[str, int] = {"default": 0}
        self._last_ids: list[str] = []
        self._last_slots: Ints = np.zeros(0, dtype=np.int64)
        self.use(tables)

    def use(self, tables: PolicyTables) -> None:
        """Measure and predict with these tables from now on."""
        self._tables = tables
        self._failure_odds: list[list[float]] = tables.on_failure.tolist()
        self._success_odds: list[list[float]] = tables.on_success.tolist()
        self._row_of_label = np.zeros(_MOST_LABELS, dtype=np.int64)
        for name, label in self._labels.items():
            self._row_of_label[label] = tables.row_of_workload.get(name, 0)

    def start(self, request_id: str, workload: str = "default", ceiling: int = -1) -> None:
        """Take up a request; a second time changes nothing."""
        if request_id in self.slot_of:
            return
        slot = self._take_slot()
        self.slot_of[request_id] = slot
        self._label[slot] = self._label_of(workload)
        for array in (self.failures, self.successes, self.shift, self._shown, self._num_shown):
            array[slot] = 0.0
        limit = min(ceiling, self.num_spec_tokens) if ceiling >= 0 else self.num_spec_tokens
        self.ceiling[slot] = limit
        self.num_ceilings += limit < self.num_spec_tokens

    def finish(self, request_id: str) -> None:
        """Forget a request; an unknown one is fine."""
        slot = self.slot_of.pop(request_id, -1)
        if slot >= 0:
            self.num_ceilings -= int(self.ceiling[slot]) < self.num_spec_tokens
            self.free.append(slot)
            self._last_ids = []

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
        if features is not None:
            self._note_features(self.slot_list(request_ids), features)
        if len(request_ids) <= FEW_REQUESTS:
            self._observe_few(self.slot_list(request_ids), num_draft_tokens, num_accepted_tokens)
            return
        slots = self.slots_of(request_ids)
        drafted = np.clip(np.asarray(num_draft_tokens, dtype=np.int64), 0, self.num_spec_tokens)
        accepted = np.clip(np.asarray(num_accepted_tokens, dtype=np.int64), 0, drafted)
        row = self._row_of_label[self._label[slots]]
        decay = np.where(drafted > 0, _REQUEST_DECAY, 1.0)
        failed = self._tables.on_failure[row, accepted] * (accepted < drafted)
        passed = self._tables.on_success[row, accepted]
        if self._tables.shift is not None:
            root = np.exp(self.shift[slots] * _HALF_STEP)
            failed, passed = failed / root, passed * root
        self.failures[slots] = self.failures[slots] * decay + failed
        self.successes[slots] = self.successes[slots] * decay + passed

    def _observe_few(self, slots: list[int], num_draft_tokens: Sequence[int], num_accepted_tokens: Sequence[int]) -> None:
        failures: Any = self.failures.data
        successes: Any = self.successes.data
        label, row_of_label = self._label.data, self._row_of_label.data
        shift: Any = None if self._tables.shift is None else self.shift.data
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

    def place(self, request_ids: Sequence[str], contexts: Sequence[int] | None) -> None:
        """Look up what the lengths of the contexts make of the requests' failure odds; nothing where they aren't told."""
        shift = self._tables.shift
        if shift is None:
            return
        if contexts is None or len(contexts) != len(request_ids):
            self.shift.fill(0.0)
        elif len(request_ids) <= FEW_REQUESTS:
            few = self.slot_list(request_ids)  # before the arrays are looked at: it may make them longer
            mine: Any = self.shift.data
            label, row_of_label, steps = self._label.data, self._row_of_label.data, shift.data
            for slot, context in zip(few, contexts, strict=True):
                mine[slot] = steps[row_of_label[label[slot]] * NUM_BUCKETS + bucket_of(context)]
        else:
            slots = self.slots_of(request_ids)
            self.shift[slots] = shift[self._row_of_label[self._label[slots]] * NUM_BUCKETS + buckets_of(contexts)]

    def curves_of(self, slots: list[int], limit: int) -> list[list[float]]:
        """Predict each request's gains, [n][at most `limit`, or its own ceiling], see `PolicyTables.curves`."""
        failures, successes, ceilings = self.failures.data, self.successes.data, self.ceiling.data
        label, row_of_label, constants = self._label.data, self._row_of_label.data, self._tables.constant.data
        shift = None if self._tables.shift is None else self.shift.data
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

    def curve_of(self, slots: Ints) -> Ints:
        """Look up which of the tables' curves is each request's, [n]."""
        row = self._row_of_label[self._label[slots]]
        constant = self._tables.constant[row]
        tilt: Floats | float = 1.0
        if self._tables.feature_weight:
            seen, mean = self._num_shown[slots], np.array(self._tables.feature_mean)[row]
            tilt = np.exp(-0.5 * np.array(self._tables.feature_weight)[row] * (self._shown[slots] - seen * mean) / (seen + 1.0))
        theta = (constant * tilt + self.failures[slots]) / (constant / tilt + self.successes[slots])
        middle = _MIDDLE if self._tables.shift is None else self.shift[slots] + _MIDDLE
        step = (np.log(theta) * THETA_STEPS + middle).astype(np.int64)
        curve: Ints = np.minimum(np.maximum(step, 0), NUM_THETAS - 1) + row * NUM_THETAS
        return curve

    def slots_of(self, request_ids: Sequence[str]) -> Ints:
        """Look up slots [n]; unknown requests are taken up."""
        if request_ids == self._last_ids:
            return self._last_slots
        slots = np.array(self.slot_list(request_ids), dtype=np.int64)
        self._last_ids, self._last_slots = list(request_ids), slots
        return slots

    def slot_list(self, request_ids: Sequence[str]) -> list[int]:
        """Look up slots; unknown requests are taken up."""
        try:
            return [self.slot_of[request_id] for request_id in request_ids]
        except KeyError:
            for request_id in request_ids:
                self.start(request_id)
            return [self.slot_of.get(request_id, 0) for request_id in request_ids]

    def _take_slot(self) -> int:
        if self.free:
            return self.free.pop()
        used = len(self.slot_of)
        if used >= _MOST_SLOTS:  # somebody never finishes requests: forget the oldest rather than grow for ever
            self.finish(next(iter(self.slot_of)))
            return self.free.pop()
        if used == len(self._label):
            for name in ("_label", "ceiling", "failures", "successes", "shift", "_shown", "_num_shown"):
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
