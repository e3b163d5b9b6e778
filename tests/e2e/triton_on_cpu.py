"""Lets vLLM's V2 model runner start on a CPU: Triton's interpreter, and a backend that says it is there.

vLLM's CPU build takes Triton for usable only when `triton.backends` knows a "cpu" backend. Triton's interpreter
(TRITON_INTERPRET=1) needs none, so a stub is enough.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any


def install() -> None:
    """Set the environment and register the stub; call before vllm is imported, and Triton unless it interprets already."""
    late = {"vllm"} if os.environ.get("TRITON_INTERPRET") == "1" else {"triton", "vllm"}
    if found := late & sys.modules.keys():
        raise RuntimeError(f"{min(found)} was imported before: it has already looked at the environment")
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    import torch
    import triton
    from triton.backends import Backend, backends
    from triton.backends.compiler import GPUTarget

    class CpuDriver:
        """Answers what Triton and vLLM ask of a driver before any kernel is compiled."""

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cpu", 0, 0)

        def get_device_interface(self) -> Any:
            return torch.cpu

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        utils = SimpleNamespace()

    _take_masks_of_any_type()
    backends["cpu"] = Backend(compiler=next(iter(backends.values())).compiler, driver=CpuDriver)
    triton.runtime.driver.set_active(CpuDriver())


def _take_masks_of_any_type() -> None:
    """The interpreter's `and` of a scalar and a block of booleans gives int32, which its own loads and stores refuse as a mask.

    vLLM's kernels for grammars (`structured_outputs.py`) and for DFlash2's walk do that; compiled, the mask is one bit wide.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    loaded, stored = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def load(self: Any, ptrs: Any, mask: Any, *more: Any) -> Any:
        return loaded(self, ptrs, TensorHandle(mask.data.astype(bool), tl.int1), *more)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        return stored(self, ptrs, value, TensorHandle(mask.data.astype(bool), tl.int1), cache_policy)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
