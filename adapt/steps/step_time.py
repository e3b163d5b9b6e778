"""Learns the time of an engine step from its batch, and predicts the times of other steps.

    T = base + r·R + f(padded tokens) + c·context + p·prefill + draft(block, R) + [drafts are verified]·(v₀ + v₁·R)
    f(t) = t₀·t + Σ_h t_h·max(0, t − KNOTS_h) + Σ_h s_h·min(t, FILLED_h)
    draft(b, R) = [b > 0]·(d₀ + d₁·R + d₄·context) + b·(d₂ + d₃·R)

R is the number of requests, tokens are padded up to the next captured graph size, and b is the block that the drafter drafted.
All coefficients are ≥ 0, so T never falls when anything grows. f is flat while memory-bound and steeper once compute-bound. In
a mixture of experts it first rises, as tokens add experts to the step, until all are there (FILLED, where it shows).

A runner that always drafts K has only one value of b: then d₂ = d₃ = 0, since a shorter block was never seen to be cheaper.
When the drafter was never skipped, its cost stays in `base`.
A context costs more in a step that drafts (d₄): the drafter attends to it too, and verification with more queries.
A step that verifies any draft leaves the fast paths for plain decoding, in attention and in sampling (v). Drafts are verified a
step after they were made: drafting in every step costs both in every step, and a prediction with `block` assumes that.

The fit is a non-negative least squares on relative residuals with Huber weights, over a bounded sample that keeps the
latest steps of every *kind* (batch size, draft length, prefill): a rare kind isn't forgotten while a common one repeats.
Steps with prompts in them are told apart more coarsely, or their many kinds would be all that is kept. What steps in a row
have in common (`time_groups`) is told from what their kinds cost. Where a machine's kernels change at sizes
that this formula doesn't know, kinds of steps without prompts have a price of their own beside it (`kind_effects`), as far as
was measured; T may then fall where something grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

import numpy as np

from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.protocol.ranges import COUNT, Range, Ranges, check_ranges
from honed.adapt.steps.kind_effects import kind_effects
from honed.adapt.steps.time_groups import TimeGroups

if TYPE_CHECKING:
    from honed.adapt.protocol.wire import Policy

KNOTS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
FILLED = (8, 32, 128)
PARAMETERS = (
    "base",
    "per_request",
    "per_context_token",
    "per_prefill_token",
    "drafting",
    "drafting_per_request",
    "per_block_token",
    "per_block_token_and_request",
    "drafting_per_context_token",
    "verifying",
    "verifying_per_request",
    "per_token",
    *(f"per_token_above_{knot}" for knot in KNOTS),
    *(f"per_token_up_to_{most}" for most in FILLED),
)
"""Order of `Policy.step_seconds`; all in seconds per unit. A list of another length is another version's: not ready."""

_DRAFTING, _VERIFYING, _TOKENS = slice(4, 9), slice(9, 11), slice(11, None)
_RIDGE = np.array([0.01, 10.0, 10.0, 1.0, 0.1, 1.0, 0.1, 1.0, 10.0, 1.0, 1.0, 0.1, *(1.0 for _ in (*KNOTS, *FILLED))])
"""A cost that can't be separated yet (the batch never varied) goes to the left-most small figure here: base, tokens."""
_GOOD_SPREAD, _MUCH_BETTER = 0.02, 0.8
"""A fit without `FILLED` that is as close as the first figure stays; else one with them must be so much closer."""
_LEAST_TRUST, _TRUSTED = 1e-5, 0.1
"""Weight that every step from before a change of the world keeps; and of those that time groups and kinds count in full."""
_DOUBT = 0.3
"""Standard deviation, relative, by which a change of the world puts an earlier step's price in doubt."""
_LEAST_SCATTER = 0.01
"""Least relative scatter of steps."""
_REFIT_SHARE = 128
"""A large sample is refitted when more than one part of so many is new: a fit's time is proportional to its size."""
_MOST_FITTED = 65_536
"""Most steps in a fit, the latest of every kind."""
_KEPT_EFFECT = 0.9
"""Share of the effects of kinds that outlives a change of the world: errors among them fade."""
MOST_EFFECT = 0.5
"""Largest relative effect of a kind of steps."""
_TABLE_TOKENS = 8192
_BATCHES, _LENGTHS = range(256), range(1024)
"""Kinds of steps that a policy may name."""
Step: TypeAlias = tuple[int, int, int, int, int, bool]
"""Requests, tokens, context, prefill tokens, block, whether drafts were verified: input of `StepTimeModel.seconds`."""
LEAST_SECONDS = 1e-7
LEAST_LENGTHS = 2
"""Draft lengths that must be seen before a draft's cost can be separated from a step's."""
MIN_STEPS = 32
"""Steps before the model is used at all."""
MIN_STEPS_PER_LENGTH = 3
"""At least two draft lengths (per request, rounded) must each have been seen this often."""
YOUNG_STEPS = 256
"""Steps after a start with more exploring for the model; after a change of step times, at most so many."""
REFIT_STEPS = 64
"""New steps before a refit; more when many are kept."""


