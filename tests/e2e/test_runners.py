"""A part of what holds on every runner: other processes, since one has one runner, one scheduler and one Triton.

The whole, on V1 and V2 with either scheduler, is `make test-runners`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.e2e.engine import ROOT, RUNNER


@pytest.mark.e2e
@pytest.mark.v2
@pytest.mark.timeout(1500)
@pytest.mark.skipif(RUNNER != "v1", reason="this is a process that runs it")
@pytest.mark.parametrize(
    ("runner", "files"),
    [
        (
            "v1-async",
            [
                "test_runner_contract.py",
                "test_engine_modes.py::test_a_grammar_holds_where_drafting_stops_and_begins",
                "test_trees.py::test_tokens_are_those_without_speculation_and_events_are_vllms",
                "test_trees.py::test_a_grammar_holds_beside_trees",
                "test_trees.py::test_an_empty_step_between_two_that_draft",
                "test_trees.py::test_a_failure_costs_acceptance_and_no_token",
                "test_trees_modes.py::test_split_prompts_and_preempted_requests",
            ],
        ),
        (
            "v2-async",
            [
                "test_runner_contract.py",
                "test_v2_only.py",
                "test_v2_passes.py",
                "test_eagle3.py::test_captured_rows_are_fused_ones_of_whole_requests",
                "test_trees_v2.py",
                "test_trees_dflash2.py",
                "test_runner_swaps.py::test_swapped_weights_draft_as_a_fresh_load_does",
            ],
        ),
    ],
)
def test_what_is_promised_holds_on_the_other_runners(runner: str, files: list[str]) -> None:
    paths = [str(ROOT / "tests" / "e2e" / name) for name in files]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *paths]
    environment = os.environ | {"HONED_TEST_RUNNER": runner}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
