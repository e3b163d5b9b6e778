"""Kernels of draft trees are compiled before the first tree, on a thread of its own, beside the engine's work.

Triton compiles a kernel when it is first called. Within a step that would stop the engine for seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch

from honed.attach.swap.staging import use_device
from honed.kernels.trees.warm_up import Run

logger = logging.getLogger("honed.attach")


class WarmUp:
    """Runs whatever compiles a kernel; on a CPU nothing has to.

    Args:
        runs: they may share the device with the engine's work, so they change nothing.
    """

    def __init__(self, device: torch.device, runs: Iterable[Run]) -> None:
        self._device, self._runs = device, runs
        self.is_over = device.type != "cuda"

    def begin(self) -> None:
        """Start, and return at once."""
        if not self.is_over:
            threading.Thread(target=self._run, name="honed-warm-up", daemon=True).start()

    def _run(self) -> None:
        began_s, count = time.monotonic(), 0
        try:
            use_device(self._device)
            side: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with torch.inference_mode(), torch.cuda.stream(side):
                for run in self._runs:
                    run()
                    count += 1
        except Exception as error:  # the first tree will meet it again, where errors are counted
            logger.warning("honed: the kernels of draft trees can't be compiled: %s: %s", type(error).__name__, error)
        logger.info("honed: draft trees after %.1f s, in which %d kernels were compiled", time.monotonic() - began_s, count)
        self.is_over = True
