"""A swap is staged, applied and answered once, whatever goes wrong on the way."""

from __future__ import annotations

from typing import Any

import pytest

from honed.adapt.protocol import wire
from honed.attach.engine.commands import CommandRunner
from honed.attach.engine.guard import NoAnswer


class Ranks:
    """Workers, as the engine's thread sees them through `collective_rpc`."""

    def __init__(self, staged: list[list[str]], fail: str = "") -> None:
        self.staged = staged
        self.fail, self.failure = fail, RuntimeError("rank 1\nfell over")
        self.calls: list[str] = []
        self.last: tuple[str, tuple[Any, ...]] = "", ()
        self.applied: list[tuple[str, bool]] = []
        self.wanted: list[tuple[str, str, str]] = []
        self.on_stage = ["staging", "staging"]
        self.steps = (41.0, 41.0)
        self.num_sent = self.num_hashed = self.most_waiting = 0
        """Of the ten tensors of a checksum; the first rank hashes one a poll, and has room for three."""

    def rpc(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(method)
        self.last = method, args
        if method == self.fail:
            raise self.failure
        if method == "honed_stage":
            self.wanted = args[0]
            return list(self.on_stage)
        if method == "honed_staged":
            return self.staged.pop(0) if len(self.staged) > 1 else self.staged[0]
        if method == "honed_apply":
            self.applied.append(args)
            return [{"copy_ms": 1.0, "step": self.steps[0]}, {"copy_ms": 3.0, "step": self.steps[1]}]
        if method == "honed_begin_checksum":
            return [None, None]
        if method == "honed_checksum":
            (part,) = args
            if part >= 0:
                assert part == self.num_sent
                self.num_sent += 1
            else:
                self.num_hashed = min(self.num_hashed + 1, self.num_sent)
            self.most_waiting = max(self.most_waiting, self.num_sent - self.num_hashed)
            has_room = self.num_sent < 10 and self.num_sent - self.num_hashed < 3
            return [("sum" if self.num_hashed == 10 else "", has_room, 10), ("sum", self.num_sent < 10, 10)]
        raise AssertionError(method)


RELEASE = ("honed_stage", ([],))
"""The call that frees what is staged."""


class Harness:
    def __init__(self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("honed.attach.engine.commands.POLL_S", 0.0)
        monkeypatch.setattr("honed.attach.engine.commands.BUSY_POLL_S", 60.0)
        self.is_busy = False
        self.ranks = ranks
        self.results: list[wire.CommandResult] = []
        self.swapped: list[tuple[str, bool]] = []
        self.lost: list[CommandRunner] = []
        self.runner = CommandRunner(
            ("e", "b"),
            ranks.rpc,
            self.results.append,
            lambda *a: self.swapped.append(a),
            lambda: self.lost.append(self.runner),
            lambda: None,
            lambda: self.is_busy,
        )

    def swap(self, command_id: str = "1", version: str = "v2", *, drops_cache: bool = False, **more: Any) -> None:
        weights = wire.DrafterWeights(version=version, path="/x")
        self.runner.put(wire.SwapCommand(command_id=command_id, weights=weights, drops_cache=drops_cache, **more))

    def run(self, times: int = 10) -> None:
        for _ in range(times):
            self.runner.run()


@pytest.mark.parametrize("steps_before", [0, 1])
def test_an_engine_that_sleeps_takes_no_weights(monkeypatch: pytest.MonkeyPatch, steps_before: int) -> None:
    """Whether the command came before it fell asleep or afterwards."""
    harness = Harness(Ranks([["staging", "staging"], ["", ""]]), monkeypatch)
    harness.swap()
    harness.run(steps_before)
    harness.runner.is_asleep = True
    harness.run()
    assert harness.ranks.applied == []
    (refused,) = harness.results
    assert (refused.ok, refused.detail) == (False, {"asleep": "1"})
    assert "wake it up" in refused.error
    assert not harness.runner.is_pending
    assert harness.ranks.last == (RELEASE if steps_before else ("", ()))
    harness.runner.is_asleep = False
    harness.swap("2")
    harness.run()
    assert [result.ok for result in harness.results] == [False, True]


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
    assert len(harness.lost) == (fail == "honed_apply"), "half of the weights may be new, or those of some ranks"
    assert harness.ranks.last == RELEASE


@pytest.mark.fault("a hung worker that hung the engine for good")
@pytest.mark.parametrize("hung", ["honed_stage", "honed_staged", "honed_apply", "honed_checksum"])
def test_workers_that_hang_end_the_engine_and_no_command(hung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["", ""]], hung), monkeypatch)
    harness.ranks.failure = NoAnswer("no answer")
    harness.swap() if hung != "honed_checksum" else harness.runner.put(wire.ChecksumCommand(command_id="1"))
    with pytest.raises(NoAnswer):
        harness.run()
    assert harness.results == []
    assert harness.lost == []


