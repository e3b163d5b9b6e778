"""Prompts of an operator's file, which `honed calibrate` and `honed retention` send to a server.

    JSON lines    {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}, …]}, and if wanted "class" and "session"
    plain text    one prompt per line

A file whose first line begins with `{` is JSON lines. Empty lines don't count. Any other fault is a PromptsError that names
file and line: silently skipped prompts would falsify the figures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from honed.daemon.client.client import EXIT_USAGE

HELP = 'JSON lines with "prompt" or "messages", "class" and "session"; or one prompt per line.'
"""Help text of commands that take such a file."""
MAX_CLASS_CHARS = 64
"""Longest workload label: classes become labels."""
MAX_CLASSES = 32
CURE = (
    'A line is {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}, with "class" and "session" if wanted; or '
    "plain text."
)

Message = dict[str, Any]


class PromptsError(ValueError):
    """An unusable prompts file; the text names the line, `cure` shows a correct one."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, cure: str = CURE) -> None:
        super().__init__(message)
        self.cure = cure


@dataclass(frozen=True)
class Prompt:
    """One line: a text to continue, or a conversation to answer."""

    line: int
    text: str = ""
    messages: list[Message] = field(default_factory=list)
    name: str = ""
    """Its class; "" if the file has none."""
    session: str = ""
    """Its session. Prompts of one session are held out together or not at all."""

    @property
    def is_chat(self) -> bool:
        """True for a conversation."""
        return bool(self.messages)


def read_prompts(path: Path, limit: int = 0) -> list[Prompt]:
    """The first `limit` prompts of a file; 0: all. Raises PromptsError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"{path} can't be read: {error}", cure="Name a text file with prompts.") from error
    # Not splitlines(): it also splits at U+2028 and others, which JSON's texts may hold as they are.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise PromptsError(f"{path} has no prompts")
    is_json = lines[0][1].lstrip().startswith("{")
    prompts = [_parse(path, number, line) if is_json else _prompt(number, line.strip()) for number, line in lines]
    prompts = prompts[:limit] if limit else prompts
    if len(classes(prompts)) > MAX_CLASSES:
        raise PromptsError(f"{path} has {len(classes(prompts))} classes, at most {MAX_CLASSES} are allowed")
    return prompts


def classes(prompts: Iterable[Prompt]) -> list[str]:
    """The classes, in the order of their first prompts."""
    return list(dict.fromkeys(prompt.name for prompt in prompts))


def digest(prompts: Sequence[Prompt]) -> str:
    """Digest that shows whether two figures are for the same prompts."""
    texts = [[prompt.name, prompt.text, prompt.messages] for prompt in prompts]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def _parse(path: Path, number: int, line: str) -> Prompt:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise PromptsError(f"{path}, line {number} isn't JSON: {error}") from error
    if not isinstance(found, dict):
        raise PromptsError(f"{path}, line {number} isn't a JSON object")
    text, messages = found.get("prompt"), found.get("messages")
    if (text is None) == (messages is None):
        raise PromptsError(f'{path}, line {number} must have either "prompt" or "messages"')
    if messages is None and not (isinstance(text, str) and text):
        raise PromptsError(f'{path}, line {number}: "prompt" must be a text that is not empty')
    if messages is not None and not _are_messages(messages):
        raise PromptsError(f'{path}, line {number}: "messages" must be a list of objects with "role" and "content"')
    for name in ("class", "session"):
        if not isinstance(found.get(name, ""), str):
            raise PromptsError(f'{path}, line {number}: "{name}" must be a text')
    name = found.get("class", "")
    if len(name) > MAX_CLASS_CHARS:
        raise PromptsError(f'{path}, line {number}: "class" has {len(name)} characters, at most {MAX_CLASS_CHARS} are allowed')
    return _prompt(number, text or "", messages or [], name, found.get("session", ""))


def _are_messages(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one for one in messages)
    )


def _prompt(line: int, text: str, messages: list[Message] | None = None, name: str = "", session: str = "") -> Prompt:
    # A prompt is on the same side of the hold-out in every run: a drafter tested on its training data looks too good.
    own = session or hashlib.sha256(json.dumps([text, messages or []]).encode()).hexdigest()[:16]
    return Prompt(line, text, messages or [], name, own)
