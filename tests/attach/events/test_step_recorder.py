"""What the engine's thread notes of a step, and in which order."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from honed.attach.events.batch_builder import BatchBuilder
from honed.attach.events.step_log import DRAFT_IDS, NUM_VERIFIED, Over, Started, Step, StepLog
from honed.attach.events.step_recorder import Plan, StepRecorder
from tests.attach.step_cases import started


def outputs(sampled: list[list[int]], num_tokens: int = 5) -> tuple[Any, Any]:
    """(scheduler output, runner output) of one request with three drafts."""
    output = SimpleNamespace(
        total_num_scheduled_tokens=num_tokens,
        num_scheduled_tokens={"r": 4},
        num_invalid_spec_tokens=None,
        scheduled_spec_decode_tokens={"r": [5, 6, 7]},
    )
    return output, SimpleNamespace(sampled_token_ids=sampled, req_id_to_index={"r": 0})


def entries(log: StepLog) -> list[Any]:
    return [log.take() for _ in range(len(log))]


def test_a_request_that_ends_in_a_step_is_over_after_it() -> None:
    log = StepLog()
    recorder = StepRecorder(log)
    recorder.started("r", started().request)
    recorder.begin(*outputs([[5, 9]]))
    recorder.verified.append(("r", 3, 1))
    recorder.over("r")
    recorder.end(Plan(1, 0, "policy", 7, "v1"))
    recorder.over("s")  # aborted between two steps
    first, step, over, aborted = entries(log)
    assert isinstance(first, Started)
    assert isinstance(step, Step)
    assert (step.verified, step.num_drafting, step.drafter_version) == ([("r", 3, 1)], 7, "v1")
    assert (over, aborted) == (Over("r"), Over("s"))
    assert recorder.spent_ns > 0


@pytest.mark.fault("a host without honed among an engine's workers")
def test_what_a_step_carries_is_read_by_workers_without_honed() -> None:
    output, _ = outputs([[5, 9]])
    output.honed_plan = Plan(1, 0, "policy", 7, "v1", ["r"], {"r": 1})
    sent = pickle.dumps(output, protocol=pickle.HIGHEST_PROTOCOL)
    assert b"honed." not in sent
    assert pickle.loads(sent).honed_plan is None
    assert output.honed_plan.padded == ["r"]


def test_a_step_without_tokens_is_none() -> None:
    log = StepLog()
    recorder = StepRecorder(log)
    recorder.begin(*outputs([], num_tokens=0))
    recorder.over("r")
    recorder.end(Plan(1, 0, "policy", 7))
    assert entries(log) == [Over("r")]


def test_token_ids_that_are_to_be_logged_are_those_before_vllm_cuts_them() -> None:
    log = StepLog()
    recorder = StepRecorder(log)
    for is_logging in (False, True):
        recorder.is_logging_token_ids = is_logging
        sampled = [[5, 6, 9]]
        output, runner_output = outputs(sampled)
        recorder.begin(output, runner_output)
        del sampled[0][1:]
        output.scheduled_spec_decode_tokens["r"].clear()
        recorder.end(Plan(1, 0, "policy", 7))
    _, step = entries(log)
    assert step.has_token_ids
    assert (step.emitted, step.drafts) == ([[5, 6, 9]], {"r": [5, 6, 7]})
    assert step.sampled == [[5]], "what was delivered"


def test_steps_that_overlap_take_their_own_time_only() -> None:
    log = StepLog()
    recorder = StepRecorder(log)
    for number in (1, 2):
        recorder.begin(*outputs([[5]]))
        recorder.end(Plan(number, 0, "policy", 7))
    first, second = entries(log)
    assert first.duration_us * 1000 > 10 * (second.duration_us * 1000)  # the clock's zero is long ago
    assert second.end_ns >= first.end_ns


def test_ids_that_the_runner_brought_take_the_place_of_placeholders() -> None:
    log = StepLog()
    recorder = StepRecorder(log)
    recorder.is_logging_token_ids = True
    output, runner_output = outputs([[5, 9]])
    output.scheduled_spec_decode_tokens = {"r": [-1, -1]}
    setattr(runner_output, DRAFT_IDS, np.array([[5, 6, 7]]))
    recorder.begin(output, runner_output)
    recorder.end(Plan(1, 0, "policy", 7))
    (step,) = entries(log)
    assert step.drafts == {"r": [5, 6]}


def test_how_many_drafts_were_verified_is_the_runners_word() -> None:
    log = StepLog()
    recorder = StepRecorder(log)
    for verified in ([2], None):
        output, runner_output = outputs([[5, 9]])
        if verified is not None:
            setattr(runner_output, NUM_VERIFIED, np.array(verified))
        recorder.begin(output, runner_output)
        recorder.end(Plan(1, 0, "policy", 7))
    trimmed, whole = entries(log)
    assert trimmed.num_verified.tolist() == [2]
    assert whole.num_verified is None


def test_tokens_that_vllm_drops_are_none_of_the_request() -> None:
    """A preempted request is taken up anew, and what a step under way computed for it counts for nothing."""
    log = StepLog()
    recorder, builder = StepRecorder(log), BatchBuilder()
    recorder.started("r", started().request)
    for dropped in ((), {"r"}, ()):
        output, runner_output = outputs([[5]])
        output.scheduled_spec_decode_tokens = {}
        output.num_scheduled_tokens = {"r": 1}
        recorder.begin(output, runner_output, dropped)
        recorder.end(Plan(1, 0, "policy", 0))
    for entry in entries(log):
        if isinstance(entry, Step):
            builder.add(entry)
        else:
            builder.note(entry)
    # The first token is the prompt's; the second was dropped; the third is a round.
    assert builder.take().rounds.position == [40]
