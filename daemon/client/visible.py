"""Text of clients, engines and other users, made safe for a terminal.

Such text may hold escape sequences, which would write elsewhere on the operator's screen, set its title or hide a line, and
characters that reverse the order of others. Both are shown as escapes instead.
"""

from __future__ import annotations

import io
import os
import sys
import unicodedata
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of Unicode: control, format (bidi and zero width), surrogate, and separators of lines and paragraphs."""


def visible(text: str, keep: str = "") -> str:
    """The text with control and format characters as escapes (`\\x1b`, `\\u202e`), but for those to keep."""
    if text.isprintable():
        return text
    return "".join(c if c in keep or unicodedata.category(c) not in _HIDDEN else _escape(ord(c)) for c in text)


def visible_document(document: Any) -> Any:
    """A JSON document with all its text visible, names of fields included, so that no value begins a line of its own."""
    if isinstance(document, str):
        return visible(document)
    if isinstance(document, dict):
        return {visible_document(name): visible_document(value) for name, value in document.items()}
    if isinstance(document, list | tuple):
        return [visible_document(value) for value in document]
    return document


class SafeConsole(Console):
    """The console of all commands: text is taken literally, and only rich's own control sequences reach the terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "highlight": False} | options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render; every nested part comes through here too."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text, "\n"), segment.style)

    def on_broken_pipe(self) -> None:
        """Leave the exit code to the command; rich would end it with 1."""
        raise BrokenPipeError("nobody reads the output")


def prepare_streams() -> None:
    """Let a terminal or pipe that isn't UTF-8 show what it can't as escapes, instead of ending the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def abandon_output() -> None:
    """Write nothing more to stdout: its reader is gone, and flushing it again at the exit would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
