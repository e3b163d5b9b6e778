"""What kinds of steps cost beside the smooth price: kernels change at sizes that no formula knows.

A step's relative residual is taken for the sum of its kind's, its spell's (see `spells`) and its own,

    y / ŷ − 1 = v[kind] + u[spell] + e,

a kind being batch size and draft tokens per request, rounded. The three variances come from products of residuals: of steps of
one kind in different spells, of different kinds in one spell, and of each with itself. The effects are the best linear
predictors given these: a kind that was seen seldom, or in few spells, is drawn to none, and where the smooth price says it all
the variance of kinds is 0.

Source: Henderson, Biometrics 31 (1975), "Best linear unbiased estimation and prediction under a selection model"; variances by
the method of moments, as Balestra and Nerlove (see `spells`).

Letters: n = steps, G = kinds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.steps.spells import SPELL_STEPS

_SWEEPS = 30
_FAR = 3.0
"""Residuals beyond so many times their spread are cut off."""
_LEAST_SHARE = 0.02
"""A variance of kinds below this share of the steps' own is taken for none."""


def kind_effects(residuals: Floats, kind: Ints, numbers: Floats, spread: float) -> Floats:
    """Estimate v, [G].

    Args:
        residuals: y / ŷ − 1 of each step, [n].
        kind: of each step, from 0 without gaps, [n].
        numbers: of each step in the order of time, finite, [n].
        spread: of residuals, robust.
    """
    num_kinds = int(kind.max()) + 1 if len(kind) else 0
    effects: Floats = np.zeros(num_kinds)
    if num_kinds < 2:
        return effects
    own = np.clip(residuals, -_FAR * spread, _FAR * spread)
    own = own - own.mean()
    _, spell = np.unique(np.floor_divide(numbers, SPELL_STEPS), return_inverse=True)
    of_kinds, of_spells, rest = _variances(own, kind, spell)
    if of_kinds <= _LEAST_SHARE * rest:
        return effects
    count, length = np.bincount(kind), np.bincount(spell)
    of_spell = np.zeros(len(length))
    for _ in range(_SWEEPS):  # Gauss-Seidel on the mixed model's equations
        effects = np.bincount(kind, own - of_spell[spell]) / (count + rest / of_kinds)
        if of_spells > 0.0:
            of_spell = np.bincount(spell, own - effects[kind]) / (length + rest / of_spells)
    return effects


def _variances(own: Floats, kind: Ints, spell: npt.NDArray[np.intp]) -> tuple[float, float, float]:
    """Variance between kinds, between spells and of the rest. That of kinds is less by a standard error than it seems."""
    _, both = np.unique(kind * (int(spell.max()) + 1) + spell, return_inverse=True)
    of_kinds, of_spells = _shared(own, kind, both), _shared(own, spell, both)
    every = float((own**2).mean())
    rest = max(every - of_kinds - of_spells, 0.1 * every, 1e-12)
    # A kind's mean in a spell varies by so much; of m of them, m·(m − 1) products tell the variance between kinds.
    in_spell = np.bincount(both)
    of_mean = of_spells + rest / float(in_spell.mean())
    kind_of_pair = np.empty(len(in_spell), dtype=np.int64)
    kind_of_pair[both] = kind
    spells = np.bincount(kind) ** 2 / np.bincount(kind_of_pair, in_spell.astype(np.float64) ** 2)
    products = float((spells * (spells - 1.0)).sum())
    error = of_mean * np.sqrt(2.0 / products) if products > 0.0 else np.inf
    return max(of_kinds - float(error), 0.0), of_spells, rest


def _shared(own: Floats, group: npt.NDArray[np.intp], both: npt.NDArray[np.intp]) -> float:
    """What steps of one group have in common, from products of those that share nothing else."""
    num_pairs = _num_pairs(group) - _num_pairs(both)
    return max((_square_sums(own, group) - _square_sums(own, both)) / num_pairs, 0.0) if num_pairs > 0.0 else 0.0


def _square_sums(values: Floats, group: npt.NDArray[np.intp]) -> float:
    return float((np.bincount(group, values) ** 2).sum())


def _num_pairs(group: npt.NDArray[np.intp]) -> float:
    return float((np.bincount(group).astype(np.float64) ** 2).sum())
