"""Makes this process ready for the runner under test, before any test module brings in Triton or vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e import triton_on_cpu
from tests.e2e.engine import IS_CUDA, IS_SLOW, IS_V2, TestEngine, engine

collect_ignore = ([] if IS_V2 else ["test_v2_only.py", "test_v2_passes.py"]) + ([] if IS_CUDA else ["test_cuda_graphs.py"])

if IS_SLOW:
    triton_on_cpu.install()


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestEngine]:
    """An engine with honed in it that logs token ids."""
    with engine(tmp_path_factory.mktemp("run"), max_num_seqs=4 if IS_SLOW else 8) as running:
        assert running.honed is not None
        running.honed._recorder.is_logging_token_ids = True
        yield running