def test_workers_that_hang_on_the_way_back_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("honed.attach.engine.commands.time.monotonic", lambda: now[0])
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    turn(harness, "1", "v2", "v1", "v1", lease_s=60.0)
    harness.run()
    harness.ranks.fail, harness.ranks.failure = "honed_apply", NoAnswer("no answer")
    now[0] += 61.0
    with pytest.raises(NoAnswer):
        harness.run()


def test_from_foreign_weights_that_are_overwritten_by_half_honed_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["", ""]], "honed_apply"), monkeypatch)
    harness.runner.give_way()
    harness.swap("1", takes_over=True)
    harness.run()
    harness.ranks.fail = ""
    harness.swap("2")  # the daemon restores a version of its own
    harness.run()
    assert [result.ok for result in harness.results] == [False, True]


def test_a_way_back_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("honed.attach.engine.commands.time.monotonic", lambda: now[0])
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    turn(harness, "1", "v2", "v1", "v1", lease_s=60.0)
    harness.run()
    harness.ranks.fail = "honed_apply"
    now[0] += 61.0
    harness.run()
    assert len(harness.lost) == 1
    assert harness.ranks.last == RELEASE


def test_a_rank_that_refuses_the_weights_refuses_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["", "sha256 differs"]]), monkeypatch)
    harness.swap()
    harness.run()
    assert harness.results[0].error == "sha256 differs"
    assert "honed_apply" not in harness.ranks.calls
    assert harness.ranks.last == RELEASE


def test_a_command_sent_twice_is_carried_out_once_and_answered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    harness.swap()
    harness.run()
    harness.swap()
    harness.run()
    assert harness.ranks.calls.count("honed_apply") == 1
    assert len(harness.results) == 2


def test_weights_that_share_no_cache_ask_for_its_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    harness.swap(drops_cache=True)
    harness.run()
    assert harness.swapped == [("v2", True)]


def test_commands_queue_behind_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["staging", ""], ["", ""]]), monkeypatch)
    harness.swap()
    harness.runner.put(wire.ChecksumCommand(command_id="2"))
    harness.run(30)
    assert [r.command_id for r in harness.results] == ["1", "2"]
    assert harness.results[1].detail == {"sha256": "sum", "rank0": "sum", "rank1": "sum"}


def test_a_checksum_takes_in_no_more_than_is_hashed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow rank holds all of them: what one takes in all take in, since they join their parts."""
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    harness.runner.put(wire.ChecksumCommand(command_id="1"))
    harness.run(3)
    assert harness.runner.is_pending
    assert harness.ranks.num_sent < 10
    harness.run(20)
    assert harness.ranks.most_waiting == 3
    assert not harness.runner.is_pending
    assert [result.ok for result in harness.results] == [True]


def turn(
    harness: Harness, command_id: str, version: str, beside: str, home: str, lease_s: float = 60.0, drops_cache: bool = False
) -> None:
    weights = wire.DrafterWeights(version=beside, path="/y")
    turns = wire.Turns(beside=weights, home_version=home, lease_s=lease_s)
    harness.swap(command_id, version, drops_cache=drops_cache, turns=turns)


def test_versions_that_take_turns_are_staged_together_and_held(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    turn(harness, "1", "v2", "v1", "v1")
    harness.run()
    assert harness.ranks.wanted == [("v2", "/x", ""), ("v1", "/y", "")]
    harness.ranks.on_stage = ["", ""]  # both are held now
    turn(harness, "2", "v1", "v2", "v1")
    harness.runner.run()
    assert harness.swapped == [("v2", False), ("v1", False)]
    harness.swap("3", version="v2")
    harness.run()
    assert harness.ranks.applied == [("v2", True), ("v1", True), ("v2", False)]
    assert all(result.ok for result in harness.results)


def test_versions_that_take_turns_are_held_when_a_turn_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way home needs them."""
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    turn(harness, "1", "v2", "v1", "v1")
    harness.run()
    harness.ranks.fail = "honed_staged"
    turn(harness, "2", "v1", "v2", "v1")
    harness.run()
    assert [result.ok for result in harness.results] == [True, False]
    assert harness.ranks.wanted == [("v1", "/x", ""), ("v2", "/y", "")]


