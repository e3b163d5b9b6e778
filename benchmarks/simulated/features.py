"""Features of simulated drafts: top-token log-odds as a drafter shows them, and the part of acceptance that they predict.

z ~ N(0, 1) is a property of the token's position in the output, and e ~ N(0, 1) another. Both are drawn once, like the random
numbers of `Traffic`. A draft at depth j of request r of workload w is accepted with log-odds

    logit a = M(L_rj) + σ_w·z                       L_rj: log-odds of the trace without features, drift included
    f       = offset_w + slope_w·(L̄_wj + share_w·(L_rj − L̄_wj) + σ_w·z) + noise_w·e

and M is such that E_z[a] = sigmoid(L_rj). The z of different positions are independent, so the marginal survival of a draft is
the trace's too, Π_i E[a_i]. Rules that ignore features meet the same traffic on average (not the same draws).

Letters: K = configured number of draft tokens, W = workloads, n = requests in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from honed.adapt.protocol.arrays import Floats, Ints

_GRID: Floats = np.linspace(-24.0, 24.0, 1921)
"""Values of M at which E_z[a] is computed; between them it is interpolated."""
_NODES = 64


@dataclass(frozen=True)
class Feature:
    """Features of a workload's drafts. With slope 2 and offset 0.4 vLLM's first guess (0.5, −0.2) is right."""

    informativeness: float = 1.0
    """σ: standard deviation of the token's part of the log-odds of acceptance."""
    slope: float = 2.0
    """0: the features are only noise, however much tokens differ."""
    offset: float = 0.4
    request_share: float = 1.0
    """Share of a request's difference from its workload that the features show."""
    noise: float = 0.5


NOTHING = Feature(0.0, 0.0, 0.0, 0.0, 0.0)
"""Features of a workload without any, in a trace with others."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts that a step could verify."""

    acceptance: Floats  # [n, K] true, conditional on the drafts before
    features: Floats  # [n, K]


class DraftFeatures:
    """Draws a trace's features; `size` positions in all."""

    def __init__(self, features: Sequence[Feature | None], seed: int, size: int) -> None:
        self._features = [one or NOTHING for one in features]
        token, other = (np.random.default_rng([seed, stream]) for stream in (4, 5))
        self._token: npt.NDArray[np.float32] = token.standard_normal(size, dtype=np.float32)
        self._other: npt.NDArray[np.float32] = other.standard_normal(size, dtype=np.float32)
        columns = [(one.informativeness, one.slope, one.offset, one.request_share, one.noise) for one in self._features]
        self._sigma, self._slope, self._offset, self._share, self._noise = np.array(columns).T[:, :, None]  # [W, 1] each
        self._marginal = [marginal_log_odds(one.informativeness) for one in self._features]

    def centre(self, log_odds: Floats, workload: Ints) -> Floats:
        """Find M(L) of requests' log-odds, [n, K]."""
        centre = np.empty_like(log_odds)
        for row, marginal in enumerate(self._marginal):
            mine = workload == row
            centre[mine] = np.interp(log_odds[mine], marginal, _GRID)
        return centre

    def drafts(self, at: Ints, workload: Ints, centre: Floats, log_odds: Floats, typical: Floats) -> Drafts:
        """Draft at positions [n, K] for requests with M `centre`, log-odds L and those L̄ of their workloads, all [n, K]."""
        part = self._sigma[workload] * self._token[at]
        acceptance: Floats = 1.0 / (1.0 + np.exp(-(centre + part)))
        shown = typical + self._share[workload] * (log_odds - typical) + part
        features = self._offset[workload] + self._slope[workload] * shown + self._noise[workload] * self._other[at]
        return Drafts(acceptance, features)


def marginal_log_odds(sigma: float) -> Floats:
    """Compute logit E_z[sigmoid(M + σ·z)] for M on the grid, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    mean = (1.0 / (1.0 + np.exp(-(_GRID[:, None] + sigma * nodes)))) @ (weights / weights.sum())
    log_odds: Floats = np.log(mean) - np.log1p(-np.minimum(mean, 1.0 - 1e-15))
    return np.maximum.accumulate(log_odds)
