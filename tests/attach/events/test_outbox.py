"""Nothing is lost unseen, nothing is sent out of order, nothing that was sent is dropped."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from honed.attach.events.outbox import Losses, Outbox

WINDOW = 4


def encode_gap(first_seq: int, seq: int, lost: Losses) -> bytes:
    return f"gap {first_seq} {seq} {lost.rounds}".encode()


def make(max_bytes: int = 100) -> Outbox:
    return Outbox(max_bytes, WINDOW, encode_gap)


def add(box: Outbox, rounds: int = 1, size: int = 20) -> None:
    box.add(f"{box.last_seq + 1}:{rounds}".ljust(size).encode(), Losses(rounds=rounds))


def drain(box: Outbox) -> list[bytes]:
    frames = []
    while (frame := box.next_frame()) is not None:
        box.sent(frame)
        frames.append(frame)
    return frames


def test_batches_go_out_in_order_and_only_within_the_window() -> None:
    box = make(max_bytes=10_000)
    for _ in range(6):
        add(box)
    assert [f.split(b":")[0] for f in drain(box)] == [b"1", b"2", b"3", b"4"]
    box.acknowledge(2)
    assert [f.split(b":")[0] for f in drain(box)] == [b"5", b"6"]


def test_a_rewind_sends_what_is_not_acknowledged_again() -> None:
    box = make(max_bytes=10_000)
    for _ in range(3):
        add(box)
    first = drain(box)
    box.acknowledge(1)
    box.rewind()
    assert drain(box) == first[1:]


def test_the_cap_drops_the_oldest_unsent_and_one_gap_stands_for_them() -> None:
    box = make(max_bytes=60)
    for rounds in (1, 2, 4, 8, 16):
        add(box, rounds)
    assert box.lost == Losses(rounds=3, batches=2)
    frames = drain(box)
    assert frames[0] == b"gap 1 2 3"
    assert [f.split(b":")[0] for f in frames[1:]] == [b"3", b"4", b"5"]


def test_what_was_sent_is_never_dropped() -> None:
    box = make(max_bytes=40)
    add(box)
    add(box)
    sent = drain(box)
    for _ in range(10):
        add(box)
    box.rewind()
    assert drain(box)[:2] == sent
    assert box.lost.batches == 8


def test_an_acknowledgement_of_what_was_never_sent_is_ignored() -> None:
    box = make()
    add(box)
    box.acknowledge(99)
    assert len(box) == 1


@dataclass
class Receiver:
    """The daemon's rule, and a connection that may break at any time."""

    head: int = 0
    stored_rounds: int = 0
    lost_rounds: int = 0
    on_the_wire: list[bytes] = field(default_factory=list)

    def take_all(self) -> None:
        for frame in self.on_the_wire:
            text = frame.decode().strip()
            if text.startswith("gap"):
                _, first, seq, lost = text.split()
                first_seq, number, rounds = int(first), int(seq), 0
                if first_seq <= self.head + 1 and number > self.head:
                    self.lost_rounds = max(self.lost_rounds, int(lost))
            else:
                number, rounds = map(int, text.split(":"))
                first_seq = number
            if number > self.head and first_seq <= self.head + 1:
                self.head, self.stored_rounds = number, self.stored_rounds + rounds
        self.on_the_wire.clear()


@given(st.lists(st.sampled_from(["add", "send", "take", "ack", "break"]), max_size=80))
def test_stored_plus_lost_is_all_there_was(script: list[str]) -> None:
    box, receiver, produced = make(max_bytes=70), Receiver(), 0
    for action in [*script, "break", *["send", "take", "ack"] * (2 + box.last_seq + len(script))]:
        if action == "add":
            add(box)
            produced += 1
        elif action == "send" and (frame := box.next_frame()) is not None:
            box.sent(frame)
            receiver.on_the_wire.append(frame)
        elif action == "take":
            receiver.take_all()
        elif action == "ack":
            box.acknowledge(receiver.head)
        elif action == "break":
            receiver.on_the_wire.clear()
            box.acknowledge(receiver.head)
            box.rewind()
    assert receiver.stored_rounds + receiver.lost_rounds == produced
    assert receiver.lost_rounds == box.lost.rounds
    assert len(box) == 0
