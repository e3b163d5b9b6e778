"""A part of what holds on V2, under Triton's interpreter where there is no GPU.

The whole, on V1 and V2 with either scheduler, is `make test-runners`.
"""

from __future__ import annotations

import pytest

from tests.e2e.engine import RUNNER
from tests.e2e.other_runners import check_on


@pytest.mark.e2e
@pytest.mark.v2
@pytest.mark.timeout(1500)
@pytest.mark.skipif(RUNNER != "v1", reason="this is a process that runs it")
def test_what_is_promised_holds_on_v2_async() -> None:
    tests = [
        "test_runner_contract.py",
        "test_v2_only.py",
        "test_v2_passes.py",
        "test_eagle3.py::test_captured_rows_are_fused_ones_of_whole_requests",
        "test_trees_v2.py",
        "test_trees_dflash2.py",
        "test_runner_swaps.py::test_swapped_weights_draft_as_a_fresh_load_does",
    ]
    check_on("v2-async", tests)
