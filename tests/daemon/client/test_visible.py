"""Text of others reaches the operator's terminal, or a pipe, as text: it moves, hides and forges nothing."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.text import Text

from honed.daemon.client.visible import SafeConsole, visible, visible_document
from tests.daemon.conftest import DaemonProcess
from tests.daemon.fake_engine import make_batch

ATTACK = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\u2066\u200b\nhoned 9.9: all is well\r\x7f"
HONED = (sys.executable, "-c", "from honed.daemon.commands.main import main; main()")
COMMANDS = ("status", "engines", "workloads --window 0", "top", "explain", "audit", "operations", "override list")


def is_safe(text: str) -> bool:
    return all(c == "\n" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text)


@pytest.mark.fault("escape sequences in text of others")
@given(st.text())
def test_any_text_is_visible_and_printable_text_stays(text: str) -> None:
    assert is_safe(visible(text))
    assert "\n" not in visible(text)
    assert visible(text) == text or not text.isprintable()
    assert visible(visible(text)) == visible(text)


@pytest.mark.fault("escape sequences in text of others")
def test_names_and_values_of_a_document_are_visible() -> None:
    assert visible_document({ATTACK: [ATTACK, 1, None]}) == {visible(ATTACK): [visible(ATTACK), 1, None]}


@pytest.mark.fault("escape sequences in text of others")
@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_renderer_forgot_is_caught_by_the_console(is_terminal: bool) -> None:
    console = SafeConsole(file=io.StringIO(), force_terminal=is_terminal, width=120)
    console.print(Panel(Text(f"[bold]{ATTACK}", "red"), title=Text(ATTACK)), ATTACK)
    own = re.compile(r"\x1b\[[0-9;]*m")
    text = own.sub("", console.file.getvalue())  # type: ignore[attr-defined]
    assert is_safe(text)
    assert r"\x1b]0;owned" in text  # rich itself drops the bell
    assert "[bold]" in text


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment of commands beside a daemon whose engine, clients and operators are hostile."""
    folder = tmp_path_factory.mktemp("v")
    daemon = DaemonProcess(folder, HONED_EVENTS__ENGINE_LOST_S="3600")
    with ExitStack() as stack:
        stack.callback(daemon.close)
        daemon.start()
        engine = daemon.engine()
        engine.hello(model_name=f"model {ATTACK}", limits=[ATTACK])
        fields = {"engine_id": engine.engine_id, "boot_id": engine.boot_id, "drafter_version": f"v{ATTACK}"}
        engine.send(make_batch(1, workloads=[f"label {ATTACK}"[:64]], **fields))
        engine.wait_acked(1)
        with daemon.http() as client:
            body = {"value": "off", "ttl_s": 3600, "reason": f"reason {ATTACK}"}
            assert client.put("/v1/overrides/policy", json=body, headers={"Idempotency-Key": "k"}).status_code == 200
        yield daemon.env | {"COLUMNS": "400"}


def honed(site: dict[str, str], *arguments: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*HONED, *arguments], env=site | env, capture_output=True, timeout=60, check=False)


@pytest.mark.fault("escape sequences in text of others")
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_passes_control_characters_on(site: dict[str, str], command: str) -> None:
    made = honed(site, *command.split())
    assert made.returncode == 0, made.stderr
    assert is_safe(made.stdout.decode())
    assert not re.search("^honed 9.9", made.stdout.decode(), re.MULTILINE)
    as_json = honed(site, *command.split(), "--json", *(["--count", "1"] if command == "top" else []))
    assert is_safe(as_json.stdout.decode())
    json.loads(as_json.stdout)


def test_hostile_text_is_shown(site: dict[str, str]) -> None:
    assert rb"model \x1b]0;owned\x07" in honed(site, "engines").stdout
    assert rb"label \x1b]0;owned\x07" in honed(site, "workloads", "--window", "0").stdout
    assert rb"reason \x1b]0;owned\x07" in honed(site, "override", "list").stdout


@pytest.mark.fault("a terminal that isn't UTF-8")
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", ["status", "top", "doctor", "no-such-command"])
def test_a_terminal_of_any_encoding_gets_an_answer(site: dict[str, str], command: str, encoding: str) -> None:
    made = honed(site, command, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert b"Traceback" not in made.stderr
    assert made.stdout or command == "no-such-command"


@pytest.mark.fault("a verdict that depends on what reads it")
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_the_verdict_is_the_same_whatever_reads_it(site: dict[str, str], encoding: str) -> None:
    expected = honed(site, "status", "--check").returncode
    assert expected == 4
    assert honed(site, "status", "--check", PYTHONIOENCODING=encoding, PYTHONUTF8="0").returncode == expected
    reading, writing = os.pipe()
    os.close(reading)  # `honed status --check | true`
    with os.fdopen(writing, "wb") as gone:
        command = [*HONED, "status", "--check"]
        made = subprocess.run(command, env=site, stdout=gone, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (made.returncode, made.stderr) == (expected, b"")


@pytest.mark.fault("escape sequences in text of others")
def test_a_terminal_gets_only_the_commands_own_sequences(site: dict[str, str]) -> None:
    parent, child = pty.openpty()
    command = [*HONED, "workloads", "--window", "0"]
    process = subprocess.Popen(command, env=site | {"TERM": "xterm"}, stdout=child, stderr=child)
    os.close(child)
    shown = b""
    try:
        while chunk := os.read(parent, 65536):
            shown += chunk
    except OSError:  # its end
        pass
    assert process.wait(60) == 0
    os.close(parent)
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    assert is_safe(text.replace("\r\n", "\n"))
    assert r"label \x1b]0;owned\x07" in text
