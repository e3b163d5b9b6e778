"""Drafts that a grammar strikes count as tried and refused, whether the scheduler waits for the drafts or runs ahead.

vLLM's own schedulers judge the drafts here; only the grammar is made up.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from honed.attach.engine.struck_drafts import StruckDrafts, struck_in_output, with_struck

scheduling = pytest.importorskip("vllm.v1.core.sched.scheduler")
from vllm.v1.outputs import DraftTokenIds  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

FORBIDDEN = 50


class Grammar:
    """Allows tokens below FORBIDDEN."""

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens[: next((i for i, token in enumerate(tokens) if token >= FORBIDDEN), len(tokens))]


def request(request_id: str, has_grammar: bool = True, **fields: Any) -> Any:
    made = {
        "request_id": request_id,
        "use_structured_output": has_grammar,
        "structured_output_request": SimpleNamespace(grammar=Grammar()),
        "is_prefill_chunk": False,
        "is_finished": lambda: False,
        "spec_token_ids": [],
    }
    return SimpleNamespace(**(made | fields))


def scheduler(*requests: Any) -> Any:
    """vLLM's scheduler as far as judging drafts goes: the rest of it isn't made."""
    made = object.__new__(scheduling.Scheduler)
    made.requests = {one.request_id: one for one in requests}
    made.structured_output_manager = manager = object.__new__(StructuredOutputManager)
    manager._get_constraint_bounds = lambda request, tokens: (0, len(tokens))  # type: ignore[method-assign]
    return made


def an_output(scheduled: dict[str, list[int]], invalid: dict[str, int] | None = None) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens={name: 1 + len(tokens) for name, tokens in scheduled.items()},
        scheduled_spec_decode_tokens={name: tokens for name, tokens in scheduled.items() if tokens},
        num_invalid_spec_tokens=invalid,
    )


def judge(struck: StruckDrafts, of: Any, drafts: dict[str, list[int]]) -> None:
    offered = struck.offered(list(drafts), list(drafts.values()))
    of.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))
    struck.judged(offered, of.requests)


def test_what_vllm_cuts_off_before_it_schedules_is_struck() -> None:
    requests = [request("part"), request("all"), request("none"), request("free", has_grammar=False)]
    of, struck = scheduler(*requests), StruckDrafts()
    for one in requests:
        struck.start(one)
    judge(struck, of, {"part": [1, 2, 60, 3], "all": [60, 1, 2], "none": [1, 2, -1, -1], "free": [60, 60]})
    kept = {one.request_id: one.spec_token_ids for one in requests}
    assert kept == {"part": [1, 2], "all": [], "none": [1, 2], "free": [60, 60]}
    assert struck.scheduled(an_output(kept)) == {"part": 2, "all": 3}
    assert struck.scheduled(an_output(kept)) == {}  # each once


def test_only_drafts_that_are_tried_are_struck() -> None:
    requests = [request(name) for name in ("waits", "shortened", "preempted", "gone", "again")]
    requests.append(request("in its prompt", is_prefill_chunk=True))
    of, struck = scheduler(*requests), StruckDrafts()
    for one in requests:
        struck.start(one)
    judge(struck, of, {one.request_id: [1, 2, 60] for one in requests})
    struck.drop("preempted")
    struck.finish("gone")
    judge(struck, of, {"again": [1, 2, 3]})
    assert struck.scheduled(an_output({"shortened": [1], "preempted": [], "gone": [], "again": [1, 2, 3]})) == {}
    assert struck.scheduled(an_output({"waits": [1, 2], "in its prompt": []})) == {"waits": 1}


def test_what_vllm_pads_in_a_step_under_way_is_struck() -> None:
    requests = [request("part"), request("fewer"), request("free", has_grammar=False)]
    of, struck = scheduler(*requests), StruckDrafts()
    for one in requests:
        struck.start(one)
    output = an_output({one.request_id: [-1] * 4 for one in requests})
    drafts = {"part": [1, 60, 2, 3, 4], "fewer": [1, 2, 60], "free": [60] * 4}
    offered = struck.offered(list(drafts), list(drafts.values()))
    of.update_draft_token_ids_in_output(DraftTokenIds(list(drafts), list(drafts.values())), output)
    assert output.num_invalid_spec_tokens == {"part": 3, "fewer": 2}
    assert struck_in_output(offered, output) == {"part": 3, "fewer": 1}  # the last draft of "fewer" never was
    assert struck.unjudged(output) == []


def test_placeholders_that_no_grammar_saw_are_no_drafts() -> None:
    struck = StruckDrafts()
    struck.start(request("r"))
    struck.start(request("free", has_grammar=False))
    assert struck.unjudged(an_output({"r": [-1, -1], "free": [-1, -1]})) == ["r"]
    assert struck.unjudged(an_output({"r": [-1, -1]}, {"r": 2})) == []


def test_a_struck_draft_teaches_a_refusal() -> None:
    invalid, struck = {"ahead": 2, "absent": 2}, {"ahead": 2, "cut": 1, "all": 3, "unanswered": 3}
    verified = [("ahead", 4, 2), ("absent", 2, 0), ("cut", 2, 2), ("plain", 3, 1)]
    learned = with_struck(verified, invalid, struck, ["all", "cut"])
    assert learned == [("ahead", 4, 2), ("cut", 3, 2), ("plain", 3, 1), ("all", 3, 0)]
