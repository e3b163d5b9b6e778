"""Predicts the times of a log's steps with other draft lengths.

    T' = T · c(kind')·M(step') / (c(kind)·M(step))

M is the model of `adapt.steps.step_time`, fitted to the log's steps. c(kind) is the robust mean of measured / M over steps of
that kind (batch size, draft length, block, with or without prefill), shrunk to the overall mean by `KIND_STRENGTH` steps. So a
length seen at that batch size has its measured cost, another one the model's. Any other slowdown of the engine at that moment
(T / cM) is kept: up to `MOST_SLOWER` times as a factor, the rest as so many seconds.

Steps without verify rounds are all prompt and mostly without drafts: they don't show the cost of decoding without drafts. The
fit leaves them out, and they keep their logged seconds.

Letters: S = steps, s = steps with verify rounds, n = rows that the model is fitted to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.replay.log import Log
from honed.adapt.steps.step_time import MIN_STEPS, MIN_STEPS_PER_LENGTH, PARAMETERS, StepTimeModel, fit_parameters

KIND_STRENGTH = 8.0
MOST_SLOWER = 3.0
MOST_USUAL = 1.25
"""A step farther off its kind's median is no evidence of the kind's cost: one of three steps may well be a stall."""
SEEN_STEPS = 3
"""A cost counts as measured with so many logged steps of that kind."""
MODEL_DOUBT = 0.02
"""The model's error for unseen kinds, as a standard deviation of the logarithm."""
DRAFTER_DOUBT = 0.2
"""The same for the saving of a block shorter than any in the log; divided by 1 + steps with one as short."""
_WIDTH = 1024
_ROWS_PER_KIND = 400
_MOST_ROWS = 8192


@dataclass(frozen=True)
class Shape:
    """Shapes of steps, all [S]: drafted tokens are those that are verified."""

    requests: Ints
    tokens: Ints
    context: Ints
    prefill: Ints
    drafted: Floats
    """Draft tokens per verify round."""
    block: Ints

    def of(self, steps: Ints) -> Shape:
        """Select some of the steps."""
        s = self
        return Shape(s.requests[steps], s.tokens[steps], s.context[steps], s.prefill[steps], s.drafted[steps], s.block[steps])

    def kind(self) -> Ints:
        """Number the kinds of steps."""
        # A few drafts among many requests differ from none.
        drafted = np.where(self.drafted > 0.0, np.clip(np.rint(self.drafted).astype(np.int64), 1, _WIDTH - 1), 0)
        kind: Ints = (self.requests * _WIDTH + drafted) * _WIDTH + np.minimum(self.block, _WIDTH - 1)
        return kind * 2 + (self.prefill > 0)


def shape_of(log: Log) -> Shape:
    """Describe the steps as logged."""
    drafted = np.bincount(log.step, log.drafted, len(log.seconds)) / np.maximum(log.rounds_in_step, 1)
    return Shape(log.num_requests, log.num_tokens, log.context_tokens, log.num_prefill_tokens, drafted, log.block)


class StepRows:
    """Steps for the model's fit: at random, at most `_ROWS_PER_KIND` of a kind, so that rare kinds count."""

    def __init__(self, log: Log, captured_tokens: Sequence[int], rng: np.random.Generator) -> None:
        self.captured_tokens = tuple(sorted(captured_tokens))
        self.num_steps = len(log.seconds)
        self.steps = np.flatnonzero(log.rounds_in_step)
        """Indices of the log's steps with verify rounds, [s]."""
        self.shape = shape_of(log).of(self.steps)
        self.seconds = log.seconds[self.steps]
        s = self.shape
        coarse = np.stack(
            [
                np.log2(np.maximum(s.requests, 1) ** 4).astype(np.int64),
                np.rint(s.drafted).astype(np.int64),
                s.block,
                np.ceil(np.log2(s.prefill + 1)).astype(np.int64),
            ]
        )
        _, kind = np.unique(coarse, axis=1, return_inverse=True)
        kind = kind.ravel()
        order = rng.permutation(len(kind))
        order = order[np.argsort(kind[order], kind="stable")]
        start = np.flatnonzero(np.diff(kind[order], prepend=-1))
        rank = np.arange(len(order)) - np.repeat(start, np.diff(np.append(start, len(order))))
        is_usable = (rank < _ROWS_PER_KIND) & (self.seconds[order] > 0.0) & (s.requests[order] > 0) & (s.tokens[order] > 0)
        self.rows = order[is_usable][np.argsort(rank[is_usable], kind="stable")][:_MOST_ROWS]
        medians = {k: float(np.median(self.seconds[self.rows[kind[self.rows] == k]])) for k in np.unique(kind[self.rows])}
        self.scale = np.array([medians[k] for k in kind[self.rows]])
        lengths = np.rint(s.drafted[self.rows]).astype(np.int64)
        self.is_enough = len(self.rows) >= MIN_STEPS and bool((np.bincount(lengths) >= MIN_STEPS_PER_LENGTH).sum() >= 2)
        """As for `StepTimeLearner.is_ready`."""

    def matrix(self) -> Floats:
        """Rows as `fit_parameters` takes them, [n, 6]."""
        s = self.shape
        return np.stack([s.requests, s.tokens, s.context, s.prefill, s.block, s.drafted > 0.0])[:, self.rows].T.astype(
            np.float64
        )


