"""What honed does in a vLLM process for trees before there is a model runner."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

REGISTER = """
import sys
from honed.attach.plugin import register
register()
register()
from vllm.v1.worker.worker_base import WorkerWrapperBase
assert WorkerWrapperBase.init_device.is_honed
assert not hasattr(WorkerWrapperBase.init_device.__wrapped__, "is_honed"), "wrapped twice"
print("vllm.v1.worker.gpu.model_runner" in sys.modules)
"""


def test_the_plugin_leaves_the_model_runner_to_be_imported_with_a_configuration() -> None:
    """Some of vLLM's decorators look at the configuration once, when the module that they are in is imported."""
    environ = os.environ | {"HONED_RUNTIME_DIR": "/nonexistent/honed", "HONED_TREES": "1"}
    found = subprocess.run([sys.executable, "-c", REGISTER], env=environ, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["False"]


@pytest.mark.fault("a mistyped switch that keeps vLLM from starting")
def test_a_mistyped_switch_keeps_no_process_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls plugins unguarded. The scheduler's process logs what is wrong."""
    from honed.attach.plugin import register
    from honed.attach.trees import runner_v2

    monkeypatch.setenv("HONED_RUNTIME_DIR", "/nonexistent/honed")
    monkeypatch.setenv("HONED_TREES", "graph")
    monkeypatch.setattr(runner_v2, "prepare_workers", lambda *_: pytest.fail("trees aren't switched on"))
    register()


@pytest.mark.parametrize(
    ("speculative", "is_v2"),
    [(None, True), (SimpleNamespace(method="mtp"), True), (SimpleNamespace(method="dflash"), False)],
)
def test_a_worker_that_cannot_be_prepared_starts_as_ever(
    monkeypatch: pytest.MonkeyPatch, speculative: Any, is_v2: bool
) -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from honed.attach.trees import runner_v2

    started: list[Any] = []
    monkeypatch.setattr(WorkerWrapperBase, "init_device", started.append)
    monkeypatch.setattr(runner_v2, "_prepare_drafters", lambda _: pytest.fail("this worker makes no DFlash drafter on V2"))
    runner_v2.prepare_workers()
    wrapper = WorkerWrapperBase()
    wrapper.vllm_config = SimpleNamespace(speculative_config=speculative, use_v2_model_runner=is_v2)
    wrapper.init_device()
    broken = WorkerWrapperBase()
    broken.vllm_config = SimpleNamespace()
    broken.init_device()
    assert started == [wrapper, broken]
