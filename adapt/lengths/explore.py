"""Occasional trials of draft lengths not in use, so that their costs and acceptance stay known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_EXPLORING = 16
"""Most requests of a step that try something: more would make a large batch's step cost as much as many steps of one request.
Fewer would be cheaper where nothing is drafted, but a step's cost there is mostly the drafter's pass, and only they learn."""
_MOVES = ("less", "more", "half", "none")
_MOVES_OF_ALL = (*("less", "more") * 12, "half", "none")
"""Moves of the whole batch: lengths far from the best cost most, and are tried least."""
TRIAL_STEPS = 3
"""Steps of a trial of the other side. Drafts are verified a step after they were made: a single step without drafts still
verifies, and the next one drafts again. So only the later steps of a longer trial show the other side alone."""
ENOUGH_STEPS = 24.0
"""Steps of either side at a batch size (to a power of two): with fewer, its estimate may be chance."""
_REMEMBERED_STEPS = 4096.0
_CLOSE, _CLOSE_ENOUGH_TO_SEE = 0.05, 0.25
"""Margins up to which trials have their highest frequency: the second where the other side has few steps."""
_LEAST_CLOSE = 0.01
"""The smallest such margin where the other side has many steps: it falls with the square root of their number."""
_LEAST_ALONE = 0.25
_FEWEST_STEPS, _STALE_STEPS = 5.0, 1.0
"""Steps of a length at a batch size (to a power of two) that show its price, and those to which they must have faded until it
counts as unknown again."""
_LEAST_PRICE = 0.6
"""Shorter lengths than any that was seen may cost so much of its price: their steps may lie below a jump."""
UNSEEN = 3.0
"""Frequency of trials of such a length beside that of one that is nearly as good: it may be far better."""
_WORTH_A_LOOK = 1.03
"""Rate, as a multiple of the best, that a length of unknown price must reach at the lowest possible price."""
_STARTING, MOST_STARTING = 1.5, 0.04
"""Trials begun per step that explores, and at most per step."""
_PLANNED_STEPS, _PLANNED_TRIALS, _PLANNED_UNSEEN = 256, 8, 2
"""A plan is for so many steps at most, and for so many trials; for fewer of a length of unknown price, which they show. It is
made in one step of a hundred at most, so that it hardly counts among the slowest decisions."""


def trial_share(explore_share: float, margin: float, num_seen: float = ENOUGH_STEPS) -> float:
    """Share of the steps in which to begin a trial of the other side: drafting where nothing is drafted, or the reverse.

    An error of some per cent in a cost would fix the side for good, since only the chosen side is measured from then on. Trials
    cost the margin, and teach most where it is small or the other side has few steps. Beyond a close margin they become rarer
    with its square.

    Args:
        margin: see `block_size.Choice`.
        num_seen: steps of the other side.
    """
    close = _close(num_seen) if num_seen >= ENOUGH_STEPS else _CLOSE_ENOUGH_TO_SEE
    return min(_STARTING * explore_share, MOST_STARTING) * _closeness(margin, close) ** 2


def alone_share(explore_share: float, margin: float, is_drafting: bool, has_trials: bool) -> float:
    """Share of the steps that try something in that step alone.

    Such a step costs much and teaches little where nothing is drafted and drafting would be far worse: it is rarer there. It is
    also rarer where lengths that are nearly as good have their own trials, which cost less.

    Args:
        margin: see `block_size.Choice`.
        has_trials: see `LengthTrials`.
    """
    if is_drafting:
        return explore_share * (_LEAST_ALONE if has_trials else 1.0)
    return explore_share * max(_closeness(margin, _CLOSE), _LEAST_ALONE)


def _close(num_seen: float) -> float:
    """Largest margin at which trials have their highest frequency, for so many steps."""
    return max(_CLOSE * min(math.sqrt(ENOUGH_STEPS / max(num_seen, 1.0)), 1.0), _LEAST_CLOSE)


def _closeness(margin: float, close: float) -> float:
    return min(close / max(abs(margin), close), 1.0)


class Trials:
    """Trials of the other side, and the recent steps of each side."""

    def __init__(self) -> None:
        self._num_left, self._is_drafting = 0, False
        self._seen: dict[int, list[float]] = {}
        """Steps without drafts and with, by batch size."""

    def is_on(self, chance: float, share: float, margin: float, num_requests: int, is_drafting: bool) -> bool:
        """Whether a step belongs to a trial, which may begin with it.

        Args:
            chance: random draw; below `share` something else is tried.
            margin: see `block_size.Choice`.
            is_drafting: the side predicted to be best.
        """
        seen = self._seen.get(num_requests.bit_length(), (0.0, 0.0))[not is_drafting]
        if share <= chance < share + trial_share(share, margin, seen):
            self._num_left, self._is_drafting = TRIAL_STEPS, not is_drafting
        if self._num_left == 0:
            return False
        self._num_left -= 1
        return self._is_drafting != is_drafting

    def note(self, num_requests: int, is_drafting: bool) -> None:
        """Note whether a step drafted."""
        seen = self._seen.setdefault(num_requests.bit_length(), [0.0, 0.0])
        for side in (0, 1):
            seen[side] += (side == is_drafting) - seen[side] / _REMEMBERED_STEPS


class Option(NamedTuple):
    """A choice of lengths for a step, with its predicted rate and time."""

    moves: int
    """By how much everybody's length moves."""
    length: float
    """Drafts per request."""
    rate: float
    """Predicted rate."""
    seconds: float
    """Predicted time of the step."""


