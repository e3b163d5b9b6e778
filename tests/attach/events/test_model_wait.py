"""Work that is fitted into the engine thread's lulls: never while it works, if it can be helped, and never for good."""

from __future__ import annotations

import threading
import time

from honed.attach.events.model_wait import ModelWait, Pieces


def used_to(model_wait: ModelWait, wait_s: float, turns: int = 64) -> ModelWait:
    for _ in range(turns):
        model_wait.begin()
        time.sleep(wait_s)
        model_wait.end()
    return model_wait


def test_there_is_always_room_while_nothing_runs() -> None:
    model_wait = ModelWait()
    assert model_wait.has_room(1e12)
    model_wait.begin()
    model_wait.end()
    assert not model_wait.has_room(0.0)
    model_wait.rest()
    assert model_wait.has_room(1e12)


def test_room_is_what_a_usual_lull_has_left() -> None:
    model_wait = used_to(ModelWait(), 0.004)
    assert model_wait.may_have_room(2e6)
    assert not model_wait.may_have_room(1e9)
    model_wait.begin()
    assert model_wait.has_room(1e6)
    assert not model_wait.has_room(1e9)
    deadline_s = time.monotonic() + 10.0
    while model_wait.has_room(1e6) and time.monotonic() < deadline_s:
        time.sleep(1e-3)
    assert not model_wait.has_room(1e6)  # this one lasts longer than usual: its end may be near


def test_pieces_are_done_in_waits_only() -> None:
    model_wait, is_over = used_to(ModelWait(), 0.01, turns=16), threading.Event()
    pieces, seen = Pieces(model_wait), []

    def work() -> None:
        while not is_over.is_set():
            pieces.begin(10.0)
            with pieces.one("step"):
                seen.append(model_wait._began_ns > 0)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(20):
        model_wait.begin()
        time.sleep(0.01)
        model_wait.end()
        time.sleep(0.01)
    model_wait.rest()
    is_over.set()
    thread.join(10.0)
    assert sum(seen) > 20
    assert sum(seen) >= 0.9 * len(seen)


def test_patience_ends_and_is_none_where_no_wait_would_do() -> None:
    model_wait = used_to(ModelWait(), 0.002)  # ended: the engine's thread is at work, and stays there
    pieces = Pieces(model_wait)
    began_s = time.monotonic()
    pieces.begin(0.05)
    with pieces.one("step"):
        waited_s = time.monotonic() - began_s
    assert waited_s >= 0.05
    for _ in range(12):  # it turns out to take longer than any wait
        with pieces.one("batch"):
            time.sleep(0.02)
    began_s = time.monotonic()
    pieces.begin(60.0)
    with pieces.one("batch"):
        waited_s = time.monotonic() - began_s
    assert waited_s < 30.0