@dataclass(frozen=True)
class Prices:
    """Predicted times of steps; made by `price`. Not usable while its model isn't ready."""

    model: StepTimeModel
    kinds: Ints  # ascending
    factors: Floats  # measured / model of each kind
    counts: Ints  # steps of each kind
    overall: float
    slower: Floats  # [S] slowdown of each logged step against its prediction
    beyond: Floats  # [S] seconds beyond MOST_SLOWER
    blocks: Ints  # [s] drafted blocks, ascending

    def seconds(self, shape: Shape) -> Floats:
        """Predict the seconds of steps that replace the log's, [S]."""
        place, is_there = self._find(shape)
        factor = np.where(is_there, self.factors[place], self.overall)
        seconds: Floats = self.slower * factor * modelled(self.model, shape) + self.beyond
        return seconds

    def _find(self, shape: Shape) -> tuple[Ints, npt.NDArray[np.bool_]]:
        kind = shape.kind()
        place = np.minimum(np.searchsorted(self.kinds, kind), len(self.kinds) - 1)
        return place, self.kinds[place] == kind

    def is_seen(self, shape: Shape) -> npt.NDArray[np.bool_]:
        """Whether each step is of a kind with `SEEN_STEPS` logged steps, [S]."""
        place, is_there = self._find(shape)
        return is_there & (self.counts[place] >= SEEN_STEPS)

    def doubt(self, shape: Shape) -> Floats:
        """Errors of predictions that this log doesn't show: standard deviation of the logarithm, [S]."""
        shorter = np.searchsorted(self.blocks, shape.block, side="right")
        doubt: Floats = np.hypot(np.where(self.is_seen(shape), 0.0, MODEL_DOUBT), DRAFTER_DOUBT / (1.0 + shorter))
        return doubt


def price(rows: StepRows, weights: Floats | None = None) -> Prices:
    """Fit a log's steps; `weights` [S] gives each step's weight, None: 1."""
    size, blocks = rows.num_steps, np.sort(rows.shape.block)
    weights = np.ones(len(rows.steps)) if weights is None else weights[rows.steps]
    slower, beyond = np.ones(size), np.zeros(size)
    if not rows.is_enough:
        kinds, counts = np.unique(rows.shape.kind(), return_counts=True)
        return Prices(StepTimeModel(), kinds, np.ones(len(kinds)), counts, 1.0, slower, beyond, blocks)
    parameters = fit_parameters(
        rows.matrix(),
        rows.seconds[rows.rows],
        weights[rows.rows] + 1e-9,
        rows.scale,
        rows.captured_tokens,
        rows.steps[rows.rows].astype(np.float64),
    )
    model = StepTimeModel(tuple(parameters.tolist()), rows.captured_tokens)
    expected = modelled(model, rows.shape)
    ratio = np.clip(rows.seconds / expected, 1.0 / MOST_SLOWER, MOST_SLOWER)
    kinds, kind = np.unique(rows.shape.kind(), return_inverse=True)
    kind = kind.ravel()
    middle = np.where(np.bincount(kind) < SEEN_STEPS, np.median(ratio), _medians(ratio, kind))[kind]
    usual = np.clip(ratio, middle / MOST_USUAL, middle * MOST_USUAL)
    overall = float((weights * usual).sum() / max(float(weights.sum()), 1e-9))
    count = np.bincount(kind, weights)
    factors = (np.bincount(kind, weights * usual) + KIND_STRENGTH * overall) / (count + KIND_STRENGTH)
    usual = factors[kind] * expected
    slower[rows.steps] = np.minimum(rows.seconds / usual, MOST_SLOWER)
    beyond[rows.steps] = rows.seconds - slower[rows.steps] * usual
    return Prices(model, kinds, factors, np.bincount(kind), overall, slower, beyond, blocks)


def _medians(values: Floats, group: Ints) -> Floats:
    """Take the (lower) median of each group, numbered from 0 without gaps."""
    order = np.lexsort((values, group))
    counts = np.bincount(group)
    medians: Floats = values[order[np.cumsum(counts) - counts + (counts - 1) // 2]]
    return medians


def modelled(model: StepTimeModel, shape: Shape) -> Floats:
    """Predict the seconds of steps by the model alone, [S]."""
    p = dict(zip(PARAMETERS, model.parameters, strict=True))
    seconds: Floats = model.token_seconds(np.maximum(shape.tokens, 0)) + model.fixed_seconds(0, 0, 0)
    seconds += p["per_request"] * shape.requests
    seconds += p["per_context_token"] * shape.context + p["per_prefill_token"] * shape.prefill
    drafting = p["drafting"] + p["drafting_per_request"] * shape.requests + p["drafting_per_context_token"] * shape.context
    seconds += (shape.block > 0) * drafting
    seconds += (shape.drafted > 0.0) * (p["verifying"] + p["verifying_per_request"] * shape.requests)
    seconds += shape.block * (p["per_block_token"] + p["per_block_token_and_request"] * shape.requests)
    return seconds
