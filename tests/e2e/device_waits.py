"""Calls that wait for a CUDA device, as PyTorch warns of them, and which of them are honed's."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

OURS = {"attach", "kernels", "adapt"}


@contextmanager
def device_waits() -> Iterator[list[traceback.FrameSummary]]:
    """Note the innermost frame outside of PyTorch of each call that waits.

    Copies from memory that isn't pinned give no warning.
    """
    waited: list[traceback.FrameSummary] = []

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing" in str(message):
            frames = [f for f in traceback.extract_stack() if f.filename not in (__file__, warnings.__file__)]
            waited.append(next(f for f in reversed(frames) if "-packages/torch/" not in f.filename))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        shown, warnings.showwarning = warnings.showwarning, note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            torch.zeros(1, device="cuda").item()
            assert waited, "a call that waits isn't noted: this shows nothing"
            waited.clear()
            yield waited
        finally:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = shown


def of_honed(waited: list[traceback.FrameSummary]) -> list[str]:
    """Places in honed's code; vLLM has folders of the same names."""
    places = ((Path(f.filename), f.lineno) for f in waited)
    return sorted({f"{path}:{line}" for path, line in places if OURS & set(path.parts) and "vllm" not in path.parts})