def test_a_daemon_that_falls_silent_leaves_the_home_version(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("honed.attach.engine.commands.time.monotonic", lambda: now[0])
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    turn(harness, "1", "v2", "v1", "v1", lease_s=60.0)
    harness.run()
    assert not harness.runner.is_pending
    now[0] += 61.0
    assert harness.runner.is_pending  # which has the engine woken, should it be idle
    harness.run()
    assert harness.swapped == [("v2", False), ("v1", False)]
    assert harness.ranks.applied[-1] == ("v1", False)
    assert not harness.runner.is_pending


def test_a_daemon_that_falls_silent_in_the_home_version_s_turn_leaves_no_weights_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the other version's turns had a lease: the device's memory stayed taken for good."""
    now = [1000.0]
    monkeypatch.setattr("honed.attach.engine.commands.time.monotonic", lambda: now[0])
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    turn(harness, "1", "v2", "v1", "v1", lease_s=60.0)
    harness.run()
    turn(harness, "2", "v1", "v2", "v1", lease_s=60.0)
    harness.run()
    assert harness.runner.is_waiting
    now[0] += 61.0
    assert harness.runner.is_pending
    harness.run()
    assert harness.ranks.wanted == [], "nothing is held"
    assert harness.swapped == [("v2", False), ("v1", False)], "it has served since"
    assert not harness.runner.is_waiting


def test_a_lease_that_ends_while_the_publisher_s_thread_asks_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread ended it between two reads, and the publisher's thread failed."""
    now = [1000.0]
    monkeypatch.setattr("honed.attach.engine.commands.time.monotonic", lambda: now[0])
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    turn(harness, "1", "v2", "v1", "v1", lease_s=60.0)
    harness.run()
    now[0] += 61.0

    class Ending(CommandRunner):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "_lease":
                self._lease = None
            return value

    assert harness.runner._lease is not None
    harness.runner.__class__ = Ending
    assert harness.runner.is_pending
    assert not harness.runner.is_pending


def test_a_lease_that_ends_in_the_engine_s_sleep_is_over_when_it_wakes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("honed.attach.engine.commands.time.monotonic", lambda: now[0])
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    turn(harness, "1", "v2", "v1", "v1", lease_s=60.0)
    harness.run()
    harness.runner.is_asleep = True
    now[0] += 61.0
    assert not harness.runner.is_pending
    harness.run()
    assert harness.swapped == [("v2", False)]
    harness.runner.is_asleep = False
    assert harness.runner.is_pending
    harness.run()
    assert harness.swapped == [("v2", False), ("v1", False)]


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_weights_of_somebody_else_are_not_overwritten(monkeypatch: pytest.MonkeyPatch, steps_before: int) -> None:
    """Neither by a swap that was asked for before, nor by the end of a lease, but by one that knows of them."""
    now = [1000.0]
    monkeypatch.setattr("honed.attach.engine.commands.time.monotonic", lambda: now[0])
    harness = Harness(Ranks([["staging", "staging"], ["", ""]]), monkeypatch)
    turn(harness, "1", "v2", "v1", "v1", lease_s=60.0)
    harness.run(steps_before)
    is_applied = steps_before == 3
    assert harness.swapped == [("v2", False)] * is_applied
    harness.runner.give_way()
    assert harness.ranks.last == (RELEASE if steps_before else ("", ())), "no memory stays taken"
    now[0] += 61.0
    harness.run()
    assert not harness.runner.is_pending
    assert harness.swapped == [("v2", False)] * is_applied
    (result,) = harness.results
    assert (result.ok, result.detail.get("foreign")) == ((True, None) if is_applied else (False, "1"))
    harness.swap("2", takes_over=True)
    harness.swap("3")
    harness.run()
    assert [result.ok for result in harness.results[1:]] == [True, True], "from then on they are honed's again"


def test_a_version_on_trial_is_on_its_lease_even_where_taking_it_in_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("honed.attach.engine.commands.time.monotonic", lambda: now[0])
    harness = Harness(Ranks([["", ""]]), monkeypatch)

    def fails(version: str, drops_cache: bool) -> None:
        raise RuntimeError(f"{version} can't be taken in")

    monkeypatch.setattr(harness.runner, "_on_swapped", fails)
    turn(harness, "1", "v2", "v1", "v1", lease_s=60.0)
    harness.run()
    assert [result.ok for result in harness.results] == [False]
    monkeypatch.setattr(harness.runner, "_on_swapped", lambda *_: None)
    now[0] += 61.0
    harness.run()
    assert [version for version, _ in harness.ranks.applied] == ["v2", "v1"]


@pytest.mark.fault("ranks that wait for the part of one that has failed")
def test_no_rank_takes_a_part_in_before_all_have_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks([["", ""]])
    ranks.fail = "honed_begin_checksum"
    harness = Harness(ranks, monkeypatch)
    harness.runner.put(wire.ChecksumCommand(command_id="1"))
    harness.runner.run()
    assert ranks.calls == ["honed_begin_checksum"]
    assert harness.results[0].error == "RuntimeError: rank 1 fell over"
    assert not harness.runner.is_pending


def test_foreign_weights_end_a_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([]), monkeypatch)
    harness.runner.put(wire.ChecksumCommand(command_id="1"))
    harness.runner.run()
    harness.runner.give_way()
    harness.run()
    (result,) = harness.results
    assert not result.ok
    assert "new weights" in result.error


