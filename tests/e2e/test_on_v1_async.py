"""A part of what holds on V1 with async scheduling; `make test` runs one file a process.

The whole, on V1 and V2 with either scheduler, is `make test-runners`.
"""

from __future__ import annotations

import pytest

from tests.e2e.engine import RUNNER
from tests.e2e.other_runners import check_on


@pytest.mark.e2e
@pytest.mark.timeout(1500)
@pytest.mark.skipif(RUNNER != "v1", reason="this is a process that runs it")
def test_what_is_promised_holds_on_v1_async() -> None:
    tests = [
        "test_runner_contract.py",
        "test_engine_modes.py::test_a_grammar_holds_where_drafting_stops_and_begins",
        "test_trees.py::test_tokens_are_those_without_speculation_and_events_are_vllms",
        "test_trees.py::test_a_grammar_holds_beside_trees",
        "test_trees.py::test_an_empty_step_between_two_that_draft",
        "test_trees.py::test_a_failure_costs_acceptance_and_no_token",
        "test_trees_modes.py::test_split_prompts_and_preempted_requests",
    ]
    check_on("v1-async", tests)
