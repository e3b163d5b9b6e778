"""Mixed precision: bfloat16 for matrix products, float32 for stored values.

Parameters, gradients and optimizer state stay float32 (the master weights). Under `autocast`, matrix products use bfloat16
copies of them. Norms, softmax and losses compute in float32 by themselves.
"""

from __future__ import annotations

import torch

from honed.recalib.config.training import Precision


def compute_dtype(device: torch.device, precision: Precision) -> torch.dtype:
    """Choose the type of matrix products on a device.

    Raises:
        ValueError: bfloat16 was requested on a device without it.
    """
    if precision == "float32":
        return torch.float32
    if precision == "bfloat16":
        if device.type != "cpu" and not (device.type == "cuda" and torch.cuda.is_bf16_supported()):
            raise ValueError(f"trainer.precision = 'bfloat16', but {device} has no bfloat16: use 'float32' or 'auto'")
        return torch.bfloat16
    # A CPU or a GPU without bfloat16 matrix units converts to float32 first: no gain.
    is_fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if is_fast else torch.float32


def computing(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return a context in which matrix products use `dtype`; it does nothing for float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)