@dataclass(slots=True)
class _Plan:
    """The trial that is due at a batch size (to a power of two)."""

    longest: int
    """Draft length of the request with the longest."""
    share: float
    """Its frequency."""
    num_trials: int
    """Trials left."""
    until: int
    """Step at which it ends."""


class LengthTrials:
    """Trials of other lengths than the best ones: everybody's drafts are so many longer, or shorter.

    What a length costs is learned where it is used. One that seemed dear when it was, because the machine had a slow moment,
    isn't used again, nor does its neighbour lead to it where that is no better. So lengths that are believed to be nearly as
    good are tried, those that were seen least above all. It costs what they are worse by.

    The price of a length that was hardly seen is a guess: a step's time may jump anywhere between two lengths that were. It may
    cost as little as the next shorter length that was seen, or, where there is none, much less than the shortest. Lengths that
    would then be better than the best are tried, from the middle of the most promising gap, so that a jump is found by
    bisection.

    Which length is due takes long to find out, so that is planned for some steps ahead.
    """

    def __init__(self) -> None:
        self._num_left, self._moves, self._num_steps = 0, 0, 0
        self._seen: dict[tuple[int, int], tuple[float, int]] = {}
        """Steps by batch size and length, as they are remembered, and the last of them."""
        self._priced: set[tuple[int, int]] = set()
        """Batch sizes and lengths whose price was seen."""
        self._plans: dict[int, _Plan] = {}
        """By batch size."""

    def is_planned(self, num_requests: int) -> bool:
        """Whether `begin` needs no new plan."""
        plan = self._plans.get(num_requests.bit_length())
        return plan is not None and plan.num_trials > 0 and self._num_steps < plan.until

    def begin(self, chance: float, num_requests: int, longest: int) -> None:
        """Perhaps begin the planned trial.

        Args:
            chance: drawn evenly; a trial of a length that is nearly as good begins below 1.
            longest: longest draft length of the step without a trial.
        """
        plan = self._plans[num_requests.bit_length()]
        if chance < plan.share:
            plan.num_trials -= 1
            self._num_left, self._moves = TRIAL_STEPS, plan.longest - longest

    def plan(self, num_requests: int, longest: int, options: Sequence[Option], *, tries_near: bool) -> None:
        """Plan the next trials of a batch size.

        Args:
            longest: as for `begin`, of the step that the options are for.
            tries_near: not only lengths of unknown price are tried, but also those that are nearly as good. Some of a batch's
                requests alone wouldn't show their price, where the drafter's pass goes as deep as the longest.
            options: by rising length, from 0 (which isn't tried) on, the one that would be done (moves 0) included. Without
                it, and with no price seen, the shortest one's is taken as known.
        """
        best = max((option.rate for option in options), default=0.0)
        candidates, unseen = [(0.0, 0.0, 0)], list[tuple[float, float, int]]()
        is_known = [not option.moves or self._has_price(num_requests, option.length) for option in options]
        shortest = options[is_known.index(True) if True in is_known else 0 :][:1]
        known_s = _LEAST_PRICE * sum(option.seconds for option in shortest)
        for (moves, length, rate, seconds), is_seen in zip(options, is_known, strict=True):
            seen = self._times_seen(num_requests, length)
            if is_seen:
                known_s = seconds
            elif length and rate * seconds / known_s >= best * _WORTH_A_LOOK:
                unseen.append((rate * seconds / known_s, known_s, moves))
            if moves and length and tries_near:
                share = _closeness(1.0 - rate / best, _close(seen)) ** 2
                candidates.append((share / (ENOUGH_STEPS + seen), share, moves))
        _, share, chosen = max(candidates)
        if unseen:
            _, promising_s, _ = max(unseen)
            gap = [moves for _, lowest_s, moves in unseen if lowest_s == promising_s]
            share, chosen = UNSEEN, gap[len(gap) // 2]
        num_trials = _PLANNED_UNSEEN if unseen else _PLANNED_TRIALS
        self._plans[num_requests.bit_length()] = _Plan(longest + chosen, share, num_trials, self._num_steps + _PLANNED_STEPS)

    def go_on(self) -> int:
        """By how much everybody's length moves in this step; 0: no trial is on."""
        if self._num_left == 0:
            return 0
        self._num_left -= 1
        return self._moves

    def note(self, num_requests: int, length: float) -> None:
        """Note what a step did, per request."""
        self._num_steps += 1
        seen = self._times_seen(num_requests, length) + 1.0
        self._seen[num_requests.bit_length(), round(length)] = seen, self._num_steps

    def _has_price(self, num_requests: int, length: float) -> bool:
        """Whether the price of a length was seen, and not so long ago that it counts as unknown again."""
        key, seen = (num_requests.bit_length(), round(length)), self._times_seen(num_requests, length)
        if seen >= _FEWEST_STEPS:
            self._priced.add(key)
        elif seen < _STALE_STEPS:
            self._priced.discard(key)
        return key in self._priced

    def _times_seen(self, num_requests: int, length: float) -> float:
        seen, last = self._seen.get((num_requests.bit_length(), round(length)), (0.0, 0))
        return seen * math.exp((last - self._num_steps) / _REMEMBERED_STEPS)


def neighbour(
    rng: random.Random, lengths: list[int], limit: int, *, is_equal: bool = False, cold_length: int | None = None
) -> list[int]:
    """Move some of a step's draft lengths.

    Args:
        limit: most draft tokens of any request.
        is_equal: all lengths are equal, and stay so.
        cold_length: draft length while costs are unknown; then all requests move. None: costs are known.
    """
    is_known, is_drafting = cold_length is None, any(lengths)
    is_all = is_equal or len(lengths) <= MOST_EXPLORING
    move = rng.choice(_MOVES_OF_ALL if is_all and is_known else _MOVES)
    if is_drafting and move == "none":
        return [0] * len(lengths)
    # Where nothing is drafted, one token shows all that is needed: the first one's acceptance, and the cost of the pass.
    few = (1,) if is_known else (1, 2, max(cold_length or 0, 1))
    started = 0 if is_drafting else min(rng.choice(few), limit)

    def moved(length: int) -> int:
        if not is_drafting:
            return started
        if move == "half":
            return length // 2
        return max(length - 1, 0) if move == "less" else min(length + 1, limit)

    if is_all or not is_known:
        return [moved(length) for length in lengths]
    tried = lengths.copy()
    for at in rng.sample(range(len(lengths)), MOST_EXPLORING):
        tried[at] = moved(tried[at])
    return tried
