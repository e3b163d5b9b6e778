"""Engine side's state of its running requests, in arrays over slots.

Theta is a request's failure odds relative to its workload's. It is estimated by Mantel-Haenszel sums over the request's recent
rounds, shrunk to 1 by the weight of the workload's curve. Where acceptance depends on the context's length, theta is multiplied
by that factor (`adapt.acceptance.context_shift`), and the request's own part is measured against the curve of its context.

Work for every request is compiled, see `adapt.lengths.compiled`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from honed.adapt.lengths.block_size import Choice, choose, choose_equal
from honed.adapt.lengths.policy_tables import NUM_THETAS, THETA_STEPS, Label, PolicyTables, Records
from honed.adapt.protocol.arrays import Floats, Ints

REQUEST_FORGETTING_ROUNDS = 128.0
_MOST_SLOTS = 1 << 20
_MOST_LABELS = 1024
"""Workloads that are told apart; those of no running request make room for others."""
_NO_END = 1 << 62
UNHEARD_STEPS = 4
"""Steps from a request's first round to the first decision that knows of it, where vLLM schedules ahead; and one more."""
MIDDLE = NUM_THETAS // 2 + 0.5
HALF_STEP = 0.5 / THETA_STEPS
REQUEST_DECAY = math.exp(-1.0 / REQUEST_FORGETTING_ROUNDS)
REQUEST = np.dtype(
    [
        ("failures", np.float64),
        ("successes", np.float64),
        ("context", np.int64),  # tokens that it has for certain once the steps under way are over
        ("end", np.int64),  # tokens at which it ends at the latest
        ("ceiling", np.int32),  # most draft tokens
        ("row", np.int32),  # of the tables, for its workload
        ("shift", np.float64),  # steps of theta, for the length of the context
    ]
)
"""State of a request: 48 bytes."""
_NOTHING_NOTED: Ints = np.zeros(0, dtype=np.int64)


