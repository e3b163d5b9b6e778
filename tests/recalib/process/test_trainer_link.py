"""A trainer in a long unit isn't silent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from honed.adapt.protocol import wire
from honed.recalib.process import trainer_link
from honed.recalib.process.trainer_link import TrainerLink

STATUS = wire.TrainerStatus(trainer_id="t", state="training", preemptions=1, preemption_delays_s=[0.01])


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Any]:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{tmp_path}/engine.sock")
    yield socket
    socket.close(0)
    context.term()


def heard(daemon: Any, for_s: float) -> list[Any]:
    found, end_s = [], time.monotonic() + for_s
    while daemon.poll(max(0, round(1000 * (end_s - time.monotonic())))):
        found.append(wire.decode_to_daemon(daemon.recv_multipart()[-1]))
    return found


@pytest.fixture
def link(daemon: Any, tmp_path: Path) -> Iterator[TrainerLink]:
    made = TrainerLink(f"ipc://{tmp_path}/engine.sock", lambda: wire.TrainerHello(trainer_id="t", device="cpu"), repeat_s=0.05)
    for _ in range(100):
        made.receive(0.05)
        if heard(daemon, 0.0):
            break
    yield made
    made.close()


@pytest.mark.fault("a trainer that is taken for lost while it saves")
def test_a_long_unit_repeats_the_last_report_and_counts_nothing_twice(daemon: Any, link: TrainerLink) -> None:
    link.send(STATUS)
    first, *repeated = heard(daemon, 0.5)  # no turn all that time
    assert first.preemption_delays_s == [0.01]
    assert len(repeated) >= 3
    assert all(isinstance(one, wire.TrainerStatus) and one.state == "training" for one in repeated)
    assert not any(one.preemption_delays_s for one in repeated)


def test_who_reports_by_itself_repeats_nothing(daemon: Any, link: TrainerLink) -> None:
    for _ in range(50):
        link.send(STATUS)
        time.sleep(0.01)
    assert all(one.preemption_delays_s for one in heard(daemon, 0.02))


def test_a_hanging_trainer_falls_silent(daemon: Any, link: TrainerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    link.send(STATUS)
    monkeypatch.setattr(trainer_link, "MOST_S", 0.0)
    time.sleep(0.1)
    heard(daemon, 0.0)
    assert not heard(daemon, 0.3)
