"""Which requests' workloads are told to the estimates, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from honed.attach.runner.fed_levels import FedLevels
from honed.attach.runner.fed_verification import FedVerification

SLOTS, K = 4, 3


class Runner:
    """As far as vLLM's V2 runner is fed."""

    def __init__(self) -> None:
        drafts = torch.zeros((SLOTS, K), dtype=torch.int64)
        self.req_states = SimpleNamespace(draft_tokens=drafts, req_id_to_index={"a": 2, "b": 0, "c": 3})
        self.adaptive_verification = SimpleNamespace(
            record_confidences=lambda *_: None, set_cost_curves=lambda *_: None, cost_tables=None
        )
        self.speculator = SimpleNamespace(observe_verification=lambda *_: None)

    def execute_model(self, scheduler_output: Any) -> Any:
        return scheduler_output


def begin(runner: Runner, request: str, workload: str) -> None:
    params = SimpleNamespace(extra_args={"honed_workload": workload})
    runner.execute_model(SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id=request, sampling_params=params)]))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """Workloads by slot, for each time they were set on the device."""
    calls: list[dict[int, int]] = []

    def note(_: FedLevels, slots: torch.Tensor, workloads: torch.Tensor) -> None:
        calls.append(dict(zip(slots.tolist(), workloads.tolist(), strict=True)))

    monkeypatch.setattr(FedLevels, "set_workloads", note)
    return calls


def test_the_device_is_told_of_workloads_only_while_it_is_fed(told: list[dict[int, int]]) -> None:
    runner, failures = Runner(), list[str]()
    fed = FedVerification(runner)
    fed.wrap(failures.append)
    begin(runner, "a", "code")
    begin(runner, "b", "prose")
    assert told == []
    fed.turn(True)
    assert told == [{2: 0, 0: 1}], "requests that began before are of their workloads, too"
    begin(runner, "c", "code")
    assert told[1:] == [{3: 0}]
    fed.turn(False)
    begin(runner, "a", "prose")
    assert len(told) == 2
    fed.turn(True)
    assert told[2:] == [{2: 1, 0: 1, 3: 0}]
    assert failures == []


def test_nothing_is_told_where_no_request_has_begun(told: list[dict[int, int]]) -> None:
    FedVerification(Runner()).turn(True)
    assert told == []
