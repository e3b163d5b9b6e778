"""Lets torchvision's wheel, which is for CUDA builds of torch, be imported beside vLLM's CPU build.

vLLM and Transformers import it with every model that takes images, though the zoo sends none. Its compiled operators can't be
loaded there, and it describes two of them all the same: these are declared here, without a kernel.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_kept: list[object] = []
"""A library that nobody holds takes its operators along."""


class _Declares(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is first asked for, and finds nothing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            import torch

            sys.meta_path.remove(self)
            if not torch.cuda.is_available():
                library = torch.library.Library("torchvision", "FRAGMENT")
                _kept.append(library)
                for name in ("nms", "qnms"):
                    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _Declares())
