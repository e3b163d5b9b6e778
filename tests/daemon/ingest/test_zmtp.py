"""Bytes of a ZeroMQ peer become messages, however they are cut, and a peer that breaks a rule is told apart."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.ingest.zmtp import COMMAND, GREETING, MORE, READY, Zmtp, ZmtpError, frame

LIMIT = 1000


@given(
    messages=st.lists(st.binary(max_size=LIMIT), max_size=5),
    cuts=st.lists(st.integers(0, 3000), max_size=8),
)
def test_messages_arrive_however_the_bytes_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    data = GREETING + READY + b"".join(map(frame, messages))
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    reader, found, begin = Zmtp(LIMIT), [], 0
    for end in ends:
        found += reader.receive(data[begin:end])
        begin = end
    assert found == messages
    assert reader.is_ready
    assert reader.num_bytes == 0


@pytest.mark.fault("messages that never end")
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n" + b"x" * 64, "not a greeting"),
        (GREETING.replace(b"NULL", b"PLAI"), "not a greeting"),
        (GREETING + frame(b"x"), "before the handshake"),
        (GREETING + READY + frame(b"x", MORE), "several parts"),
        (GREETING + READY + frame(b"x" * (LIMIT + 1)), "at most 1000"),
        (GREETING + READY + b"\x02" + b"\xff" * 8, "at most 1000"),
        (GREETING + READY + frame(b"x", 8), "unknown flag"),
        (GREETING + frame(b"\x05ERROR\x00", COMMAND), "reports an error"),
    ],
)
def test_a_peer_that_breaks_a_rule_is_refused_at_the_first_byte(data: bytes, why: str) -> None:
    with pytest.raises(ZmtpError, match=why):
        list(Zmtp(LIMIT).receive(data))


@given(data=st.binary(max_size=300), is_introduced=st.booleans())
def test_any_bytes_are_messages_or_an_error_and_few_are_held(data: bytes, is_introduced: bool) -> None:
    reader = Zmtp(LIMIT)
    with contextlib.suppress(ZmtpError):
        for _ in range(20):
            list(reader.receive((GREETING + READY) * is_introduced + data))
            assert reader.num_bytes <= LIMIT + 9