@dataclass(frozen=True)
class StepTimeModel:
    """Predicts times of engine steps; `is_ready` is False for the empty model, which can't."""

    parameters: tuple[float, ...] = ()
    captured_tokens: tuple[int, ...] = ()
    kinds: tuple[tuple[int, int, float], ...] = ()
    """(batch size as `batch_kind` rounds it, draft tokens per request, effect): such steps, if without prompts, take 1 + effect
    times what the formula says."""

    @classmethod
    def from_policy(cls, policy: Policy) -> StepTimeModel:
        """Read a policy's model; anything but PARAMETERS' number of finite figures >= 0 gives the empty one."""
        return cls._usable(policy.step_seconds, policy.captured_tokens, policy.kind_effects)

    @classmethod
    def of_trees(cls, policy: Policy) -> StepTimeModel:
        """The same for steps with draft trees."""
        return cls._usable(policy.tree_step_seconds, policy.captured_tokens, policy.tree_kind_effects)

    @classmethod
    def _usable(
        cls, seconds: Sequence[float], captured_tokens: Sequence[int], effects: Sequence[tuple[int, int, float]]
    ) -> StepTimeModel:
        values = np.asarray(seconds, dtype=np.float64)
        if len(values) != len(PARAMETERS) or not np.isfinite(values).all() or (values < 0.0).any() or not values.any():
            return cls()
        sizes = tuple(sorted(size for size in captured_tokens if size > 0))
        kinds = tuple((b, k, v) for b, k, v in effects if b in _BATCHES and k in _LENGTHS and abs(v) <= MOST_EFFECT)
        return cls(tuple(values.tolist()), sizes, kinds)

    @classmethod
    def of(cls, captured_tokens: Sequence[int] = (), **seconds: float) -> StepTimeModel:
        """Make a model of some of PARAMETERS, by name; the others are 0."""
        unknown = seconds.keys() - set(PARAMETERS)
        if unknown:
            raise TypeError(f"a step-time model has no {', '.join(sorted(unknown))}")
        return cls(tuple(seconds.get(name, 0.0) for name in PARAMETERS), tuple(captured_tokens))

    @property
    def is_ready(self) -> bool:
        """Whether the model has parameters."""
        return bool(self.parameters)

    def fixed_seconds(self, num_requests: int, context_tokens: int, num_prefill_tokens: int) -> float:
        """Cost that doesn't depend on draft lengths."""
        p = self.parameters
        return p[0] + p[1] * num_requests + p[2] * context_tokens + p[3] * num_prefill_tokens + LEAST_SECONDS

    def fixed_seconds_of_rounds(self, num_requests: int, context_tokens: int, num_prefill_tokens: int) -> float:
        """The same without the cost that prompts add to a step that drafts nothing.

        Prompts are computed whatever is drafted. With their time in a goodput, drafts would look cheap.
        """
        fixed = self.fixed_seconds(num_requests, context_tokens, 0)
        if num_prefill_tokens:
            fixed -= self.seconds_of_tokens(num_requests + num_prefill_tokens) - self.seconds_of_tokens(num_requests)
        return fixed

    def token_seconds(self, tokens: Ints) -> Floats:
        """Cost of totals of scheduled tokens, element by element."""
        try:
            return self.price_tables(0)[0].take(tokens)
        except IndexError:
            return self._token_seconds(tokens)

    def seconds_of_tokens(self, num_tokens: int) -> float:
        """Cost of one total of scheduled tokens."""
        if num_tokens < _TABLE_TOKENS:
            return self._price_list[num_tokens]
        return float(self._token_seconds(np.array([num_tokens]))[0])

    def block_seconds(self, num_requests: int, block: int, context_tokens: int = 0) -> float:
        """Cost of drafting one block, length ≥ 1, with the fixed cost of verifying."""
        fixed, per_request, per_token, per_token_and_request, per_context_token = self._block_prices
        slope = per_token + per_token_and_request * num_requests
        return fixed + per_request * num_requests + per_context_token * context_tokens + block * slope

    def draft_seconds(self, num_requests: int, num_spec_tokens: int, context_tokens: int = 0) -> Floats:
        """Cost of blocks of length 0 … K, as `block_seconds`, [K+1]; index 0 is a skipped drafter."""
        fixed, per_request, per_token, per_token_and_request, per_context_token = self._block_prices
        seconds: Floats = np.arange(num_spec_tokens + 1, dtype=np.float64) * (per_token + per_token_and_request * num_requests)
        seconds += fixed + per_request * num_requests + per_context_token * context_tokens
        seconds[0] = 0.0
        return seconds

    def seconds(
        self,
        num_requests: int,
        num_tokens: int,
        context_tokens: int,
        num_prefill_tokens: int,
        block: int,
        is_verifying: bool | None = None,
    ) -> float:
        """Time of one whole step; None: it verifies drafts if it drafts."""
        tokens = self._token_seconds(np.array([num_tokens]))[0]
        fixed = self.fixed_seconds(num_requests, context_tokens, num_prefill_tokens)
        if is_verifying is not None and is_verifying != (block > 0):
            verifying, verifying_per_request = self.parameters[_VERIFYING]
            fixed += (1.0 if is_verifying else -1.0) * (verifying + verifying_per_request * num_requests)
        seconds = fixed + tokens + self.draft_seconds(num_requests, max(block, 0), context_tokens)[-1]
        return float(seconds) * self.kind_factor(num_requests, num_tokens - num_requests, num_prefill_tokens)

    def kind_factor(self, num_requests: int, num_draft_tokens: int, num_prefill_tokens: int = 0) -> float:
        """Factor on the formula's time of a step, by its number of requests and of all their drafts."""
        row = self._row_of_batch.get(batch_kind(num_requests)) if self.kinds and not num_prefill_tokens else None
        if row is None:
            return 1.0
        length, last = num_draft_tokens / num_requests, len(row) - 1
        if num_draft_tokens:
            length = max(length, 1.0)  # fewer drafts than requests are the same kind of steps
        below, above = min(int(length), last), min(int(length) + 1, last)
        return float(1.0 + row[below] + (row[above] - row[below]) * (length - below))

    def kind_factors(self, num_requests: int, num_draft_tokens: Ints) -> Floats:
        """The same for steps without prompts, of one batch and several numbers of drafts, [M]."""
        row = self._row_of_batch.get(batch_kind(num_requests)) if self.kinds else None
        if row is None:
            return np.ones(len(num_draft_tokens))
        lengths = np.where(num_draft_tokens > 0, np.maximum(num_draft_tokens / num_requests, 1.0), 0.0)
        factors: Floats = 1.0 + np.interp(lengths, np.arange(len(row)), row)
        return factors

    def kind_table(self) -> tuple[Ints, Floats]:
        """Tabulate the same: row + 1 of each `batch_kind`, 0 without one, [B]; effects by drafts per request, [rows, D]."""
        found = np.zeros(max(self._row_of_batch, default=-1) + 1, dtype=np.int64)
        found[list(self._row_of_batch)] = np.arange(1, len(self._row_of_batch) + 1)
        rows = list(self._row_of_batch.values())
        return found, np.array(rows) if rows else np.zeros((0, 1))

    @cached_property
    def _row_of_batch(self) -> dict[int, Floats]:
        """By `batch_kind`; between lengths that were seen on a line, beyond them as at the nearest."""
        seen: dict[int, dict[int, float]] = {}
        for batch, length, effect in self.kinds:
            seen.setdefault(batch, {})[length] = effect
        lengths = np.arange(max((length for _, length, _ in self.kinds), default=0) + 1)
        return {b: np.interp(lengths, sorted(row), [row[k] for k in sorted(row)]) for b, row in sorted(seen.items())}

    @cached_property
    def _block_prices(self) -> tuple[float, float, float, float, float]:
        """Costs of a drafted and verified block: fixed, by request, by token, by both, by context token."""
        fixed, per_request, per_token, per_token_and_request, per_context_token = self.parameters[_DRAFTING]
        verifying, verifying_per_request = self.parameters[_VERIFYING]
        return fixed + verifying, per_request + verifying_per_request, per_token, per_token_and_request, per_context_token

    def price_tables(self, num_tokens: int) -> tuple[Floats, Ints]:
        """Costs of totals of 0 … at least `num_tokens`, and the largest captured size ≤ each, 0 where there is none."""
        size = _TABLE_TOKENS
        while size <= num_tokens:
            size *= 2
        made = self._tables.get(size)
        if made is None:
            totals, sizes = np.arange(size), np.array((0, *self.captured_tokens), dtype=np.int64)
            made = self._token_seconds(totals), sizes[np.searchsorted(sizes, totals, side="right") - 1]
            self._tables[size] = made
        return made

    @cached_property
    def parameter_array(self) -> Floats:
        """The same as `parameters`, [P]."""
        return np.array(self.parameters)

    @cached_property
    def _tables(self) -> dict[int, tuple[Floats, Ints]]:
        return {}

    @cached_property
    def _price_list(self) -> list[float]:
        prices: list[float] = self.price_tables(0)[0].tolist()
        return prices

    def prepare(self, num_tokens: int = 0) -> None:
        """Make the tables now, for so many tokens, not during the first decision."""
        _ = self._price_list, self.price_tables(num_tokens)

    def _token_seconds(self, tokens: Ints) -> Floats:
        first, *slopes = self.parameters[_TOKENS]
        padded = pad_tokens(tokens, self.captured_tokens).astype(np.float64)
        seconds: Floats = first * padded
        for slope, knot in zip(slopes, KNOTS, strict=False):
            if slope:
                seconds += slope * np.maximum(padded - knot, 0.0)
        for slope, most in zip(slopes[len(KNOTS) :], FILLED, strict=True):
            if slope:
                seconds += slope * np.minimum(padded, most)
        return seconds


