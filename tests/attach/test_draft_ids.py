"""Draft token ids that a V2 model runner keeps to itself, brought along with the tokens it sampled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from honed.attach.draft_ids import DraftIds
from honed.attach.step_log import DRAFT_IDS

K = 3


class Output:
    """As vLLM's `AsyncOutput`: what it holds is only there once it is asked for."""

    def get_output(self) -> Any:
        return SimpleNamespace()


class V2Runner:
    """The order of vLLM's V2 runner: a step verifies the drafts that are there, then the draft pass overwrites them."""

    def __init__(self) -> None:
        self.req_states = SimpleNamespace(draft_tokens=torch.arange(4 * K).view(4, K))
        self.output_copy_stream = None
        self.execute_model_state: Any = None

    def execute_model(self, idx_mapping: list[int], num_draft_tokens: int = K, dummy_run: bool = False) -> None:
        batch = SimpleNamespace(
            idx_mapping=torch.tensor(idx_mapping), num_reqs=len(idx_mapping), num_draft_tokens=num_draft_tokens
        )
        self.execute_model_state = SimpleNamespace(input_batch=batch)

    def sample_tokens(self, grammar: Any = None) -> Output:
        self.execute_model_state = None
        self.req_states.draft_tokens += 100
        return Output()


@pytest.fixture
def runner() -> V2Runner:
    return V2Runner()


@pytest.fixture
def draft_ids(runner: V2Runner) -> DraftIds:
    made, failures = DraftIds(runner, max_steps_under_way=2), []
    made.wrap(failures.append)
    made.is_on = True
    made.failures = failures  # type: ignore[attr-defined]
    return made


def step(runner: V2Runner, idx_mapping: list[int], **more: Any) -> Output:
    runner.execute_model(idx_mapping, **more)
    return runner.sample_tokens()


def test_a_step_brings_what_it_verified_not_what_it_drafted(runner: V2Runner, draft_ids: DraftIds) -> None:
    assert getattr(step(runner, [2, 0]).get_output(), DRAFT_IDS).tolist() == [[6, 7, 8], [0, 1, 2]]
    assert getattr(step(runner, [2]).get_output(), DRAFT_IDS).tolist() == [[106, 107, 108]]


def test_steps_under_way_at_once_keep_their_own(runner: V2Runner, draft_ids: DraftIds) -> None:
    for round_ in range(5):  # more than there are buffers
        first, second = step(runner, [0]), step(runner, [1])
        begin = 200 * round_
        assert getattr(first.get_output(), DRAFT_IDS).tolist() == [[begin + i for i in range(K)]]
        assert getattr(second.get_output(), DRAFT_IDS).tolist() == [[begin + 100 + K + i for i in range(K)]]


def test_a_step_without_drafts_brings_nothing(runner: V2Runner, draft_ids: DraftIds) -> None:
    assert not hasattr(step(runner, [1], num_draft_tokens=0).get_output(), DRAFT_IDS)
    runner.execute_model([1], dummy_run=True)
    assert not hasattr(runner.sample_tokens().get_output(), DRAFT_IDS)
    draft_ids.is_on = False
    assert not hasattr(step(runner, [1]).get_output(), DRAFT_IDS)


def test_what_goes_wrong_is_told_and_the_step_goes_on(runner: V2Runner, draft_ids: DraftIds) -> None:
    del runner.req_states.draft_tokens
    runner.execute_model([1])
    runner.req_states.draft_tokens = torch.zeros(4, K, dtype=torch.int64)
    assert not hasattr(runner.sample_tokens().get_output(), DRAFT_IDS)
    assert draft_ids.failures == ["draft_ids"]  # type: ignore[attr-defined]


def test_a_runner_that_works_otherwise_is_refused() -> None:
    with pytest.raises(TypeError, match="has no req_states"):
        DraftIds(SimpleNamespace(), 2)
