"""A swap is staged, applied and answered once, whatever goes wrong on the way."""

from __future__ import annotations

from typing import Any

import pytest

from honed.adapt import wire
from honed.attach.commands import CommandRunner


class Ranks:
    """Workers, as the engine's thread sees them through `collective_rpc`."""

    def __init__(self, staged: list[list[str]], fail: str = "") -> None:
        self.staged = staged
        self.fail = fail
        self.calls: list[str] = []

    def rpc(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(method)
        if method == self.fail:
            raise RuntimeError("rank 1\nfell over")
        if method == "honed_staged":
            return self.staged.pop(0) if len(self.staged) > 1 else self.staged[0]
        if method == "honed_apply":
            return [{"copy_ms": 1.0}, {"copy_ms": 3.0}]
        return ["sum", "sum"]


class Harness:
    def __init__(self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("honed.attach.commands.POLL_S", 0.0)
        self.ranks = ranks
        self.results: list[wire.CommandResult] = []
        self.swapped: list[tuple[str, bool]] = []
        self.runner = CommandRunner(
            ("e", "b"), ranks.rpc, self.results.append, lambda *a: self.swapped.append(a), lambda: None
        )

    def swap(self, command_id: str = "1", **args: str) -> None:
        self.runner.put(wire.Command(command_id=command_id, kind="swap", args={"version": "v2", "path": "/x"} | args))

    def run(self, times: int = 10) -> None:
        for _ in range(times):
            self.runner.run()


def test_a_swap_waits_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["staging", ""], ["", "staging"], ["", ""]]), monkeypatch)
    harness.swap()
    harness.run(3)
    assert "honed_apply" not in harness.ranks.calls
    harness.run()
    assert harness.swapped == [("v2", False)]
    (result,) = harness.results
    assert result.ok
    assert result.figures["copy_ms"] == 3.0
    assert result.figures["ranks"] == 2.0
    assert not harness.runner.is_pending


@pytest.mark.parametrize("fail", ["honed_stage", "honed_staged", "honed_apply"])
def test_a_failure_is_answered_in_one_line_and_ends_the_swap(fail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["", ""]], fail), monkeypatch)
    harness.swap()
    harness.run()
    (result,) = harness.results
    assert not result.ok
    assert "fell over" in result.error
    assert "\n" not in result.error
    assert harness.swapped == []
    assert not harness.runner.is_pending


def test_a_rank_that_refuses_the_weights_refuses_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["", "sha256 differs"]]), monkeypatch)
    harness.swap()
    harness.run()
    assert harness.results[0].error == "sha256 differs"
    assert "honed_apply" not in harness.ranks.calls


def test_a_command_sent_twice_is_carried_out_once_and_answered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    harness.swap()
    harness.run()
    harness.swap()
    harness.run()
    assert harness.ranks.calls.count("honed_apply") == 1
    assert len(harness.results) == 2


def test_scope_full_asks_for_a_cache_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    harness.swap(scope="full")
    harness.run()
    assert harness.swapped == [("v2", True)]


def test_commands_queue_behind_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["staging", ""], ["", ""]]), monkeypatch)
    harness.swap()
    harness.runner.put(wire.Command(command_id="2", kind="checksum"))
    harness.run()
    assert [r.command_id for r in harness.results] == ["1", "2"]
    assert harness.results[1].detail["sha256"] == "sum"


def test_an_unknown_command_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    harness.runner.put(wire.Command(command_id="3", kind="dance"))
    harness.run()
    assert "dance" in harness.results[0].error