def pad_tokens(tokens: Ints, captured_tokens: Sequence[int]) -> Ints:
    """Round up to the next captured graph size; beyond the largest nothing is padded."""
    tokens = np.asarray(tokens, dtype=np.int64)
    if not captured_tokens:
        return tokens
    sizes = np.asarray(captured_tokens, dtype=np.int64)
    index = np.searchsorted(sizes, tokens)
    return np.where(index < len(sizes), sizes[np.minimum(index, len(sizes) - 1)], tokens)


@dataclass(frozen=True, slots=True)
class StepTimeSettings:
    """Settings for the learner's samples, its forgetting, and the least data for a model."""

    steps_per_kind: int = 512
    """Steps of one kind (batch size, prompt tokens, draft tokens, block; each rounded) that are kept: many, since successive
    steps resemble each other. With many kinds, fewer of each are in a fit."""
    max_kinds: int = 512
    """Most kinds that are kept; the one seen longest ago makes room."""
    forgetting_steps: float = 50_000.0
    """A step this old weighs 1/e; never less than 2 %, so that a kind seen only long ago still counts."""

    RANGES: ClassVar[Ranges] = {
        **dict.fromkeys(("steps_per_kind", "max_kinds"), Range(1, 65536)),
        "forgetting_steps": COUNT,
    }

    def __post_init__(self) -> None:
        check_ranges(self)


