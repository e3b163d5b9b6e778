"""Work done for every request between two engine steps, compiled by numba, which vLLM depends on.

Between two steps other code has filled the caches: some forty calls of numpy for 256 requests then took 2.7 times as long as in
a tight loop. Many of them also release the interpreter's lock for a moment, and another thread of the process may take it. Here
each part is one call that reads a few kilobytes and keeps the lock.

Compiling takes seconds, once for a machine where numba can store the result (beside this file, the user's cache, or
NUMBA_CACHE_DIR), else once for a process: `Decider.prepare` does it beforehand. A stored result is discarded when this file
changes, but not when an imported constant does. Importing this file imports numba, so it is only imported where needed; the
daemon doesn't import it.

Letters: N = requests in the batch, S = slots, W = workloads of the policy, K = draft tokens, C = curves, L = levels, B = caps
on the block that are tried, T = totals of scheduled tokens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import llvmlite.binding.ffi
import numpy as np
from numba import njit

from honed.adapt.acceptance.context_shift import BITS
from honed.adapt.lengths.block_size import (
    LEVEL_VALUES,
    LEVELS,
    MOST_ENTRIES,
    NO_PREVIOUS,
    PART_BITS,
    PARTS,
    Found,
    Parts,
    promised,
)
from honed.adapt.lengths.policy_tables import NUM_THETAS, THETA_STEPS, Records
from honed.adapt.lengths.request_beliefs import HALF_STEP, MIDDLE, REQUEST, REQUEST_DECAY
from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.steps.step_time import LEAST_SECONDS, PARAMETERS

P = ParamSpec("P")
R = TypeVar("R")

# llvmlite's handle answers any name with a function, `__dict__` included. vLLM's CPU build looks through all modules when it
# starts an engine, takes that for a dict and fails.
with contextlib.suppress(AttributeError, TypeError):
    llvmlite.binding.ffi.lib._fntab.setdefault("__dict__", {})


def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    try:
        made: Callable[P, R] = njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # the result can't be stored
        made = njit(error_model="numpy")(function)
    return made


_promised = _compiled(promised)


@_compiled
def curves(slots: Ints, requests: Records, constants: Floats, has_shift: bool, steps: Floats) -> Ints:
    """Look up the curve of each request's theta, [N].

    Args:
        requests: state of each slot, [S], see `request_beliefs.REQUEST`; its `shift` is set.
        constants: see `PolicyTables.constants`, [W].
        has_shift: whether the context's length makes a difference; then `steps` of theta by row and bucket,
            [W, buckets], are looked up; see `adapt.acceptance.context_shift`.
    """
    found = np.empty(len(slots), np.int64)
    for i in range(len(slots)):
        request = requests[slots[i]]
        row = request["row"]
        shift = 0.0
        if has_shift:
            bucket, rest = 0, request["context"] >> BITS
            while rest > 0 and bucket < steps.shape[1] - 1:
                bucket, rest = bucket + 1, rest >> 1
            shift = steps[row, bucket]
        request["shift"] = shift
        theta = (constants[row] + request["failures"]) / (constants[row] + request["successes"])
        step = int(math.log(theta) * THETA_STEPS + shift + MIDDLE)
        found[i] = row * NUM_THETAS + min(max(step, 0), NUM_THETAS - 1)
    return found


@_compiled
def learn(rounds: Ints, requests: Records, on_failure: Floats, on_success: Floats, num_uncounted: int, ending: Ints) -> int:
    """Add rounds [N] to the requests' failures, successes and contexts, [S]; slot −1 is ignored.

    A round's own token is in the context since the round's decision (`expect`), or among the uncounted ones.

    Args:
        rounds: slots, draft lengths and accepted lengths, one after the other, [3·N].
        on_failure: addition for a failure after n accepted drafts, [W, K+1]; `on_success`: for the n accepted drafts.
        num_uncounted: tokens of each request that its context lacks.
        ending: space for the requests that can take fewer than K drafts now, at least [2, N]: their places among the rounds,
            and how many each can take.

    Returns:
        Number of these.
    """
    most, num_ending, count = on_failure.shape[1] - 1, 0, len(rounds) // 3
    for i in range(count):
        slot, num_drafted = rounds[i], min(max(rounds[count + i], 0), most)
        if slot < 0:
            continue
        request, num_accepted = requests[slot], min(max(rounds[2 * count + i], 0), num_drafted)
        request["context"] += num_accepted
        room = request["end"] - request["context"] - num_uncounted - 1
        if room < most:
            ending[0, num_ending], ending[1, num_ending] = i, max(room, 0)
            num_ending += 1
        if num_drafted == 0:
            continue
        row = request["row"]
        failed = on_failure[row, num_accepted] if num_accepted < num_drafted else 0.0
        root = math.exp(request["shift"] * HALF_STEP)
        request["failures"] = request["failures"] * REQUEST_DECAY + failed / root
        request["successes"] = request["successes"] * REQUEST_DECAY + on_success[row, num_accepted] * root
    return num_ending


@_compiled
def expect(
    slots: Ints, contexts: Ints, first: int, every: int, requests: Records, num_spec_tokens: int, are_equal: bool
) -> tuple[int, int]:
    """Note the lengths of contexts, of every so many-th request from the first on; count on a token more of each request.

    Unless the lengths have to be equal, ceilings are lowered to what the requests can still take.

    Returns:
        The number of ceilings that fell below K; the most that any request can take, at most its ceiling.
    """
    for i in range(len(contexts)):
        at = first + i * every
        if at < len(slots):
            requests[slots[at]]["context"] = contexts[i]
    num_lowered, most_room = 0, 0
    for i in range(len(slots)):
        request = requests[slots[i]]
        request["context"] += 1
        left = request["end"] - request["context"] - 1  # the next round samples one token beside its drafts
        ceiling = request["ceiling"]
        room = max(min(ceiling, left), 0)
        if room < ceiling and not are_equal:
            request["ceiling"] = room
            num_lowered += ceiling == num_spec_tokens
        most_room = max(most_room, room)
    return num_lowered, most_room


@_compiled
def rate_of(count: int, gained: float, seconds: float, is_latency: bool) -> float:
    """The maximised rate, from the sum of the admitted gains."""
    return count / (seconds * (count - gained)) if is_latency else (count + gained) / seconds


@_compiled
def prices(
    parameters: Floats, token_seconds: Floats, count: int, context_tokens: int, num_prefill_tokens: int
) -> tuple[float, float, float]:
    """Costs of a step without its tokens (`StepTimeModel.fixed_seconds_of_rounds`), of a block, and of each of its depths."""
    fixed = parameters[0] + parameters[1] * count + parameters[2] * context_tokens + LEAST_SECONDS
    fixed -= token_seconds[count + num_prefill_tokens] - token_seconds[count]
    drafting = parameters[4] + parameters[9] + (parameters[5] + parameters[10]) * count + parameters[8] * context_tokens
    return fixed, drafting, parameters[6] + parameters[7] * count


@_compiled
def exact(
    gains: Floats,
    group: Ints,
    ceilings: Ints,
    parameters: Floats,
    token_seconds: Floats,
    context_tokens: int,
    num_prefill_tokens: int,
    is_latency: bool,
    hold: tuple[float, int, float],
) -> Found:
    """`search` for a small batch: tries every gain as a threshold, and every cap where a shorter block is cheaper."""
    held_threshold, held_cap, hysteresis = hold
    count, depth = len(group), 0
    for i in range(count):
        depth = max(depth, min(gains.shape[1], ceilings[i]))
    is_block_priced = parameters[6] > 0.0 or parameters[7] > 0.0
    base_tokens = count + num_prefill_tokens
    fixed, drafting, per_block_token = prices(parameters, token_seconds, count, context_tokens, num_prefill_tokens)
    seconds_without = fixed + token_seconds[base_tokens]
    without = (1 if is_latency else count) / seconds_without
    # Depth first: entry e is request e % N at depth e // N + 1, and a cap of b leaves the entries below b·N.
    flat = np.full(depth * count, -1.0)
    for i in range(count):
        for j in range(min(depth, ceilings[i])):
            flat[j * count + i] = gains[group[i], j]
    order = np.argsort(-flat, kind="mergesort")
    if held_cap > 0:
        held_cap = min(held_cap, depth) if is_block_priced else depth
    best, best_cap, best_num, best_threshold, held, held_num, drafting_rate = without, 0, 0, 1.0, -1.0, 0, 0.0
    best_costs, held_costs = 0.0, 0.0
    for cap in range(depth, 0 if is_block_priced else depth - 1, -1):
        seconds = fixed + drafting + cap * per_block_token
        got, num, value, top, top_num, top_threshold, top_costs, is_top = 0.0, 0, 1.0, -1.0, 0, 1.0, 0.0, False
        for at in range(-1, len(order)):
            if at >= 0:
                value = flat[order[at]]
                if value < 0.0:
                    break
                if order[at] >= cap * count:
                    continue
                if is_top:  # half-way to the next: a small change of either doesn't change what the threshold admits
                    top_threshold, is_top = 0.5 * (top_threshold + value), False
                got, num = got + value, num + 1
            taken = seconds + token_seconds[base_tokens + num]
            rate = rate_of(count, got, taken, is_latency)
            if rate > top:
                top, top_num, top_threshold, is_top = rate, num, value, True
                top_costs = taken / seconds_without - 1.0
            if cap == held_cap and (at < 0 or value > held_threshold):
                held, held_num, held_costs = rate, num, taken / seconds_without - 1.0
        if is_top:
            top_threshold *= 0.5
        drafting_rate = max(drafting_rate, top)
        if top > best:
            best, best_cap, best_num, best_threshold, best_costs = top, cap, top_num, top_threshold, top_costs
    lengths, is_held = np.zeros(count, np.int64), False
    if hysteresis > 0.0 and held_cap != NO_PREVIOUS:
        least_held = without * (1.0 + _promised(held_costs, True, hysteresis))
        if best <= without * (1.0 + _promised(best_costs, held_num > 0, hysteresis)):
            best_num = 0
        elif held_num > 0 and held > least_held and best <= held * (1.0 + hysteresis):
            best, best_cap, best_num, best_threshold, is_held = held, held_cap, held_num, held_threshold, True
    if best_num == 0:
        return lengths, 0, 1.0, 0, without, without, drafting_rate, False
    for entry in order:
        if entry < best_cap * count and best_num > 0:
            lengths[entry % count] += 1
            best_num -= 1
    return lengths, lengths.max(), best_threshold, hold[1] if is_held else best_cap, best, without, drafting_rate, is_held


@_compiled
def _admit(
    parts: Parts,
    curve: int,
    ceiling: int,
    times: int,
    is_block_priced: bool,
    admitted: Ints,
    gained: Floats,
) -> None:
    for j in range(ceiling):
        row, part = (j if is_block_priced else 0), np.int64(parts[curve, j])
        level = (PARTS - part) >> PART_BITS
        admitted[row, level] += times
        gained[row, level] += times * part / PARTS


@_compiled
def _least(level: int) -> int:
    """Smallest gain of a level, in parts."""
    return PARTS - ((level + 1) << PART_BITS) + 1


@_compiled
def by_levels(
    gains: Floats,
    parts: Parts,
    group: Ints,
    ceilings: Ints,
    parameters: Floats,
    token_seconds: Floats,
    captured_below: Ints,
    context_tokens: int,
    num_prefill_tokens: int,
    is_latency: bool,
    hold: tuple[float, int, float],
) -> Found:
    """`search` for a large batch: gains are rounded to levels."""
    held_threshold, held_cap, hysteresis = hold
    count, depth = len(group), parts.shape[1]
    is_block_priced = depth > 1 and (parameters[6] > 0.0 or parameters[7] > 0.0)
    num_caps = depth if is_block_priced else 1
    base_tokens = count + num_prefill_tokens
    fixed, drafting, per_block_token = prices(parameters, token_seconds, count, context_tokens, num_prefill_tokens)
    seconds_without = fixed + token_seconds[base_tokens]
    without = (1 if is_latency else count) / seconds_without
    held_level, held_row = -1, 0
    if held_cap > 0:  # the last level that was wholly admitted
        held_level = min(int((1.0 - held_threshold + 1e-9) * LEVELS), LEVELS) - 1
        held_row = min(held_cap, depth) - 1 if is_block_priced else 0
    admitted = np.zeros((num_caps, LEVELS), np.int64)
    gained = np.zeros((num_caps, LEVELS))
    # Requests of one curve, which are many, are counted together; those with a lower ceiling separately.
    alike, curves_seen, num_curves = np.zeros(len(parts), np.int64), np.empty(count, np.int64), 0
    for i in range(count):
        curve = group[i]
        if ceilings[i] < depth:
            _admit(parts, curve, max(ceilings[i], 0), 1, is_block_priced, admitted, gained)
        else:
            if alike[curve] == 0:
                curves_seen[num_curves] = curve
                num_curves += 1
            alike[curve] += 1
    for at in range(num_curves):
        curve = curves_seen[at]
        _admit(parts, curve, depth, alike[curve], is_block_priced, admitted, gained)
    for row in range(num_caps):
        for level in range(1, LEVELS):
            admitted[row, level] += admitted[row, level - 1]
            gained[row, level] += gained[row, level - 1]
        if row > 0:
            for level in range(LEVELS):
                admitted[row, level] += admitted[row - 1, level]
                gained[row, level] += gained[row - 1, level]
    lengths = np.zeros(count, np.int64)
    best, best_level, best_row, left_out, best_seconds, held, held_seconds = -1.0, -1, 0, 0, 0.0, -1.0, 0.0
    for row in range(num_caps):
        before = base_tokens
        seconds = fixed + drafting + (row + 1 if is_block_priced else depth) * per_block_token
        for level in range(LEVELS):
            total = base_tokens + admitted[row, level]
            taken = seconds + token_seconds[total]
            got = gained[row, level]
            rate = rate_of(count, got, taken, is_latency)
            if rate > best:
                best, best_level, best_row, left_out, best_seconds = rate, level, row, 0, taken
            if level == held_level and row == held_row:
                held, held_seconds = rate, taken
            fitting = captured_below[total]
            if before < fitting < total:  # admit as many of the level as fill a captured graph
                taken = seconds + token_seconds[fitting]
                got -= (total - fitting) * LEVEL_VALUES[level]
                rate = rate_of(count, got, taken, is_latency)
                if rate > best:
                    best, best_level, best_row, left_out, best_seconds = rate, level, row, total - fitting, taken
            before = total
    is_held, drafting_rate = False, best
    needed = hysteresis if held_cap != NO_PREVIOUS else 0.0
    if best <= without * (1.0 + _promised(best_seconds / seconds_without - 1.0, held_level >= 0, needed)):
        return lengths, 0, 1.0, 0, without, without, drafting_rate, False
    least_held = without * (1.0 + _promised(held_seconds / seconds_without - 1.0, True, hysteresis))
    if held_level >= 0 and held > least_held and best <= held * (1.0 + hysteresis):
        best, best_level, best_row, left_out, is_held = held, held_level, held_row, 0, True
    cap = best_row + 1 if is_block_priced else depth
    below, least = _least(best_level), _least(best_level - 1 if left_out else best_level)
    longest = np.full(len(parts), -1, np.int64)  # of each curve, once computed
    for i in range(count):
        curve = group[i]
        if longest[curve] < 0:
            length = 0
            while length < cap and parts[curve, length] >= least:
                length += 1
            longest[curve] = length
        lengths[i] = max(min(longest[curve], ceilings[i]), 0)
    if left_out:  # all of the level but its least likely; among equal ones the earlier depth, then the earlier request
        entries = np.empty(count * cap, np.int64)
        gain = np.empty(count * cap)
        num = 0
        for j in range(cap):
            for i in range(count):
                if longest[group[i]] <= j < ceilings[i] and parts[group[i], j] >= below:
                    entries[num], gain[num] = i, -gains[group[i], j]
                    num += 1
        order = np.argsort(gain[:num], kind="mergesort")
        for k in range(num - left_out):
            lengths[entries[order[k]]] += 1
    threshold = held_threshold if is_held else 1.0 - (best_level + 1) / LEVELS
    return lengths, lengths.max(), threshold, cap, best, without, drafting_rate, is_held


@_compiled
def search(
    gains: Floats,
    parts: Parts,
    group: Ints,
    ceilings: Ints,
    parameters: Floats,
    token_seconds: Floats,
    captured_below: Ints,
    context_tokens: int,
    num_prefill_tokens: int,
    is_latency: bool,
    hold: tuple[float, int, float],
) -> Found:
    """Choose a threshold and a cap; `block_size.choose` describes the maximised rate.

    Args:
        gains: g(j) of each curve, [C, K]; `parts`: the same, rounded, [C, K].
        group: curve of each request, [N]; `ceilings`: its most draft tokens, [N].
        parameters: of the `StepTimeModel`, [P]; `token_seconds`: its cost of totals of scheduled tokens, [T];
            `captured_below`: largest captured size ≤ each, [T].
        hold: threshold and cap of the previous choice (or NO_PREVIOUS), and the hysteresis.
    """
    entries = len(group) * gains.shape[1]
    if parameters[6] > 0.0 or parameters[7] > 0.0:
        entries = entries * (gains.shape[1] + 1) // 2
    if entries <= MOST_ENTRIES:
        return exact(gains, group, ceilings, parameters, token_seconds, context_tokens, num_prefill_tokens, is_latency, hold)
    return by_levels(
        gains,
        parts,
        group,
        ceilings,
        parameters,
        token_seconds,
        captured_below,
        context_tokens,
        num_prefill_tokens,
        is_latency,
        hold,
    )


@_compiled
def with_kinds(
    token_seconds: Floats, rows: Ints, effects: Floats, count: int, depth: int, parameters: Floats, context_tokens: int
) -> Floats:
    """Add to the prices of totals what a batch's kinds of steps cost beside the formula: see `StepTimeModel.kind_table`.

    Returns:
        prices of the totals that a batch without prompts may have, [count · (depth + 1) + 1].
    """
    kind = int(4.0 * math.log2(count)) if count > 0 else -1
    row = rows[kind] - 1 if 0 <= kind < len(rows) else -1
    if row < 0:
        return token_seconds
    last = effects.shape[1] - 1
    fixed, drafting, per_block_token = prices(parameters, token_seconds, count, context_tokens, 0)
    made = token_seconds[: count * (depth + 1) + 1].copy()
    made[count] += effects[row, 0] * (fixed + made[count])
    for length in range(depth):  # and one more for some of the requests
        before = effects[row, min(max(length, 1), last)]  # fewer drafts than requests are the same kind of steps
        slope = (effects[row, min(length + 1, last)] - before) / count
        first, seconds = count * (length + 1), fixed + drafting + (length + 1) * per_block_token
        for more in range(1, count + 1):
            made[first + more] += (before + slope * more) * (seconds + made[first + more])
    return made


@_compiled
def decide(
    slots: Ints,
    contexts: Ints,
    lengths: Ints,
    first: int,
    every: int,
    context_tokens: int,
    num_prefill_tokens: int,
    are_contexts_known: bool,
    hold_threshold: float,
    hold_cap: int,
    hold_hysteresis: float,
    num_spec_tokens: int,
    requests: Records,
    constants: Floats,
    steps: Floats,
    gains: Floats,
    parts: Parts,
    is_latency: bool,
    parameters: Floats,
    token_seconds: Floats,
    captured_below: Ints,
    kind_rows: Ints,
    kind_effects: Floats,
) -> tuple[int, float, int, float, tuple[int, int]]:
    """Do `expect`, `curves` and `search` in one call.

    Args:
        contexts: of every so many-th request from the first on.
        lengths: room for the draft lengths, at least [N].
        context_tokens: sum of the requests' contexts; −1: of what is noted.

    Returns:
        The longest draft length, the threshold, the cap, the margin of drafting, and the result of `expect`.
    """
    count, expected = len(slots), expect(slots, contexts, first, every, requests, num_spec_tokens, False)
    group = curves(slots, requests, constants, are_contexts_known, steps)
    ceilings, noted = np.empty(count, np.int64), 0
    for i in range(count):
        request = requests[slots[i]]
        noted += request["context"]
        ceilings[i] = request["ceiling"]
    if context_tokens < 0:
        context_tokens = noted
    if num_prefill_tokens == 0 and len(kind_effects) > 0:
        token_seconds = with_kinds(token_seconds, kind_rows, kind_effects, count, gains.shape[1], parameters, context_tokens)
    found, longest, threshold, cap, _, without, drafting, _ = search(
        gains,
        parts,
        group,
        ceilings,
        parameters,
        token_seconds,
        captured_below,
        context_tokens,
        num_prefill_tokens,
        is_latency,
        (hold_threshold, hold_cap, hold_hysteresis),
    )
    lengths[:count] = found
    return longest, threshold, cap, drafting / without - 1.0, expected


def prepare() -> None:
    """Compile everything, or load the stored result."""
    requests, constants = np.zeros(1, REQUEST), np.ones(1)
    slots, table = np.zeros(1, np.int64), np.full((1, 2), 0.5)
    parts, seconds, captured = np.zeros((1, 2), np.uint16), np.ones(8), np.zeros(8, np.int64)
    parameters = np.ones(len(PARAMETERS))
    curves(slots, requests, constants, True, table)
    with_kinds(seconds, slots, table, 1, 2, parameters, 0)
    search(table, parts, slots, slots, parameters, seconds, captured, 0, 1, False, (1.0, NO_PREVIOUS, 0.0))
    learn(np.zeros(3, np.int64), requests, table, table, 0, np.zeros((2, 1), np.int64))
    expect(slots, slots, 0, 1, requests, 1, True)
    decide(
        slots,
        slots,
        slots,
        0,
        1,
        0,
        1,
        True,
        1.0,
        NO_PREVIOUS,
        0.0,
        1,
        requests,
        constants,
        table,
        table,
        parts,
        False,
        parameters,
        seconds,
        captured,
        slots,
        table,
    )
