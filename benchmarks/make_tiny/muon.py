"""torch's Muon on a CPU without bfloat16 units, where its bfloat16 matrix products take ten times as long as float32's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import _muon


def has_fast_bfloat16() -> bool:
    """Whether the CPU has matrix units for bfloat16."""
    return torch.cpu._is_amx_tile_supported()


def _orthogonal(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton–Schulz iteration as torch's, in the gradient's own type."""
    a, b, c = coefficients
    x = grad.T if grad.shape[0] > grad.shape[1] else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if grad.shape[0] > grad.shape[1] else x


def make_muon(matrices: list[Tensor], lr: float) -> torch.optim.Muon:
    """Make the optimizer for matrices."""
    if not has_fast_bfloat16():
        _muon._zeropower_via_newtonschulz = _orthogonal
    return torch.optim.Muon(matrices, lr=lr, weight_decay=0.01)
