"""step_packet: what it refuses, and that nothing else comes out of a bad buffer.

That it reads what was packed is in tests/kernels/events/test_pack_events.py.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.protocol.step_packet import StepPacketError, unpack

SIZE = 128 + 5 * 16


def packet(**changes: int) -> bytearray:
    """Two requests of room, one live: drafts 7, 8 of which 1 is accepted, then bonus 9; step −2."""
    head = {"magic": 0x54564548, "version": 1, "size": SIZE, "room": 2, "drafts": 2, "path": 0, "depths": 0, "m": 0, "live": 1}
    head |= {name: changes.pop(name) for name in list(changes) if name in head}
    offsets = [changes.pop(f"offset_{i}", at) for i, at in enumerate((128, 144, 160, 176, 0, 0, 0, 0))]
    raw = bytearray(SIZE)
    struct.pack_into("<9i", raw, 0, *head.values())
    struct.pack_into("<2i", raw, 36, -2, -1)
    struct.pack_into("<8i", raw, 64, *offsets)
    struct.pack_into("<2h", raw, 128, changes.pop("drafted", 2), 0)
    struct.pack_into("<2h", raw, 144, changes.pop("accepted", 1), 0)
    struct.pack_into("<2i", raw, 160, 9, 0)
    struct.pack_into("<4i", raw, 176, 7, 8, -1, -1)
    assert not changes
    return raw


def test_a_packet_by_hand() -> None:
    read = unpack(packet())
    assert (len(read), read.step) == (1, -2)
    assert read.emitted(0).tolist() == [7, 9]
    assert (read.parents, read.path, read.candidates, read.log_probs) == (None, None, None, None)


def test_arrays_outlive_the_buffer() -> None:
    raw = np.frombuffer(packet(), dtype=np.uint8).copy()
    read = unpack(raw)
    raw[:] = 0
    assert read.draft_tokens.tolist() == [[7, 8]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": 1}, "not a step's events"),
        ({"version": 2}, "version 2"),
        ({"size": SIZE - 1}, "doesn't fit"),
        ({"live": 3}, "doesn't fit"),
        ({"room": -1}, "doesn't fit"),
        ({"offset_0": 0}, "outside"),
        ({"offset_3": SIZE - 4}, "outside"),
        ({"drafts": 2**31 - 1}, "outside"),
        ({"accepted": 3}, "impossible counts"),
        ({"drafted": -1}, "impossible counts"),
        ({"drafted": 3}, "impossible counts"),
        ({"path": 2}, "outside"),
        ({"path": 2, "offset_4": 176, "offset_5": 176, "accepted": 2}, "isn't in the tree"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, int], message: str) -> None:
    with pytest.raises(StepPacketError, match=message):
        unpack(packet(**changes))


def test_too_few_bytes() -> None:
    with pytest.raises(StepPacketError, match="too few"):
        unpack(b"HEVT")


@given(st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(0, 255)), max_size=6), st.integers(0, SIZE))
def test_damaged_packets_are_read_or_refused(damage: list[tuple[int, int]], length: int) -> None:
    raw = packet()
    for at, value in damage:
        raw[at] = value
    for buffer in (raw, raw[:length]):
        try:
            read = unpack(buffer)
        except StepPacketError:
            continue
        for request in range(len(read)):
            assert len(read.emitted(request)) == read.num_accepted[request] + 1