class Scatter(NamedTuple):
    """How steps scatter around their prices, relative."""

    own: float = 0.03
    """Standard deviation of a step."""
    variance_ratio: float = 0.0
    """Variance of time groups over the steps' own."""


_FIRST_KINDS = 16
"""Kinds that a learner has room for at first."""


class StepTimeLearner:
    """Learns a StepTimeModel from measured steps."""

    def __init__(
        self, settings: StepTimeSettings = StepTimeSettings(), captured_tokens: Sequence[int] = ()
    ) -> None:  # frozen settings: sharing the default is safe
        self.settings = settings
        self.captured_tokens = tuple(sorted(captured_tokens))
        self.num_steps = 0
        self._rows: Floats = np.zeros((min(_FIRST_KINDS, settings.max_kinds), settings.steps_per_kind, 9))
        """Of each step: requests, tokens, context, prefill, block, is verifying, seconds, number, and by what variance changes
        of the world have put its price in doubt. Room for all kinds would be 19 MB, of which most engines need one."""
        self._filled = np.zeros(len(self._rows), dtype=np.int64)
        self._kinds: dict[tuple[int, int, int, int], int] = {}
        self._model = StepTimeModel()
        self._kinds_before: dict[tuple[int, int], float] = {}
        """Of `StepTimeModel.kinds`, what was known when the world changed: how kernels differ from size to size stays."""
        self._fitted_at = self._started_at = 0
        self._scatter = Scatter()

    def observe(
        self,
        num_requests: int,
        num_tokens: int,
        context_tokens: int,
        num_prefill_tokens: int,
        num_draft_tokens: int,
        block: int,
        seconds: float,
    ) -> None:
        """Fold in one step; impossible ones are ignored."""
        if num_requests <= 0 or num_tokens <= 0 or not 0.0 < seconds < 600.0:
            return
        kind = kind_of(num_requests, num_prefill_tokens, num_draft_tokens, block)
        cell = self._kinds.pop(kind, -1)
        if cell < 0:
            cell = len(self._kinds)
            if cell == self.settings.max_kinds:  # the kind seen longest ago makes room
                cell = self._kinds.pop(next(iter(self._kinds)))
                self._filled[cell] = 0
            elif cell == len(self._rows):
                more = min(cell, self.settings.max_kinds - cell)
                self._rows = np.concatenate([self._rows, np.zeros((more, *self._rows.shape[1:]))])
                self._filled = np.concatenate([self._filled, np.zeros(more, dtype=np.int64)])
        self._kinds[kind] = cell
        self.num_steps += 1
        step = num_requests, num_tokens, context_tokens, num_prefill_tokens, block, num_draft_tokens > 0
        slot = int(self._filled[cell]) % self.settings.steps_per_kind
        self._rows[cell, slot] = (*step, seconds, self.num_steps, 0.0)
        self._filled[cell] += 1

    def restart(self, num_recent: int, factor: float) -> None:
        """The world has changed: fit anew, to the last `num_recent` steps above all.

        Earlier steps count as if they had taken `factor` times as long, and little beside those since. They are all that says
        what those kinds cost that haven't been seen since: without them there would be no prices, and no choice, until they
        were.
        """
        is_before = self._rows[..., 7] <= self.num_steps - num_recent
        self._rows[is_before, 6] *= factor
        self._rows[is_before, 8] += _DOUBT**2
        self._kinds_before |= {(batch, length): _KEPT_EFFECT * effect for batch, length, effect in self._model.kinds}
        self._model = StepTimeModel()
        self._started_at = self.num_steps

    @property
    def shared_deviation(self) -> float:
        """Standard deviation of what the steps of a time group have in common, relative."""
        return self._scatter.own * math.sqrt(self._scatter.variance_ratio)

    @property
    def is_young(self) -> bool:
        """Tell whether little has been seen since the start, or since the world changed."""
        return self.num_steps - self._started_at < YOUNG_STEPS

    @property
    def is_ready(self) -> bool:
        """Whether the cost of drafting can be separated from the cost of the batch."""
        return self.num_steps >= MIN_STEPS and len(self.lengths_seen) >= LEAST_LENGTHS

    @property
    def lengths_seen(self) -> list[int]:
        """Draft lengths (per request, rounded) with enough steps, ascending."""
        seen: dict[int, int] = {}
        for kind, cell in self._kinds.items():
            seen[kind[1]] = seen.get(kind[1], 0) + int(self._filled[cell])
        return sorted(length for length, count in seen.items() if count >= MIN_STEPS_PER_LENGTH)

    def model(self) -> StepTimeModel:
        """Return the current fit, or the empty model without enough data."""
        if not self.is_ready:
            return StepTimeModel()
        num_new = self.num_steps - self._fitted_at
        if not self._model.is_ready or num_new >= max(REFIT_STEPS, int(self._held.sum()) // _REFIT_SHARE):
            self._model = self._fit()
            self._fitted_at = self.num_steps
        return self._model

    @property
    def _held(self) -> Ints:
        held: Ints = np.minimum(self._filled, self.settings.steps_per_kind)
        return held

    def _fit(self) -> StepTimeModel:
        used = np.flatnonzero(self._filled)
        cells, filled, size = self._rows[used], self._filled[used], self.settings.steps_per_kind
        age_in_kind = (filled[:, None] - 1 - np.arange(size)) % size
        mask = age_in_kind < np.minimum(filled, max(_MOST_FITTED // len(used), 1))[:, None]
        typical = np.nanmedian(np.where(mask, cells[:, :, 6], np.nan), axis=1, keepdims=True)
        scale = np.broadcast_to(typical, mask.shape)[mask]
        rows, kind = cells[mask], np.repeat(np.arange(len(used)), mask.sum(axis=1))
        trust = self._trust(rows[:, 8], kind)
        age = np.maximum(np.exp((rows[:, 7] - self.num_steps) / self.settings.forgetting_steps), 0.02)
        rows[trust < _TRUSTED, 7] = -np.inf
        kinds = StepKinds(rows, self._kinds_before)
        seconds = rows[:, 6] / kinds.factors
        weights = trust * np.where(trust < _TRUSTED, 1.0, age)
        parameters = fit_parameters(rows[:, :6], seconds, weights, scale / kinds.factors, self.captured_tokens, rows[:, 7])
        expected = features(rows[:, :6], self.captured_tokens) @ parameters
        self._note_scatter(seconds / np.maximum(expected, LEAST_SECONDS) - 1.0, rows[:, 7])
        return StepTimeModel(tuple(parameters.tolist()), self.captured_tokens, kinds.fit(seconds, expected))

    def _trust(self, variance: Floats, kind: Ints) -> Floats:
        """Weights of steps [n] whose prices changes of the world have put in doubt by a variance.

        They err together: however many of a kind there are, they say as much as a mean of that variance does.
        """
        doubtful = np.bincount(kind, variance > 0.0)[kind]
        own = self._scatter.own**2
        weights: Floats = own / np.maximum(own, variance * doubtful)
        return np.maximum(weights, _LEAST_TRUST)

    def _note_scatter(self, residuals: Floats, numbers: Floats) -> None:
        """Note the steps' scatter around the fit."""
        known = np.isfinite(numbers)
        if known.sum() < MIN_STEPS:
            return
        spread = 1.4826 * float(np.median(np.abs(residuals[known])))
        variance_ratio = TimeGroups(numbers).variance_ratio(residuals, max(spread, _LEAST_SCATTER))
        self._scatter = Scatter(max(spread / math.sqrt(1.0 + variance_ratio), _LEAST_SCATTER), variance_ratio)


class StepKinds:
    """What kinds the steps of a sample are of, and what is expected of these beside the formula.

    Args:
        rows: of each step, as the learner keeps them, [n, 9]; number −inf: outdated.
        before: (batch size as `batch_kind` rounds it, draft tokens per request) -> effect, as far as it is known.
    """

    def __init__(self, rows: Floats, before: dict[tuple[int, int], float]) -> None:
        self._known, self._numbers = before, rows[:, 7]
        self._is_plain = rows[:, 3] == 0.0
        plain = rows[self._is_plain]
        batch = (4.0 * np.log2(plain[:, 0])).astype(np.int64)
        drafted = plain[:, 1] - plain[:, 0]
        length = np.where(drafted > 0.0, np.maximum(np.rint(drafted / plain[:, 0]), 1.0), 0.0).astype(np.int64)
        _, first, kind = np.unique(batch * len(_LENGTHS) + length, return_index=True, return_inverse=True)
        self._names = list(zip(batch[first].tolist(), length[first].tolist(), strict=True))
        self._kind: Ints = np.full(len(rows), -1)
        self._kind[self._is_plain] = kind
        effects = np.array([before.get(name, 0.0) for name in self._names])
        self.factors: Floats = np.ones(len(rows))
        """Expected factor on the formula's time of each step, [n]."""
        self.factors[self._is_plain] += effects[kind]

    def fit(self, seconds: Floats, expected: Floats) -> tuple[tuple[int, int, float], ...]:
        """Estimate `StepTimeModel.kinds`. What is known of kinds that aren't among the steps stays.

        Args:
            seconds: of each step, divided by `factors`, [n].
            expected: what the formula says, [n].
        """
        is_new = self._is_plain & np.isfinite(self._numbers)
        found = dict(self._known)
        if is_new.any():
            residuals = seconds[is_new] / np.maximum(expected[is_new], LEAST_SECONDS) - 1.0
            spread = max(1.4826 * float(np.median(np.abs(residuals))), 0.005)
            there, kind = np.unique(self._kind[is_new], return_inverse=True)
            for at, effect in zip(there.tolist(), kind_effects(residuals, kind, self._numbers[is_new], spread), strict=True):
                name = self._names[at]
                found[name] = (1.0 + found.get(name, 0.0)) * (1.0 + float(effect)) - 1.0
        rounded = {name: round(min(max(effect, -MOST_EFFECT), MOST_EFFECT), 4) for name, effect in found.items()}
        return tuple((*name, effect) for name, effect in rounded.items()) if any(rounded.values()) else ()


def batch_kind(num_requests: int) -> int:
    """Round a batch size, in steps of a fifth."""
    return int(4.0 * math.log2(num_requests))


def kind_of(num_requests: int, num_prefill_tokens: int, num_draft_tokens: int, block: int) -> tuple[int, int, int, int]:
    """Kind of a step: batch size, drafts per request, block and prompt tokens, rounded."""
    # A few drafts among many requests differ from none.
    per_request = max(round(num_draft_tokens / num_requests), 1) if num_draft_tokens else 0
    if num_prefill_tokens > 0:
        return int(np.log2(num_requests)), per_request, -1, num_prefill_tokens.bit_length()
    return batch_kind(num_requests), per_request, block, 0


def features(steps: Floats, captured_tokens: Sequence[int]) -> Floats:
    """Compute the design matrix [n, P] of steps (requests, tokens, context, prefill, block, is verifying), as PARAMETERS."""
    requests, tokens, context, prefill, block, verifying = steps.T
    padded = pad_tokens(tokens.astype(np.int64), captured_tokens).astype(np.float64)
    drafting = (block > 0).astype(np.float64)
    hinges = [np.maximum(padded - knot, 0.0) for knot in KNOTS] + [np.minimum(padded, most) for most in FILLED]
    matrix = np.stack(
        [
            np.ones(len(steps)),
            requests,
            context,
            prefill,
            drafting,
            drafting * requests,
            block,
            block * requests,
            drafting * context,
            verifying,
            verifying * requests,
            padded,
            *hinges,
        ],
        axis=1,
    )
    if drafting.all() or not drafting.any():
        matrix[:, _DRAFTING] = 0.0  # never skipped (or never used): its cost can't be separated from the rest
    elif len(np.unique(block[block > 0])) == 1:
        matrix[:, 6:8] = 0.0  # only one block length was ever drafted
    if verifying.all() or not verifying.any():
        matrix[:, _VERIFYING] = 0.0
    return matrix


def fit_parameters(
    steps: Floats,
    seconds: Floats,
    weights: Floats,
    scale: Floats,
    captured_tokens: Sequence[int],
    numbers: Floats | None = None,
) -> Floats:
    """Minimise Σ w·huber((Xβ − y) / ŷ) over β ≥ 0, by re-weighting; `scale` is a first, robust guess of ŷ.

    The terms that rise and then flatten (`FILLED`) are left out unless the fit is much closer with them: with few kinds of
    steps they would be set by chance.

    Args:
        numbers: steps' numbers in the order of time, for the time groups; None: there are none.
    """
    matrix, num_filled = features(steps, captured_tokens), len(FILLED)
    groups = None if numbers is None else TimeGroups(numbers)
    plain = matrix.copy()
    plain[:, -num_filled:] = 0.0
    parameters, spread = _fit_matrix(plain, seconds, weights, scale, groups)
    if spread > _GOOD_SPREAD:
        with_filled, closer = _fit_matrix(matrix, seconds, weights, scale, groups)
        if closer < _MUCH_BETTER * spread:
            return with_filled
    return parameters


def _fit_matrix(
    matrix: Floats, seconds: Floats, weights: Floats, scale: Floats, groups: TimeGroups | None
) -> tuple[Floats, float]:
    """The parameters of `fit_parameters`, and the steps' relative scatter around them."""
    norm = np.sqrt((matrix**2).mean(axis=0))
    norm[norm == 0.0] = np.inf
    matrix = matrix / norm
    beta = np.zeros(matrix.shape[1])
    huber, spread, variance_ratio = np.ones(len(seconds)), 0.0, 0.0
    for _ in range(5):
        both = np.column_stack([matrix, seconds]) / scale[:, None]  # [n, P + 1]
        weight = weights * huber
        weighted = both * weight[:, None]
        moments = weighted.T @ both
        if groups is not None and variance_ratio > 0.0:
            moments -= groups.between(weighted, weight, variance_ratio)
        gram = moments[:-1, :-1]
        ridge = (1e-6 * float(np.trace(gram)) + 1e-12) * _RIDGE
        beta = solve_non_negative(gram + np.diag(ridge), moments[:-1, -1])
        scale = np.maximum(matrix @ beta, 0.2 * scale)
        residual = seconds / scale - 1.0
        spread = max(1.4826 * float(np.median(np.abs(residual))), 0.005)
        huber = np.minimum(1.0, 1.5 * spread / np.maximum(np.abs(residual), 1e-12))
        if groups is not None:
            variance_ratio = groups.variance_ratio(residual, spread)
    parameters: Floats = beta / norm
    return parameters, spread


def solve_non_negative(gram: Floats, moment: Floats) -> Floats:
    """Minimise ½·xᵀGx − mᵀx over x ≥ 0 for a positive definite G.

    Source: Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23, on the normal equations.
    """
    size = len(moment)
    x = np.zeros(size)
    free = np.zeros(size, dtype=bool)
    tolerance = 1e-10 * max(float(np.abs(moment).max()), 1e-300)
    for _ in range(3 * size):
        gradient = np.where(free, -np.inf, moment - gram @ x)
        enter = int(np.argmax(gradient))
        if gradient[enter] <= tolerance:
            break
        free[enter] = True
        while free.any():
            index = np.flatnonzero(free)
            wanted = np.linalg.solve(gram[np.ix_(index, index)], moment[index])
            if (wanted > 0.0).all():
                x[:] = 0.0
                x[index] = wanted
                break
            now = x[index]
            leaving = wanted <= 0.0
            share = float((now[leaving] / np.maximum(now[leaving] - wanted[leaving], 1e-300)).min())
            x[index] = now + share * (wanted - now)
            gone = leaving & (x[index] <= 1e-12 * max(float(x.max()), 1e-300))
            if not gone.any():
                gone = leaving
            x[index[gone]] = 0.0
            free[index[gone]] = False
    return x