class RequestBeliefs:
    """The running requests of one engine. Letters: n = requests in a call, K = draft tokens."""

    def __init__(self, num_spec_tokens: int, max_num_seqs: int, tables: PolicyTables) -> None:
        self.num_spec_tokens = num_spec_tokens
        self.num_ceilings = 0
        """Requests with a ceiling below K."""
        size = max(int(max_num_seqs), 1)
        self.most_room = _NO_END
        """Most drafts that any request of the last batch can take in its next round, at most its ceiling."""
        self.ending: list[tuple[str, int]] = []
        """Requests that can take fewer than K drafts since the last rounds, and how many; some may be over."""
        self._uncounted_steps = 0
        """Steps of the last batch whose tokens, one for each request, are to be added to the contexts."""
        self._unheard_steps = UNHEARD_STEPS
        """Steps to come in which some request may be near its end, though no round of it has been heard of yet."""
        self._tables, self._num_priced = tables, 0
        self._arguments: tuple[object, ...] = ()
        """Arguments of `compiled.decide` that hold for every step under one policy."""
        self.slot_of: dict[str, int] = {}
        self.free: list[int] = []
        self._keep(np.zeros(size, REQUEST), np.zeros(size, np.int64), np.zeros(size, np.int64))
        self._labels: dict[Label, int] = {("default", False): 0, ("default", True): 1}
        self._last_ids: list[str] = []
        """The last batch given to `slots_of`, its slots, and the slots of requests that ended since then."""
        self._last_slots = array("q")
        self._left: list[int] = []
        self._compiled: ModuleType | None = None  # imported when it is needed
        self.use(tables)

    def _keep(self, known: Records, label: Ints, limit: Ints) -> None:
        self.known, self._label, self._limit = known, label, limit
        """State by slot, [S] of REQUEST."""
        self.ceiling: Ints = known["ceiling"]
        self.context: Ints = known["context"]
        self._lengths: Ints = np.zeros(len(known), dtype=np.int64)
        """Buffer for the draft lengths of all."""
        self._ending_at: Ints = np.zeros((2, len(known)), dtype=np.int64)
        """Buffer for `compiled.learn`."""
        self._num_priced = 0

    def use(self, tables: PolicyTables) -> None:
        """Use these tables from now on."""
        self._tables, self._num_priced, self._unheard_steps = tables, 0, UNHEARD_STEPS
        self._rows = [tables.row_of(label) for label in self._labels]
        self.known["row"] = np.array(self._rows, dtype=np.int64)[self._label]
        if not tables.has_shift:
            self.known["shift"] = 0.0

    def _load(self) -> ModuleType:
        from honed.adapt.lengths import compiled

        self._compiled = compiled
        return compiled

    def start(self, request_id: str, workload: str = "default", ceiling: int = -1, *, keeps_chain: bool = False) -> None:
        """Add a request; a second time changes nothing.

        Args:
            ceiling: most draft tokens; −1: K.
            keeps_chain: whether it keeps the drafter's chain where others get trees.
        """
        if request_id in self.slot_of:
            return
        slot = self._take_slot()
        self.slot_of[request_id] = slot
        if slot in self._left:
            self._drop_left()
        label = self._label_of((workload, keeps_chain))
        limit = min(ceiling, self.num_spec_tokens) if ceiling >= 0 else self.num_spec_tokens
        self._label[slot], self._limit[slot] = label, limit
        self.known[slot] = (0.0, 0.0, 0, _NO_END, limit, self._rows[label], 0.0)
        self.num_ceilings += limit < self.num_spec_tokens

    def finish(self, request_id: str) -> None:
        """Forget a request; an unknown one is fine."""
        slot = self.slot_of.pop(request_id, -1)
        if slot >= 0:
            self.num_ceilings -= int(self.ceiling[slot]) < self.num_spec_tokens
            self.free.append(slot)
            self._left.append(slot)
            if len(self._left) > len(self._last_ids):  # no calls for a batch meanwhile
                self._drop_left()

    def observe(
        self,
        request_ids: Sequence[str],
        num_draft_tokens: Sequence[int],
        num_accepted_tokens: Sequence[int],
    ) -> None:
        """Learn from finished rounds; `num_draft_tokens` counts verified drafts, and those that a grammar struck.

        Rounds of unknown or finished requests teach nothing.
        """
        compiled = self._compiled or self._load()
        slots, count = self._running_slots(request_ids), len(request_ids)
        if not count == len(num_draft_tokens) == len(num_accepted_tokens):
            counts = f"{len(num_draft_tokens)} draft lengths, {len(num_accepted_tokens)} accepted lengths"
            raise ValueError(f"{count} requests, {counts}")
        slots.extend(num_draft_tokens)
        slots.extend(num_accepted_tokens)
        if count > self._ending_at.shape[1]:  # a request occurs twice
            self._ending_at = np.zeros((2, count), dtype=np.int64)
        tables, rounds = self._tables, np.frombuffer(slots, np.int64)
        num_ending = compiled.learn(
            rounds, self.known, tables.on_failure, tables.on_success, self._uncounted_steps, self._ending_at
        )
        self.ending = []
        if num_ending:
            places, rooms = self._ending_at[:, :num_ending].tolist()
            self.ending = [(request_ids[i], room) for i, room in zip(places, rooms, strict=True)]

    def advance(self, request_ids: Sequence[str], num_accepted_tokens: Sequence[int]) -> None:
        """Count on the contexts for rounds that teach nothing else; unknown or finished requests are fine."""
        for slot, num_accepted in zip(self._running_slots(request_ids), num_accepted_tokens, strict=True):
            if slot >= 0:
                self.context[slot] += num_accepted

    def note_context(self, request_id: str, num_tokens: int, end: int = _NO_END) -> None:
        """Note the length of a request's context, and the one at which it ends at the latest; an unknown request is fine."""
        slot = self.slot_of.get(request_id, -1)
        if slot >= 0:
            if self.context[slot]:  # else it wasn't in the last batch
                self._catch_up()
            most, ceiling = self.num_spec_tokens, int(self._limit[slot])
            room = end - num_tokens - 2  # this step samples a token, the next round one beside its drafts
            if not self._tables.shared_lengths:
                ceiling = max(min(ceiling, room), 0)
            if room < most + UNHEARD_STEPS:
                self._unheard_steps = UNHEARD_STEPS
            self.num_ceilings += (ceiling < most) - (int(self.ceiling[slot]) < most)
            self.context[slot], self.known["end"][slot], self.ceiling[slot] = num_tokens, end, ceiling

    def expect(
        self, request_ids: Sequence[str], contexts: Sequence[int] | None, first: int, every: int, *, are_equal: bool
    ) -> None:
        """Note contexts, of every `every`-th request of a batch from `first` on, and count on a token more of each request.

        No ceiling stays above what the request can still take, unless all requests of a step get the same length. Without
        contexts to note, only the steps are counted then: once its rounds are known, `ending` tells of what is near its end.
        """
        self.ending = []
        self._unheard_steps -= self._unheard_steps > 0
        if contexts is None and not are_equal and not self._unheard_steps:
            self._slots_of(request_ids)
            self._uncounted_steps += 1
            return
        compiled = self._compiled or self._load()
        noted = _NOTHING_NOTED if contexts is None else np.array(contexts, dtype=np.int64)
        slots = self.slots_of(request_ids)
        self._catch_up()
        self._take(compiled.expect(slots, noted, first, every, self.known, self.num_spec_tokens, are_equal))

    def _catch_up(self) -> None:
        """Add the tokens of the uncounted steps."""
        if self._uncounted_steps:
            self.context[np.frombuffer(self._last_slots, np.int64)] += self._uncounted_steps
            self._uncounted_steps = 0

    def _take(self, expected: tuple[int, int]) -> None:
        num_lowered, self.most_room = expected
        self.num_ceilings += num_lowered

    def noted_tokens(self, request_ids: Sequence[str]) -> int:
        """Sum of a batch's contexts as last noted."""
        slots = self.slots_of(request_ids)
        self._catch_up()
        return int(self.context[slots].sum())

    def search(
        self,
        request_ids: Sequence[str],
        context_tokens: int,
        num_prefill_tokens: int,
        hold: tuple[float, int, float],
        contexts: Sequence[int] | None = None,
        first: int = 0,
        every: int = 1,
        *,
        are_contexts_known: bool,
    ) -> tuple[list[int], int, float, int, float]:
        """Choose the draft lengths of a batch by `compiled.decide`: lengths, the longest, threshold, cap and margin.

        Args:
            context_tokens: sum of its contexts; −1: use the noted ones.
            hold: see `block_size.to_hold`.
            contexts: to be noted, as in `expect`.
            are_contexts_known: whether the noted contexts predict acceptance.
        """
        compiled = self._compiled or self._load()
        slots = self.slots_of(request_ids)
        self._catch_up()
        self.ending = []
        count = len(slots)
        most_tokens = count * (self.num_spec_tokens + 1) + num_prefill_tokens
        if most_tokens >= self._num_priced:
            self._price(most_tokens)
        if count > len(self._lengths):  # a request occurs twice
            self._lengths = np.zeros(count, dtype=np.int64)
        noted = _NOTHING_NOTED if contexts is None else np.array(contexts, dtype=np.int64)
        longest, threshold, cap, margin, expected = compiled.decide(
            slots,
            noted,
            self._lengths,
            first,
            every,
            context_tokens,
            num_prefill_tokens,
            self._tables.has_shift and are_contexts_known,
            *hold,
            self.num_spec_tokens,
            *self._arguments,
        )
        self._take(expected)
        return self._lengths[:count].tolist(), longest, threshold, cap, margin

    def best(self, request_ids: Sequence[str], num_prefill_tokens: int) -> Choice:
        """The best lengths of a batch of requests that are typical of their workloads; what was chosen before plays no part."""
        tables, slots = self._tables, self.slots_of(request_ids)
        self._catch_up()
        typical = self.known["row"][slots].astype(np.int64) * NUM_THETAS + NUM_THETAS // 2
        # Of another type they would be compiled for, which takes seconds.
        context_tokens, ceilings = int(self.context[slots].sum()), self.ceiling[slots].astype(np.int64)
        if not tables.are_equal(len(request_ids)):
            return choose(
                tables.curves,
                tables.model,
                is_latency=tables.is_latency,
                group=typical,
                context_tokens=context_tokens,
                num_prefill_tokens=num_prefill_tokens,
                ceilings=ceilings,
            )
        gains = tables.curves.gains[typical, : tables.limit]
        return choose_equal(
            np.where(np.arange(gains.shape[1]) < ceilings[:, None], gains, 0.0).sum(axis=0).tolist(),
            len(request_ids),
            tables.model,
            is_latency=tables.is_latency,
            context_tokens=context_tokens,
            num_prefill_tokens=num_prefill_tokens,
            captured_lengths=tables.shared_lengths,
            ceilings=ceilings,
        )

    def _price(self, num_tokens: int) -> None:
        """Gather the arguments that hold under this policy, with prices of steps of so many tokens."""
        tables, model = self._tables, self._tables.model
        seconds, captured_below = model.price_tables(num_tokens)
        self._num_priced = len(seconds)
        self._arguments = (
            self.known,
            tables.constants,
            tables.shift,
            tables.curves.gains,
            tables.curves.parts,
            tables.is_latency,
            model.parameter_array,
            seconds,
            captured_below,
            *model.kind_table(),
        )

    def sums_of(self, request_ids: Sequence[str], limit: int, *, are_contexts_known: bool) -> list[float]:
        """Add up the requests' gains by depth, within their ceilings, [at most `limit`]."""
        gains = self.gains_of(request_ids, limit, are_contexts_known=are_contexts_known)
        sums: list[float] = gains.sum(axis=0).tolist()
        return sums

    def gains_of(self, request_ids: Sequence[str], limit: int, *, are_contexts_known: bool) -> Floats:
        """Look up the requests' gains by depth, 0 beyond their ceilings, [n, at most `limit`]."""
        compiled = self._compiled or self._load()
        tables, slots = self._tables, self.slots_of(request_ids)
        curve = compiled.curves(slots, self.known, tables.constants, tables.has_shift and are_contexts_known, tables.shift)
        gains: Floats = tables.curves.gains[curve, :limit]
        if self.num_ceilings:
            gains = np.where(np.arange(gains.shape[1]) < self.ceiling[slots][:, None], gains, 0.0)
        return gains

    def slots_of(self, request_ids: Sequence[str]) -> Ints:
        """Look up slots [n]; unknown requests are added."""
        return np.frombuffer(self._slots_of(request_ids), np.int64)

    def _slots_of(self, request_ids: Sequence[str]) -> array[int]:
        """Look up slots, [n].

        A batch is usually the one before, without finished requests, followed by new ones. Checking this by identity doesn't
        read the ids themselves, which are no longer in the caches.
        """
        if self._left:
            self._drop_left()
        ids, slots = self._last_ids, self._last_slots
        count = len(ids)
        more = request_ids[count:]
        ids += more
        if ids == request_ids:
            if more:
                new = self.slot_list(more)
                slots = slots + array("q", new)
                if self._uncounted_steps:  # of the others
                    self.context[new] -= self._uncounted_steps
        else:
            del ids[count:]
            self._catch_up()
            followed = self._follow(request_ids)
            slots = array("q", followed + self.slot_list(request_ids[len(followed) :]))
            self._last_ids = list(request_ids)
        self._last_slots = slots
        return slots

    def _running_slots(self, request_ids: Sequence[str]) -> array[int]:
        """Look up slots [n] for learning: −1, or an unused one, for unknown or finished requests."""
        count = len(request_ids)
        if self._last_ids[:count] == request_ids:
            return self._last_slots[:count]
        slots = self._follow(request_ids)
        return array("q", slots + [self.slot_of.get(request_id, -1) for request_id in request_ids[len(slots) :]])

    def _drop_left(self) -> None:
        """Drop the requests from the last batch that ended since then."""
        ids, slots = self._last_ids, self._last_slots[:]  # the old array may still be in use
        for slot in self._left:
            try:
                at = slots.index(slot)
            except ValueError:  # wasn't in the batch
                continue
            del ids[at], slots[at]
        self._last_slots = slots
        self._left.clear()

    def _follow(self, request_ids: Sequence[str]) -> list[int]:
        """Look up the slots of the leading requests that were in the last batch, in its order."""
        before, slots_before, at, count = self._last_ids, self._last_slots.tolist(), 0, len(self._last_ids)
        slots: list[int] = []
        for request_id in request_ids:
            while at < count and before[at] is not request_id:
                at += 1
            if at == count:
                break
            slots.append(slots_before[at])
            at += 1
        return slots

    def slot_list(self, request_ids: Sequence[str]) -> list[int]:
        """Look up slots; unknown requests are added."""
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
        if used >= _MOST_SLOTS:  # a caller never finishes requests: forget the oldest instead of growing forever
            self.finish(next(iter(self.slot_of)))
            return self.free.pop()
        if used == len(self._label):
            self._keep(*(np.concatenate([array, np.zeros_like(array)]) for array in (self.known, self._label, self._limit)))
        return used

    def _label_of(self, label: Label) -> int:
        number = self._labels.get(label)
        if number is None:
            if len(self._labels) >= _MOST_LABELS:
                self._drop_labels()
            if len(self._labels) >= _MOST_LABELS:
                return int(label[1])
            number = self._labels[label] = len(self._labels)
            self._rows.append(self._tables.row_of(label))
        return number

    def _drop_labels(self) -> None:
        """Forget the workloads that no running request has, beside "default"."""
        names, used = list(self._labels), sorted({0, 1, *self._label[list(self.slot_of.values())].tolist()})
        renumbered = np.zeros(len(names), dtype=np.int64)
        renumbered[used] = np.arange(len(used))
        self._label[:] = renumbered[self._label]
        self._labels = {names[old]: new for new, old in enumerate(used)}
        self._rows = [self._rows[old] for old in used]
