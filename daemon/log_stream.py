"""The stream of the log, which may fail: on a full disk, or as a pipe whose reader has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO


class LogStream:
    """Writes to a stream and counts failures instead of raising them: a thread must not end because its log fails."""

    def __init__(self, stream: TextIO, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._monotonic = stream, monotonic
        self.errors = 0
        """Writes that failed."""
        self.last_error = ""
        self.failed_at_s = float("-inf")

    def write(self, text: str) -> int:
        """Write and flush a text; return its length in characters, also after a failure."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError) as error:  # a closed stream raises ValueError
            self.errors += 1
            self.last_error, self.failed_at_s = str(error), self._monotonic()
        return len(text)

    def flush(self) -> None:
        """Do nothing: `write` has flushed."""
