"""Anytime-valid test of which of two drafters is better, from windows in which they take turns on the same traffic.

Windows come in pairs, one of each drafter, and chance decides which comes first. A trial at position j means: the drafts before
j were accepted and j was verified. For every pair and workload, with trials n and successes s at position j of the old (a) and
the new (b),

    D = Σ_j w_j · (n_a,j · n_b,j / (n_a,j + n_b,j)) · (s_b,j / n_b,j − s_a,j / n_a,j)        w_j = 1 / (1 − p_j)

is the score of a relative change of conditional acceptance that is the same at all positions (p_j: acceptance of both
together). Positions are compared one by one, so rounds are compared at equal draft lengths, whatever the lengths were.

When the two accept alike, a coin decides which of a pair's windows was whose, so D and −D are equally likely given |D|. This
also holds for dependent rounds, and for traffic that changes from pair to pair. So for every bet λ, even one that depends on
earlier pairs,

    E = Π_pairs exp(λD) / cosh(λD)     has expectation ≤ 1, and so P(a mean of such E ever reaches 1/α) ≤ α

at every look (Ville). λ < 0 bets that the new accepts less, λ > 0 that it accepts more. With independent rounds the best λ is
the relative change itself. Where rounds repeat each other (one long request fills a window), D² is larger on average than its
variance for independent rounds, I = Σ_j w_j · p_j · n_a,j · n_b,j / (n_a,j + n_b,j). The best λ is then the change divided by
that dispersion. It is estimated from earlier pairs, and used as far as it isn't chance. One pair can at most double E: no
single burst of traffic decides, and short windows decide after fewer rounds.

Trials of the same two versions on other hosts have coins of their own. So each bet's results multiply over all trials, and the
mean of the products is tested in the same way (`log_bets`, `log_e_with`).

To be promoted, a version must also be shown to lose little on every workload. For a margin m, D + m·I takes the place of D: the
bets are on the gain over a loss of m. At a loss of m this is symmetric about 0 only nearly; `benchmarks.canary` has the error.

Source: de la Peña, Ann. Probab. 27 (1999), "A general class of exponential inequalities for martingales and ratios"; score and
weights as in Mantel, Cancer Chemother. Rep. 50 (1966); dispersion as in McCullagh & Nelder, Generalized Linear Models, 4.5.

Letters: K = configured number of draft tokens, B = bets, M = margins, … = any leading axes (many
canaries at once, in simulations).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from honed.adapt.protocol.arrays import Floats

WORSE_BETS = {0.03: 0.03, 0.07: 0.32, 0.11: 0.65}
"""Relative changes bet on against the new drafter, with weights that find a loss of 10 % soon, in conditional acceptance or in
acceptance length (which is 4 to 11 % of the former). Larger losses are found as well."""
BETTER_BETS = {0.03: 0.15, 0.07: 0.70, 0.11: 0.15}
"""Bets for the new drafter: gains are smaller."""
MARGINS = (0.04, 0.08, 0.16)
"""Losses of conditional acceptance that a workload may have to be shown not to have."""
MOST_COST = 0.004
"""Tolerated loss of a workload, as a share of all traffic: the less traffic a workload is, the larger its margin."""
_HELD_BETS = (0.5, 0.3, 0.2)
_CHANGES = np.array(list(WORSE_BETS))
_LOG_WEIGHTS = np.log([list(WORSE_BETS.values()), list(BETTER_BETS.values()), *(_HELD_BETS for _ in MARGINS)])  # [2 + M, B]
_FEW_PAIRS = 4.0
"""Pairs with dispersion 1 that are assumed before the first one."""
_MOST_CERTAIN = 0.98
_LOG_2 = math.log(2.0)


class Evidence:
    """Evidence for and against a new drafter on some traffic; starts with none."""

    def __init__(self, num_spec_tokens: int, shape: tuple[int, ...] = ()) -> None:
        self._trials: Floats = np.zeros((*shape, num_spec_tokens))
        self._successes: Floats = np.zeros((*shape, num_spec_tokens))
        self._log_bets: Floats = np.zeros((*shape, *_LOG_WEIGHTS.shape))  # worse, better, a loss below each margin
        self._score: Floats = np.zeros(shape)
        self._information: Floats = np.zeros(shape)
        self._squares: Floats = np.zeros(shape)  # Σ D² / I
        self._pairs: Floats = np.zeros(shape)  # with information

    def weigh(
        self, old_trials: Floats, old_successes: Floats, new_trials: Floats, new_successes: Floats
    ) -> tuple[Floats, Floats]:
        """Score a pair of windows, from counts [..., K]: D, and its divisor I for the estimated change, [...]."""
        trials = old_trials + new_trials
        self._trials += trials
        self._successes += old_successes + new_successes
        # Both drafters pooled, with this pair: exchanging them changes only the sign of D.
        acceptance = np.clip((self._successes + 0.5) / (self._trials + 1.0), 0.0, _MOST_CERTAIN)
        weight = 1.0 / (1.0 - acceptance) / np.maximum(trials, 1.0)
        score = (weight * (new_successes * old_trials - old_successes * new_trials)).sum(axis=-1)
        information = (weight * old_trials * new_trials * acceptance).sum(axis=-1)
        return score, information

    def add(self, score: Floats, information: Floats) -> None:
        """Fold in a pair's D and I."""
        over = [-score, score, *(score + margin * information for margin in MARGINS)]
        # The old dispersion: D's sign must not choose its bet.
        x = np.stack(over, axis=-1)[..., None] / np.asarray(self.dispersion)[..., None, None] * _CHANGES  # [..., 2 + M, B]
        self._log_bets += x - (np.logaddexp(x, -x) - _LOG_2)
        self._score += score
        self._information += information
        is_telling = information > 0.0
        self._squares += np.where(is_telling, np.square(score) / np.where(is_telling, information, 1.0), 0.0)
        self._pairs += is_telling

    @property
    def dispersion(self) -> Floats:
        """Ratio of D's variance to that of independent rounds, lowered by a standard error, ≥ 1, [...]."""
        mean = np.square(self._score) / np.where(self._information > 0.0, self._information, 1.0)
        free = np.maximum(self._pairs - 1.0, 0.0) + _FEW_PAIRS
        seems = (self._squares - mean + _FEW_PAIRS) / free
        made: Floats = np.maximum(seems / (1.0 + np.sqrt(2.0 / free)), 1.0)
        return made

    @property
    def log_e(self) -> Floats:
        """ln of the e-values [..., 2]: that the new drafter accepts less, and that it accepts more."""
        return self.log_e_with(0.0)[..., :2]

    @property
    def rounds(self) -> Floats:
        """Verify rounds with drafts of both so far, [...]."""
        made: Floats = self._trials[..., 0]
        return made

    @property
    def log_bets(self) -> Floats:
        """ln of what every bet has made so far [..., 2 + M, B]; for the same two versions, those of several hosts add up."""
        return self._log_bets.copy()

    def log_e_with(self, others: Floats | float) -> Floats:
        """ln of the e-values [..., 2 + M] of this traffic and others' together: accepts less, more, loses less than a margin.

        Args:
            others: sum of their `log_bets`.
        """
        made: Floats = np.logaddexp.reduce(self._log_bets + others + _LOG_WEIGHTS, axis=-1)
        return made

    def log_e_held(self, share: Floats, others: Floats | float = 0.0) -> Floats:
        """ln of the e-value that this traffic loses less than its margin, [...].

        Args:
            share: of all rounds, [...]. The margin is the largest of MARGINS that costs all traffic at most `MOST_COST`.
            others: as in `log_e_with`.
        """
        which = (np.array(MARGINS[1:]) * np.asarray(share)[..., None] <= MOST_COST).sum(axis=-1)
        held: Floats = np.take_along_axis(self.log_e_with(others), which[..., None] + 2, axis=-1)[..., 0]
        return held

    @property
    def change(self) -> Floats:
        """Estimated relative change of conditional acceptance, [...]; 0 without data."""
        to_mean = np.where(self._information > 0.0, self._score / np.maximum(self._information, 1e-9), 0.0)
        to_mean = np.clip(to_mean, -1.99, 1.99)  # relative to the mean of both; the result is relative to the old one
        made: Floats = to_mean / (1.0 - to_mean / 2.0)
        return made

    def state(self) -> dict[str, Any]:
        """Complete state as plain lists."""
        return {name: getattr(self, f"_{name}").tolist() for name in _FIELDS}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Evidence:
        """Restore from a `state`. Raises KeyError, ValueError if it isn't one."""
        made = cls(0)
        for name in _FIELDS:
            setattr(made, f"_{name}", np.array(state[name], dtype=np.float64))
        if made._log_bets.shape[-2:] != _LOG_WEIGHTS.shape or made._trials.shape != made._successes.shape:
            raise ValueError("this evidence was gathered with other bets")
        return made


BETS_SHAPE = _LOG_WEIGHTS.shape
"""[2 + M, B]."""
_FIELDS = ("trials", "successes", "log_bets", "score", "information", "squares", "pairs")
