"""Prompts of a file: both kinds, and every mistake with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from honed.daemon.calibration.prompts_file import MAX_CLASSES, PromptsError, classes, digest, read_prompts

CHAT = '{"messages": [{"role": "user", "content": "Why?"}], "class": "chat"}'


def written(folder: Path, text: str) -> Path:
    path = folder / "prompts"
    path.write_text(text, encoding="utf-8")
    return path


def test_json_lines_with_texts_and_conversations(tmp_path: Path) -> None:
    found = read_prompts(written(tmp_path, f'{{"prompt": "def f", "class": "code", "session": "s1"}}\n\n{CHAT}\n'))
    assert [(p.line, p.text, p.is_chat, p.name) for p in found] == [(1, "def f", False, "code"), (3, "", True, "chat")]
    assert found[0].session == "s1"
    assert classes(found) == ["code", "chat"]


def test_plain_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    found = read_prompts(written(tmp_path, "Once upon\n\n a time: {x}\n"))
    assert [(p.line, p.text, p.name) for p in found] == [(1, "Once upon", ""), (3, "a time: {x}", "")]


def test_a_byte_order_mark_belongs_to_no_prompt(tmp_path: Path) -> None:
    """JSON lines with one were taken for plain text, a prompt of braces each."""
    found = read_prompts(written(tmp_path, f'\ufeff{{"prompt": "def f"}}\n{CHAT}\n'))
    assert [(p.text, p.is_chat) for p in found] == [("def f", False), ("", True)]


@pytest.mark.fault("lines split where none ends")
@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x85"])
def test_a_json_text_may_hold_any_sign_that_json_allows(tmp_path: Path, sign: str) -> None:
    found = read_prompts(written(tmp_path, f'{{"prompt": "one{sign}two"}}\r\n{{"prompt": "three"}}\n'))
    assert [(p.line, p.text) for p in found] == [(1, f"one{sign}two"), (2, "three")]


@pytest.mark.fault("lines split where none ends")
@pytest.mark.parametrize("sign", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_a_line_of_plain_text_ends_at_its_end(tmp_path: Path, sign: str) -> None:
    found = read_prompts(written(tmp_path, f"one{sign}two\nthree\n"))
    assert [(p.line, p.text) for p in found] == [(1, f"one{sign}two"), (2, "three")]


def test_a_prompt_is_of_the_same_session_in_every_run_and_of_another_than_its_neighbour(tmp_path: Path) -> None:
    one, other = read_prompts(written(tmp_path, "a\nb\n"))
    again = read_prompts(written(tmp_path, "b\na\n"))[1]
    assert one.session == again.session != other.session


def test_the_digest_tells_whether_the_prompts_are_the_same(tmp_path: Path) -> None:
    same = [digest(read_prompts(written(tmp_path, text))) for text in ("a\nb\n", "a\n\nb\n", "a\nc\n")]
    assert same[0] == same[1] != same[2]
    assert digest(read_prompts(written(tmp_path, "a\nb\n"), limit=1)) != same[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"prompt": "a"}\nnot json', "line 2 isn't JSON"),
        ('{"prompt": "a"}\n["b"]', "line 2 isn't a JSON object"),
        ('{"text": "a"}', 'line 1 must have either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'line 1 must have either "prompt" or "messages"'),
        ('{"prompt": ""}', 'line 1: "prompt" must be a text that is not empty'),
        ('{"prompt": ["a", "b"]}', 'line 1: "prompt" must be a text'),
        ('{"messages": []}', 'line 1: "messages" must be a list of objects'),
        ('{"messages": [{"content": "a"}]}', 'line 1: "messages" must be a list of objects'),
        ('{"prompt": "a", "class": 3}', 'line 1: "class" must be a text'),
        ('{"prompt": "a", "class": "' + "x" * 65 + '"}', "has 65 characters"),
        (" \n", "has no prompts"),
        ("\n".join(f'{{"prompt": "a", "class": "{i}"}}' for i in range(MAX_CLASSES + 1)), f"{MAX_CLASSES + 1} classes"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(PromptsError) as caught:
        read_prompts(written(tmp_path, text))
    assert says in str(caught.value)
    assert caught.value.exit_code == 2
    assert caught.value.cure


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match="can't be read"):
        read_prompts(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptsError, match="can't be read"):
        read_prompts(tmp_path / "binary")
