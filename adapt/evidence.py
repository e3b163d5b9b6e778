"""Which of two drafters is better? An anytime-valid answer from windows in which they take turns on the same traffic.

Windows come in pairs, one of each drafter, and chance decides which comes first. For every pair and workload, with trials n and
successes s of position j (a trial: the drafts before j were accepted and j was verified) of the old (a) and the new (b),

    D = Σ_j w_j · (n_a,j · n_b,j / (n_a,j + n_b,j)) · (s_b,j / n_b,j − s_a,j / n_a,j)        w_j = 1 / (1 − p_j)

is the score of a relative change of conditional acceptance that is the same at all positions (p_j: acceptance of both
together). Positions are compared one by one, so rounds are compared at equal draft lengths, whatever the lengths were.

When the two accept alike, a coin says which of a pair's windows was whose, so D and −D are equally likely given |D|: with
rounds that depend on each other as well, and with traffic that changes from pair to pair. For every bet λ therefore

    E = Π_pairs exp(λD) / cosh(λD)     has expectation ≤ 1, and so P(a mean of such E ever reaches 1/α) ≤ α

at every look (Ville). λ < 0 bets that the new accepts less, λ > 0 that it accepts more; without dependence λ is best at the
relative change itself. One pair can at most double E: no single burst of traffic decides.

Source: de la Peña, Ann. Probab. 27 (1999), "A general class of exponential inequalities for martingales and ratios"; score and
weights as in Mantel, Cancer Chemother. Rep. 50 (1966).

Letters: K = configured number of draft tokens, B = bets, … = any leading axes (many canaries at once, in simulations).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from honed.adapt.acceptance import Floats

BETS = {0.02: 0.1, 0.05: 0.2, 0.1: 0.4, 0.2: 0.2, 0.4: 0.1}
"""Relative changes that are bet on, and their weights. The small ones are for windows whose rounds repeat each other."""
_CHANGES, _LOG_WEIGHTS = np.array(list(BETS)), np.log(list(BETS.values()))
_MOST_CERTAIN = 0.98
_LOG_2 = math.log(2.0)


class Evidence:
    """For and against a new drafter on some traffic; starts with none."""

    def __init__(self, num_spec_tokens: int, shape: tuple[int, ...] = ()) -> None:
        self._trials: Floats = np.zeros((*shape, num_spec_tokens))
        self._successes: Floats = np.zeros((*shape, num_spec_tokens))
        self._log_bets: Floats = np.zeros((*shape, 2, len(BETS)))  # worse, better
        self._score: Floats = np.zeros(shape)
        self._information: Floats = np.zeros(shape)

    def weigh(
        self, old_trials: Floats, old_successes: Floats, new_trials: Floats, new_successes: Floats
    ) -> tuple[Floats, Floats]:
        """Score a pair of windows, from counts [..., K]: D, and what D is divided by to estimate the change, both [...]."""
        trials = old_trials + new_trials
        self._trials += trials
        self._successes += old_successes + new_successes
        # Of both drafters alike, this pair included: to exchange them changes the sign of D and nothing else.
        acceptance = np.clip((self._successes + 0.5) / (self._trials + 1.0), 0.0, _MOST_CERTAIN)
        weight = 1.0 / (1.0 - acceptance) / np.maximum(trials, 1.0)
        score = (weight * (new_successes * old_trials - old_successes * new_trials)).sum(axis=-1)
        information = (weight * old_trials * new_trials * acceptance).sum(axis=-1)
        return score, information

    def add(self, score: Floats, information: Floats) -> None:
        """Fold in a pair's D."""
        self._score += score
        self._information += information
        x = np.asarray(score)[..., None] * _CHANGES
        log_cosh = np.logaddexp(x, -x) - _LOG_2
        self._log_bets[..., 0, :] -= x + log_cosh
        self._log_bets[..., 1, :] += x - log_cosh

    @property
    def log_e(self) -> Floats:
        """ln of the e-values [..., 2]: that the new drafter accepts less, and that it accepts more."""
        made: Floats = np.logaddexp.reduce(self._log_bets + _LOG_WEIGHTS, axis=-1)
        return made

    @property
    def change(self) -> Floats:
        """Estimated relative change of conditional acceptance, [...]; 0 before anything was seen."""
        to_mean = np.where(self._information > 0.0, self._score / np.maximum(self._information, 1e-9), 0.0)
        to_mean = np.clip(to_mean, -1.99, 1.99)  # of the mean of both; wanted is that of the old one
        made: Floats = to_mean / (1.0 - to_mean / 2.0)
        return made

    def state(self) -> dict[str, Any]:
        """All of it as plain lists."""
        return {name: getattr(self, f"_{name}").tolist() for name in _FIELDS}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Evidence:
        """The opposite of `state`. Raises KeyError, ValueError for what isn't one."""
        made = cls(0)
        for name in _FIELDS:
            setattr(made, f"_{name}", np.array(state[name], dtype=np.float64))
        if made._log_bets.shape[-2:] != (2, len(BETS)) or made._trials.shape != made._successes.shape:
            raise ValueError("this evidence was gathered with other bets")
        return made


_FIELDS = ("trials", "successes", "log_bets", "score", "information")
