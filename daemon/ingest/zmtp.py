"""The server's side of a ZeroMQ connection (ZMTP 3.0, mechanism NULL): bytes in, messages out. No I/O.

libzmq would do as much, but its memory and descriptors can't be bounded: it gathers the parts of a message without end, and it
aborts the process when `accept` runs out of descriptors. Here a message has one part and at most `max_message_bytes`.

Source: https://rfc.zeromq.org/spec/23/
"""

from __future__ import annotations

from collections.abc import Iterator

MECHANISM = b"NULL".ljust(20, b"\0")
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + MECHANISM + bytes(32)
"""Signature, version, mechanism, as-server, filler."""
MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame."""


class ZmtpError(ValueError):
    """The peer breaks the protocol or a limit; the text names how."""


def frame(body: bytes, flags: int = 0) -> bytes:
    """The bytes of a message, or of a command, of one part."""
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | LONG,)) + len(body).to_bytes(8) + body


READY = frame(b"\x05READY" + b"\x0bSocket-Type" + len(b"ROUTER").to_bytes(4) + b"ROUTER", COMMAND)


class Zmtp:
    """Reader of one connection. Send `GREETING` and `READY` first."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._buffer = bytearray()
        self._has_greeting = False
        self.is_ready = False
        """True once the peer's handshake is complete."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the frame that isn't complete yet."""
        return len(self._buffer)

    def receive(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that this data completes. Raises ZmtpError; the connection is of no use then."""
        self._buffer += data
        if not self._has_greeting:
            if len(self._buffer) < len(GREETING):
                return
            head = self._buffer[: len(GREETING)]
            del self._buffer[: len(GREETING)]
            if head[0] != 0xFF or not head[9] & 1 or head[10] < 3 or head[12:32] != MECHANISM:
                raise ZmtpError("not a greeting of ZMTP 3")
            self._has_greeting = True
        at = 0
        try:
            while (found := self._frame_at(at)) is not None:
                flags, begin, at = found
                if flags & COMMAND:
                    self._obey(bytes(self._buffer[begin : begin + 6]))
                elif not self.is_ready:
                    raise ZmtpError("a message before the handshake")
                else:
                    yield bytes(self._buffer[begin:at])
        finally:
            del self._buffer[:at]

    def _frame_at(self, at: int) -> tuple[int, int, int] | None:
        """Flags, begin and end of the body of the frame at a place; None if it isn't complete."""
        head = self._buffer[at : at + 9]
        if len(head) < 2 or (head[0] & LONG and len(head) < 9):
            return None
        flags = head[0]
        begin, size = (at + 9, int.from_bytes(head[1:])) if flags & LONG else (at + 2, head[1])
        if flags & ~(MORE | LONG | COMMAND):
            raise ZmtpError("an unknown flag")
        if flags & MORE:
            raise ZmtpError("a message of several parts")
        if size > self._max_message_bytes:
            raise ZmtpError(f"a message of {size} bytes: at most {self._max_message_bytes}")
        return (flags, begin, begin + size) if len(self._buffer) >= begin + size else None

    def _obey(self, command: bytes) -> None:
        if command.startswith(b"\x05ERROR"):
            raise ZmtpError("the peer reports an error")
        self.is_ready = self.is_ready or command.startswith(b"\x05READY")
