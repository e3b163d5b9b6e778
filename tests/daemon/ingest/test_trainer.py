"""The trainer that was heard last is the one that is told something."""

from __future__ import annotations

from typing import Any

import pytest

from honed.adapt.protocol import wire
from honed.daemon.ingest.trainer import Trainer


class Link:
    """A trainer's connection, and what was sent on it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sent: list[tuple[bytes, Any]] = []
        self.trainer = Trainer(lambda *sent: self.sent.append(sent), "daemon", 10.0, lambda: self.now_s)


@pytest.fixture
def link() -> Link:
    return Link()


HELLO = wire.TrainerHello(trainer_id="trainer-0", device="cpu")


def status(**changes: Any) -> wire.TrainerStatus:
    return wire.TrainerStatus(**({"trainer_id": "trainer-0", "state": "training", "operation_id": "op-1"} | changes))


def test_an_introduction_is_answered_with_the_pause_and_a_welcome(link: Link) -> None:
    assert not link.trainer.is_connected
    link.trainer.pause(True)
    assert link.sent == [], "nobody is there to be told"
    link.trainer.hear(b"one", HELLO)
    (_, pause), (peer, welcome) = link.sent
    assert (peer, pause.paused, welcome.daemon_id) == (b"one", True, "daemon")
    assert link.trainer.is_connected


def test_a_silent_trainer_is_not_connected(link: Link) -> None:
    link.trainer.hear(b"one", HELLO)
    link.now_s = 10.5
    assert (link.trainer.is_connected, link.trainer.silent_s, link.trainer.view()) == (False, 10.5, None)


def test_sums_grow_where_an_operations_figures_begin_anew(link: Link) -> None:
    for said in (status(steps=5), status(steps=8), status(steps=4, operation_id="op-2")):
        link.trainer.hear(b"one", said)
    assert link.trainer.sums["steps"] == 8 + 4


def test_an_operation_that_a_new_process_resumes_isnt_counted_from_its_beginning(link: Link) -> None:
    link.trainer.hear(b"one", status(steps=500))
    link.trainer.hear(b"two", wire.TrainerHello(trainer_id="t", device="cpu"))
    for steps in (480, 600):
        link.trainer.hear(b"two", status(steps=steps))
    assert link.trainer.sums["steps"] == 500 + 120


def test_what_it_reports_between_operations_is_counted_once(link: Link) -> None:
    """Its idle reports still have the operation's pre-emptions, and come first after its restart amid an operation."""
    idle = status(state="idle", operation_id="", preemptions=57, preemption_delays_s=[0.01])
    for said in (status(steps=400, preemptions=57), idle, HELLO, status(state="idle", operation_id=""), status(steps=390)):
        link.trainer.hear(b"one", said)
    link.trainer.hear(b"one", status(steps=500))
    assert (link.trainer.sums["steps"], link.trainer.sums["preemptions"]) == (400 + 110, 57)
    assert len(link.trainer.view()["preemption_delays_s"]) == 1  # type: ignore[index]


def test_why_it_is_not_on_the_gpu_is_shown(link: Link) -> None:
    link.trainer.hear(b"one", HELLO)
    assert link.trainer.view()["device_reason"] == ""  # type: ignore[index]
    link.trainer.hear(b"one", status(device="cpu", device_reason="chat-0 isn't running"))
    assert link.trainer.view()["device_reason"] == "chat-0 isn't running"  # type: ignore[index]


def test_a_message_goes_to_the_one_that_was_heard_last(link: Link) -> None:
    link.trainer.hear(b"one", status())
    link.trainer.hear(b"two", status())
    link.trainer.tell(wire.TrainCancel(operation_id="op-1", reason=""))
    assert [peer for peer, _ in link.sent] == [b"two"]
