"""What a V2 model runner keeps to itself of the drafts it verifies, brought along with the tokens it sampled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from honed.attach import worker as workers
from honed.attach.events.step_log import DRAFT_IDS, NUM_VERIFIED
from honed.attach.runner.verified_drafts import VerifiedDrafts

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
        self.adaptive_verification: Any = None
        self.execute_model_state: Any = None
        self.num_logits = torch.zeros(5, dtype=torch.int32)

    def execute_model(self, scheduler_output: Any, dummy_run: bool = False) -> None:
        rows = scheduler_output.rows
        self.num_logits[1 : len(rows) + 1] = torch.tensor(scheduler_output.verified).add(1).cumsum(0)
        batch = SimpleNamespace(
            idx_mapping=torch.tensor(rows), num_reqs=len(rows), cu_num_logits=self.num_logits[: len(rows) + 1]
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
def drafts(runner: V2Runner) -> VerifiedDrafts:
    made, failures = VerifiedDrafts(runner, max_steps_under_way=2), []
    made.wrap(failures.append)
    made.are_ids_wanted = True
    made.failures = failures  # type: ignore[attr-defined]
    return made


def scheduled(rows: list[int], num_drafts: int = K, verified: list[int] | None = None) -> Any:
    tokens = {str(row): [-1] * num_drafts for row in rows} if num_drafts else {}
    return SimpleNamespace(rows=rows, scheduled_spec_decode_tokens=tokens, verified=verified or [num_drafts] * len(rows))


def step(runner: V2Runner, rows: list[int], **more: Any) -> Output:
    runner.execute_model(scheduled(rows, **more))
    return runner.sample_tokens()


def test_a_step_brings_what_it_verified_not_what_it_drafted(runner: V2Runner, drafts: VerifiedDrafts) -> None:
    assert getattr(step(runner, [2, 0]).get_output(), DRAFT_IDS).tolist() == [[6, 7, 8], [0, 1, 2]]
    assert getattr(step(runner, [2]).get_output(), DRAFT_IDS).tolist() == [[106, 107, 108]]


def test_steps_under_way_at_once_keep_their_own(runner: V2Runner, drafts: VerifiedDrafts) -> None:
    runner.adaptive_verification = object()
    for round_ in range(5):  # more than there are buffers
        first, second = step(runner, [0], verified=[round_ % K]), step(runner, [1], verified=[K])
        begin = 200 * round_
        assert getattr(first.get_output(), DRAFT_IDS).tolist() == [[begin + i for i in range(K)]]
        assert getattr(second.get_output(), DRAFT_IDS).tolist() == [[begin + 100 + K + i for i in range(K)]]
        assert getattr(first.get_output(), NUM_VERIFIED).tolist() == [round_ % K]
        assert getattr(second.get_output(), NUM_VERIFIED).tolist() == [K]


@pytest.mark.parametrize("are_ids_wanted", [False, True])
def test_where_vllm_trims_on_the_device_the_number_that_is_left_is_brought(
    runner: V2Runner, drafts: VerifiedDrafts, are_ids_wanted: bool
) -> None:
    drafts.are_ids_wanted = are_ids_wanted
    assert not hasattr(step(runner, [3, 1]).get_output(), NUM_VERIFIED)
    runner.adaptive_verification = object()
    for verified in ([2, 0], [0, 0]):  # in the second step the batch itself has no drafts left
        output = step(runner, [3, 1], verified=verified).get_output()
        assert getattr(output, NUM_VERIFIED).tolist() == verified
        assert hasattr(output, DRAFT_IDS) == are_ids_wanted


def test_a_step_without_drafts_brings_nothing(runner: V2Runner, drafts: VerifiedDrafts) -> None:
    runner.adaptive_verification = object()
    assert not vars(step(runner, [1], num_drafts=0).get_output())
    runner.execute_model(scheduled([1]), dummy_run=True)
    assert not vars(runner.sample_tokens().get_output())
    runner.adaptive_verification, drafts.are_ids_wanted = None, False
    assert not vars(step(runner, [1]).get_output())


def test_what_goes_wrong_is_told_and_the_step_goes_on(runner: V2Runner, drafts: VerifiedDrafts) -> None:
    del runner.req_states.draft_tokens
    runner.execute_model(scheduled([1]))
    runner.req_states.draft_tokens = torch.zeros(4, K, dtype=torch.int64)
    assert not hasattr(runner.sample_tokens().get_output(), DRAFT_IDS)
    assert drafts.failures == ["verified_drafts"]  # type: ignore[attr-defined]


def test_a_runner_that_works_otherwise_is_refused() -> None:
    with pytest.raises(TypeError, match="has no req_states"):
        VerifiedDrafts(SimpleNamespace(), 2)


@pytest.mark.parametrize(("stages", "teller"), [(1, 0), (2, 4)])
def test_drafts_are_gathered_on_the_rank_whose_output_the_scheduler_reads(
    stages: int, teller: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the tensor-parallel ranks of the last stage."""
    wrapped = SimpleNamespace(wrap=lambda on_error: None)
    monkeypatch.setattr(workers, "VerifiedDrafts", lambda *given: wrapped)
    parallel = SimpleNamespace(world_size=4 * stages, tensor_parallel_size=4, prefill_context_parallel_size=1)
    config = SimpleNamespace(use_v2_model_runner=True, parallel_config=parallel, max_concurrent_batches=2)
    made = [
        workers._verified_drafts(SimpleNamespace(rank=rank, vllm_config=config, model_runner=None), workers._Errors())
        for rank in range(4 * stages)
    ]
    assert [rank for rank, one in enumerate(made) if one is not None] == [teller]
