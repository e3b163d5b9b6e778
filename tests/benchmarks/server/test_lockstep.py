"""Engines that take turns: whose turn it is, what counts of a run, and what an engine's clock says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.server import lockstep
from benchmarks.server.lockstep import Contender, Load, Lockstep, Seen
from benchmarks.server.lockstep_engine import Clock, DraftPasses, PublishersClock, Run, share_weights

NOTHING: Any = None


class Scripted(Contender):
    """Comes so far in a turn."""

    def __init__(self, name: str, pace: float, turns: list[str]) -> None:
        super().__init__(name, NOTHING, NOTHING)
        self.pace, self.turns, self.come = pace, turns, 0.0
        self.is_awake, self.times_woken, self.loads = True, 0, list[Any]()

    def ask(self, what: str, *args: object) -> object:
        if what == "go":
            self.turns.append(self.name)
            self.come = min(self.come + self.pace, 1.0)
            return Seen(self.come, self.come == 1.0, 10, 0.5, 5, 1.0)
        self.loads += args
        return self.name

    def wake(self, is_awake: bool) -> None:
        self.is_awake = is_awake
        self.times_woken += is_awake


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Lockstep]:
    with Lockstep(NOTHING, tmp_path, 0) as made:
        yield made


def test_the_turn_is_with_whoever_has_come_least_far(steps: Lockstep) -> None:
    turns: list[str] = []
    steps.contenders = {name: Scripted(name, pace, turns) for name, pace in (("slow", 0.125), ("fast", 0.25), ("other", 0.5))}
    load = Load(("a",), 1, 8)
    seen = steps.play(("slow", "fast"), load)
    assert (turns.count("slow"), turns.count("fast")) == (8, 4)
    come = {"slow": 0.0, "fast": 0.0}
    for name in turns:
        assert come[name] == min(come.values())
        come[name] = min(come[name] + (0.125 if name == "slow" else 0.25), 1.0)
    assert seen["slow"].num_tokens / seen["slow"].seconds == 20.0
    assert [steps.contenders[name].loads for name in ("slow", "fast", "other")] == [[load], [load], []]  # type: ignore[attr-defined]


def test_a_daemon_is_woken_once_in_a_second_of_its_engine(steps: Lockstep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "AWAKE_S", 0.0)
    steps.contenders = {name: Scripted(name, 0.125, []) for name in ("one", "two")}
    steps.play(("one",), Load(("a",), 1, 8))
    assert [one.times_woken for one in steps.contenders.values()] == [1, 0]  # type: ignore[attr-defined]
    assert [one.is_awake for one in steps.contenders.values()] == [False, False]  # type: ignore[attr-defined]
    steps.wake_all()
    assert [one.is_awake for one in steps.contenders.values()] == [True, True]  # type: ignore[attr-defined]


def test_the_clock_stands_still_while_somebody_else_has_a_turn() -> None:
    here, there = Pipe()
    clock, seen = Clock(), list[int]()
    publishers = PublishersClock(clock)

    def answer() -> None:
        seen.append(clock.monotonic_ns())
        time.sleep(0.1)
        seen.append(publishers.monotonic_ns())
        there.send("go")

    began_ns = clock.monotonic_ns()
    thread = threading.Thread(target=answer)
    thread.start()
    assert clock.wait(here) == "go"
    thread.join()
    assert seen[1] - seen[0] < 5e7
    assert clock.monotonic_ns() - began_ns < 5e7 < 1e8 <= time.monotonic_ns() - began_ns
    assert publishers.monotonic() - time.monotonic() == pytest.approx(0.0, abs=0.05)
    assert clock.time() == pytest.approx(time.time(), abs=0.05)
    before_ns = clock.monotonic_ns()
    time.sleep(0.01)
    assert clock.monotonic_ns() - before_ns >= 1e7


class Engine:
    """Gives every request two tokens a step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.asked: list[int] = []
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=_executor(SimpleNamespace())))

    def add_request(self, name: str, prompt: str, params: Any) -> None:
        self.left[name] = params.max_tokens
        self.asked.append(params.max_tokens)

    def step(self) -> list[Any]:
        outputs = []
        for name, left in list(self.left.items()):
            came = min(left, 2)
            self.left[name] -= came
            if not self.left[name]:
                del self.left[name]
            tokens = SimpleNamespace(token_ids=[1] * came)
            outputs.append(SimpleNamespace(request_id=name, outputs=[tokens], finished=name not in self.left))
        return outputs

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.left.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)


def _executor(runner: Any) -> Any:
    return SimpleNamespace(driver_worker=SimpleNamespace(worker=SimpleNamespace(model_runner=runner)))


def test_only_what_is_given_while_all_places_are_taken_counts() -> None:
    engine = Engine()
    run = Run(engine, DraftPasses(engine), Load(tuple("abcdef"), 4, 8))
    seen = run.go(60.0)
    assert engine.asked == [2, 4, 6, 8, 8, 8]  # the first of each place are staggered
    # The first of them ends in step 1, which gives all of them a token; the third, in step 3, finds no prompt to go on with.
    assert (seen.is_over, seen.num_steps, seen.num_tokens) == (True, 2, 16)
    assert seen.progress == pytest.approx((8 + 16) / 36)
    assert not engine.has_unfinished_requests()
    assert seen.token_ms > 0.0
    assert seen.draft_ms == 0.0


def test_a_run_stops_when_its_slice_is_over() -> None:
    engine = Engine()
    run = Run(engine, DraftPasses(engine), Load(("a", "b"), 1, 8))
    seen = run.go(1e-9)
    assert not seen.is_over
    assert seen.progress == 2 / 16
    assert run.go(60.0).is_over


def test_draft_passes_are_timed() -> None:
    engine = Engine()
    drafter = SimpleNamespace(propose=lambda *args, **kwargs: (args, kwargs))
    engine.engine_core.engine_core.model_executor = _executor(SimpleNamespace(drafter=drafter))
    passes = DraftPasses(engine)
    assert drafter.propose(1, k=2) == ((1,), {"k": 2})
    assert len(passes.seconds) == 1


class Block(torch.nn.Module):
    """A layer with weights, and one that only knows its engine."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(size, size)
        self.attention = torch.nn.Identity()


def test_weights_are_in_memory_once_and_what_has_none_stays_an_engines_own() -> None:
    source, model = torch.nn.Sequential(Block(2), Block(2)), torch.nn.Sequential(Block(2), Block(2))
    attention = model[1].attention
    share_weights(source, model)
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in source.parameters()]
    assert model[1].linear is source[1].linear
    assert model[1].attention is attention is not source[1].attention


def test_weights_that_another_model_lacks_are_said() -> None:
    with pytest.raises(RuntimeError, match=r"not shared: 1\.linear\.weight"):
        share_weights(torch.nn.Sequential(Block(2)), torch.nn.Sequential(Block(2), Block(2)))
