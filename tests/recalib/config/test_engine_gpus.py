"""The trainer and `honed doctor` know the GPUs of the engines on this machine, and what these will still want there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from honed.attach.engine.busy_flag import BusyFlag, tell_start
from honed.recalib.config.engine_gpus import GIVEN_UP_S, AwaitedEngines, EngineGpus, engine_gpus, owner_of, reserve_on
from tests.shut_out import shut_out

GIB = 1 << 30
A, B = "6d9c4b9e-8f6b-4f0e-9a53-0d1e2f3a4b5c", "00000000-8f6b-4f0e-9a53-0d1e2f3a4b5c"


def test_what_an_engine_tells_is_read_whether_it_lives_or_not(tmp_path: Path) -> None:
    engine = BusyFlag(tmp_path / "chat-0" / "busy")
    assert engine_gpus(tmp_path) == [EngineGpus("chat-0", True, None)]
    engine.tell_gpus({A: 4 * GIB, B: GIB})
    assert engine_gpus(tmp_path) == [EngineGpus("chat-0", True, {A: 4 * GIB, B: GIB})]
    engine.tell_gpus({A: 2 * GIB})
    engine.set(True)
    engine.close()
    assert engine_gpus(tmp_path) == [EngineGpus("chat-0", False, {A: 2 * GIB})]
    again = BusyFlag(tmp_path / "chat-0" / "busy")
    assert engine_gpus(tmp_path) == [EngineGpus("chat-0", True, None)]
    again.close()


def test_engines_that_this_user_may_not_see_are_left_out(tmp_path: Path) -> None:
    engine = BusyFlag(tmp_path / "engines" / "chat-0" / "busy")
    with shut_out(tmp_path / "engines"):
        assert engine_gpus(tmp_path / "engines") == []
    engine.close()


def test_an_engine_that_stays_down_is_given_up(tmp_path: Path) -> None:
    """One that got another name would keep trainings from the GPU for ever."""
    engine, now_s = BusyFlag(tmp_path / "old" / "busy"), 0.0
    awaited = AwaitedEngines(tmp_path, ["*"], lambda: now_s)
    now_s = 9 * GIVEN_UP_S
    assert [one.is_alive for one in awaited()] == [True], "however long it has been up"
    engine.close()
    assert [one.is_alive for one in awaited()] == [False]
    now_s += GIVEN_UP_S - 1.0
    assert [one.engine_id for one in awaited()] == ["old"]
    now_s += 2.0
    assert awaited() == []
    again = BusyFlag(tmp_path / "old" / "busy")
    assert [one.is_alive for one in awaited()] == [True]
    again.close()
    assert [one.is_alive for one in awaited()] == [False]


def test_an_engine_that_is_starting_is_awaited_anew_with_the_gpus_that_it_had(tmp_path: Path) -> None:
    pages, now_s = {name: tmp_path / name / "busy" for name in ("old", "new")}, 0.0
    awaited = AwaitedEngines(tmp_path, ["*"], lambda: now_s)
    engine = BusyFlag(pages["old"])
    engine.tell_gpus({A: GIB})
    engine.close()
    awaited()
    now_s += GIVEN_UP_S
    assert awaited() == []
    for page in pages.values():
        tell_start(page)
    assert awaited() == [EngineGpus("new", False, None), EngineGpus("old", False, {A: GIB})]
    started = [BusyFlag(page) for page in pages.values()]
    assert [one.is_alive for one in awaited()] == [True, True]
    for one in started:
        one.close()


def test_an_engine_that_gets_its_page_late_tells_its_gpus_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chat-0").touch()  # in the folder's way
    engine = BusyFlag(tmp_path / "chat-0" / "busy")
    engine.tell_gpus({A: GIB})
    assert (engine.problem != "", engine_gpus(tmp_path)) == (True, [])
    (tmp_path / "chat-0").unlink()
    monkeypatch.setattr(engine, "_retry_s", 0.0)
    engine.make()
    assert engine_gpus(tmp_path) == [EngineGpus("chat-0", True, {A: GIB})]
    engine.close()


def test_what_is_no_page_is_left_out(tmp_path: Path) -> None:
    BusyFlag(tmp_path / "elsewhere").close()
    for name in ("link", "folder", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "link" / "busy").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder" / "busy").mkdir()
    os.close(os.open(tmp_path / "empty" / "busy", os.O_CREAT))
    assert engine_gpus(tmp_path) == [EngineGpus("empty", False, None)]
    assert engine_gpus(tmp_path / "none") == []


def test_engines_of_other_runtime_directories_are_left_their_memory(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours" / "engines", tmp_path / "other" / "engines"
    engines = [BusyFlag(folder / "chat-0" / "busy") for folder in (ours, other)]
    for engine in engines:
        engine.tell_gpus({A: 2 * GIB})
    found = AwaitedEngines(ours, ["*"], lambda: 0.0, [other])()
    assert [one.engine_id for one in found] == ["chat-0", f"chat-0 of {other.parent}"]
    assert reserve_on(A, found) == 4 * GIB
    engines[1].close()
    assert owner_of(A, engine_gpus(ours, ["*"], [other])) == f"chat-0 of {other.parent}"
    engines[0].close()


def test_the_reserves_of_all_living_engines_on_a_gpu_add_up() -> None:
    engines = [
        EngineGpus("a", True, {A: 4 * GIB, B: GIB}),
        EngineGpus("b", True, {A: 2 * GIB}),
        EngineGpus("down", False, {A: 8 * GIB}),
        EngineGpus("cpu", True, {}),
        EngineGpus("old", True, None),
    ]
    assert reserve_on(A, engines) == 6 * GIB
    assert reserve_on(B, engines) == GIB
    assert reserve_on("other", engines) == 0
    assert reserve_on("", engines) == 6 * GIB, "it may be any of them"


def test_an_engine_that_is_down_owns_the_gpus_that_it_had() -> None:
    def owner(gpu: str, is_alive: bool, reserves: dict[str, int] | None) -> str:
        return owner_of(gpu, [EngineGpus("other", True, {A: GIB}), EngineGpus("e", is_alive, reserves)])

    assert [owner(A, is_alive, {A: 0}) for is_alive in (True, False)] == ["", "e"]
    assert [owner(A, False, reserves) for reserves in ({B: GIB}, {}, None)] == ["", "", "e"]
    assert [owner("", False, reserves) for reserves in ({B: GIB}, {}, None)] == ["e", "", "e"], "it may be any of them"