@pytest.mark.parametrize("next_version", ["v1", "v2"])
def test_further_word_from_the_daemon_renews_or_ends_the_lease(next_version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("honed.attach.engine.commands.time.monotonic", lambda: now[0])
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    turn(harness, "1", "v2", "v1", "v1", lease_s=60.0)
    harness.run()
    now[0] += 50.0
    turn(harness, "2", next_version, "v1" if next_version == "v2" else "v2", "v1", lease_s=60.0)
    harness.run()
    now[0] += 50.0
    harness.run()
    assert harness.swapped[-1] == (next_version, False)


@pytest.mark.fault("a renewed lease that goes home with the other version's cache")
def test_after_a_renewal_too_going_home_drops_the_other_version_s_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("honed.attach.engine.commands.time.monotonic", lambda: now[0])
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    turn(harness, "1", "v2", "v1", "v1", drops_cache=True)
    harness.run()
    for number in range(2, 5):
        now[0] += 50.0
        turn(harness, str(number), "v2", "v1", "v1", drops_cache=False)
        harness.run()
    now[0] += 61.0
    harness.run()
    assert harness.swapped[-1] == ("v1", True)


def test_what_the_daemon_says_of_the_cache_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    harness.swap("1", drops_cache=False)
    harness.run()
    harness.swap("2", drops_cache=True)
    harness.run()
    assert harness.swapped == [("v2", False), ("v2", True)]


def test_ranks_that_swap_at_different_steps_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["", ""]]), monkeypatch)
    harness.swap("1")
    harness.run()
    assert harness.results[0].ok
    assert harness.results[0].detail["steps"] == "41 41"
    harness.ranks.steps = (57.0, 58.0)
    harness.swap("2", version="v3")
    harness.run()
    assert not harness.results[1].ok
    assert "different steps (57, 58)" in harness.results[1].error
    assert harness.swapped[-1] == ("v3", False)  # all ranks run it, whatever came between


def test_an_engine_that_serves_is_seldom_kept_waiting_for_its_workers_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Ranks([["staging", "staging"]]), monkeypatch)
    harness.swap()
    harness.run()
    asked = harness.ranks.calls.count("honed_staged")
    assert asked == 9
    harness.is_busy = True
    harness.run()
    assert harness.ranks.calls.count("honed_staged") == asked + 1
