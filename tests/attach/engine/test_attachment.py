"""The engine thread's side as a whole, on a scheduler that is made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from honed.attach.contract.compatibility import Findings
from honed.attach.engine.attachment import Attachment
from honed.attach.engine.environment import AttachSettings
from honed.attach.events.batch_builder import BatchBuilder
from honed.attach.events.publisher import Publisher
from honed.attach.events.step_log import Step

K = 3


@pytest.fixture
def scheduler() -> Any:
    return SimpleNamespace(num_spec_tokens=K, requests={}, running=[], get_request_counts=lambda: (1, 0))


@pytest.fixture
def attached(scheduler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attachment]:
    """An attachment that only observes; nobody takes its log."""
    monkeypatch.setattr(Publisher, "start", lambda self: None)
    monkeypatch.setattr("honed.attach.engine.engine_hook.current", lambda: None)
    config = SimpleNamespace(
        use_v2_model_runner=False,
        load_config=None,
        model_config=SimpleNamespace(model="/models/target", served_model_name="m", max_model_len=100),
        scheduler_config=SimpleNamespace(max_num_seqs=4, async_scheduling=True),
        speculative_config=SimpleNamespace(method="ngram", num_speculative_tokens=K, draft_model_config=None),
        parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1, worker_extension_cls=""),
    )
    made = Attachment(scheduler, config, AttachSettings(tmp_path, "e-0"), Findings(("events",), ()))
    yield made
    made._busy.close()


def test_errors_of_the_workers_are_told_with_those_of_the_engine(attached: Attachment) -> None:
    attached._workers.num_errors, attached.errors.count = 3, 1
    assert attached._status(0).errors == 4


@pytest.mark.fault("a disk that hangs while an engine says hello")
def test_a_hello_looks_at_no_file(attached: Attachment, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said at each connection, and what blocks it lets the log grow."""

    def hangs(*_: Any) -> Any:
        raise AssertionError("it may hang")

    for name in ("folder_of", "draft_folder", "version"):
        monkeypatch.setattr(f"honed.attach.engine.introduction.{name}", hangs)
    hello = attached._hello()
    assert (hello.target_path, hello.draft_model, hello.model_name) == ("/models/target", "", "m")
    assert hello.honed_version


def a_request(**fields: Any) -> Any:
    return SimpleNamespace(
        request_id="r",
        num_tokens=40,
        lora_request=None,
        sampling_params=None,
        use_structured_output=False,
        status=SimpleNamespace(name="PREEMPTED"),
        **fields,
    )


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_request_that_is_preempted_again_keeps_the_rounds_that_vllm_delivers(
    attached: Attachment, scheduler: Any, is_dropped: bool
) -> None:
    """After a preemption whose tokens were dropped comes one whose tokens aren't: its round was taken from the whole batch."""
    request = scheduler.requests["r"] = a_request(drop_stale_output=True, num_stale_output_tokens=4)
    attached.request_added(request)
    attached.request_interrupted(request)
    request.drop_stale_output = is_dropped  # it has resumed meanwhile, and is preempted again
    attached.request_interrupted(request)
    output = SimpleNamespace(
        total_num_scheduled_tokens=4,
        num_scheduled_tokens={"r": 4},
        num_invalid_spec_tokens=None,
        scheduled_spec_decode_tokens={"r": [5, 6, 7]},
    )
    note = attached.before_update(output, SimpleNamespace(sampled_token_ids=[[5, 9]], req_id_to_index={"r": 0}))
    assert note is not None
    if not is_dropped:
        note(("r", 3, 1))
    attached.after_update()
    assert attached.errors.count == 0
    builder = BatchBuilder()
    for entry in (attached._log.take(), attached._log.take()):
        builder.add(entry) if isinstance(entry, Step) else builder.note(entry)  # type: ignore[arg-type]
    assert len(builder.take().rounds.step) == (0 if is_dropped else 1)


def test_an_engine_whose_sessions_all_wait_for_their_clients_is_idle(attached: Attachment, scheduler: Any) -> None:
    """At each heartbeat the publisher's thread waited for a lull of an engine that did nothing."""
    session = scheduler.requests["r"] = a_request(drop_stale_output=False, num_stale_output_tokens=0)
    attached.request_added(session)
    attached.before_schedule()
    attached.after_schedule()
    output = SimpleNamespace(
        total_num_scheduled_tokens=1,
        num_scheduled_tokens={"r": 1},
        num_invalid_spec_tokens=None,
        scheduled_spec_decode_tokens={},
    )
    attached.before_update(output, SimpleNamespace(sampled_token_ids=[[5]], req_id_to_index={"r": 0}))
    assert attached.commands._is_busy()
    session.status.name = "WAITING_FOR_STREAMING_REQ"
    attached.request_interrupted(session)
    attached.after_update()
    assert attached._model_wait.has_room(1e12)
    assert not attached.commands._is_busy()
    attached.request_added(session)
    attached.before_schedule()
    assert not attached._model_wait.has_room(0.0)
    assert attached.commands._is_busy()
    assert attached.errors.count == 0
