"""Corrections of vLLM's acceptance estimates by workload and position, learned from their errors.

vLLM's adaptive verification predicts a draft's acceptance from the drafter's confidence, by one curve for all traffic. The
curve orders a request's drafts well. Its level is wrong in a workload on which the drafter is overconfident. So predictions
keep their spread, and each workload's level is shifted, in log-odds, to the observed one:

    shift(w, j) = logit p(w, j) − logit q(w, j)

p is the accepted share of the drafts at position j that were verified and reached; q is their mean prediction. Both forget
(`FORGETTING_ROUNDS`) and are shrunk to each other by `SHRINK_ROUNDS`. All of it stays on the device: a step's predictions are
graded when the next step's result is there, as vLLM grades its own curve.

Letters: R = requests in the batch, S = max_num_reqs, K = draft tokens, W = workloads.
"""

from __future__ import annotations

import torch

FORGETTING_ROUNDS = 4000.0
"""Rounds of a workload after which an observation weighs 1/e."""
SHRINK_ROUNDS = 50.0
EDGE = 1e-4
"""Probabilities stay in [EDGE, 1 − EDGE]."""


class FedLevels:
    """Learns the shifts and applies them; nothing here waits for the device.

    Args:
        num_slots: S, request slots.
        num_spec_tokens: K.
        num_workloads: W.
        device: where predictions are.
    """

    def __init__(self, num_slots: int, num_spec_tokens: int, num_workloads: int, device: torch.device) -> None:
        self._predicted = torch.full((num_slots, num_spec_tokens), 0.5, device=device)
        self._workload = torch.zeros(num_slots, dtype=torch.int64, device=device)
        # Sums over graded drafts: their number, accepted ones, predicted probability.
        self._sums = torch.zeros((3, num_workloads, num_spec_tokens), device=device)
        self._steps = torch.arange(num_spec_tokens, device=device)

    def set_workloads(self, slots: torch.Tensor, workloads: torch.Tensor) -> None:  # [R] int64, [R] int64
        """Set the workloads of these slots' requests; earlier predictions are another request's."""
        self._workload[slots] = workloads
        self._predicted.index_fill_(0, slots, 0.5)  # indexed, a number would be copied to the device first

    def observe(self, slots: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:  # [R] each
        """Grade the predictions for the drafts that a step has verified, as vLLM's estimator counts them."""
        accepted = (num_sampled - 1).clamp(min=0)[:, None]
        verified = accepted + num_rejected[:, None]
        is_graded = (self._steps <= accepted) & (self._steps < verified)  # [R, K]
        is_accepted = is_graded & (self._steps < accepted)
        workload = self._workload[slots]
        rounds = torch.zeros(self._sums.shape[1], device=self._sums.device)
        rounds.index_add_(0, workload, (verified[:, 0] > 0).to(rounds.dtype))
        self._sums *= torch.exp(-rounds / FORGETTING_ROUNDS)[None, :, None]
        graded = torch.stack([is_graded.float(), is_accepted.float(), is_graded * self._predicted[slots]])
        self._sums.index_add_(1, workload, graded)

    def apply(self, slots: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:  # [R], [R, K] -> [R, K]
        """Predictions for new drafts, each at its workload's level."""
        self._predicted[slots] = predicted.float()
        return torch.sigmoid(_logit(predicted) + self.shifts()[self._workload[slots]])

    def shifts(self) -> torch.Tensor:  # [W, K]
        """Log-odds by which predictions are too low."""
        graded, accepted, predicted = self._sums
        mean = torch.where(graded > 0.0, predicted / graded.clamp(min=EDGE), 0.5)
        observed = (accepted + SHRINK_ROUNDS * mean) / (graded + SHRINK_ROUNDS)
        return _logit(observed) - _logit(mean)


def _logit(probability: torch.Tensor) -> torch.Tensor:
    return torch.logit(probability.float(), eps=EDGE)
