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
from honed.attach.events.publisher import Publisher

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
