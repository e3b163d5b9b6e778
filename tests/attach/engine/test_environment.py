"""The switches of the half inside vLLM: off unless asked for, and a wrong value says which variable and what it takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from honed.adapt.protocol.attach_variables import VARIABLES
from honed.attach.engine.environment import OF_THE_DAEMON, from_environment, unknown_variables
from honed.daemon.settings import variables


def test_without_the_runtime_directory_honed_is_off() -> None:
    assert from_environment({}) is None
    assert from_environment({"HONED_RUNTIME_DIR": " ", "HONED_ENGINE_ID": "x"}) is None


def test_paths_follow_from_the_runtime_directory_and_the_engine() -> None:
    settings = from_environment({"HONED_RUNTIME_DIR": "/run/honed", "HONED_ENGINE_ID": "chat"}, data_parallel_index=2)
    assert settings is not None
    assert settings.engine_id == "chat-2"
    assert settings.socket_endpoint == "ipc:///run/honed/engine.sock"
    assert settings.ring_path == Path("/run/honed/engines/chat-2/ring")
    assert settings.busy_path == Path("/run/honed/engines/chat-2/busy")
    relative = from_environment({"HONED_RUNTIME_DIR": "run"})
    assert relative is not None
    assert relative.runtime_dir == Path.cwd() / "run", "daemon and trainer get paths below it"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HONED_ENGINE_ID", "../etc"),
        ("HONED_ENGINE_ID", ".hidden"),
        ("HONED_ENGINE_ID", "Qwen/Qwen3-8B"),
        ("HONED_ENGINE_ID", "x" * 200),
        ("HONED_RING_BYTES", "64M"),
        ("HONED_RING_BYTES", "12"),
        ("HONED_FEATURES", "all"),
        ("HONED_CAPTURE", "graphs"),
        ("HONED_CAPTURE", "none"),
        ("HONED_TREES", "31"),
    ],
)
def test_a_wrong_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        from_environment({"HONED_RUNTIME_DIR": "/run/honed", name: value})


def test_a_folder_that_others_may_have_made_first_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made it in /tmp would hear what vLLM sends, and could ask for the tokens."""
    shared, folder = tmp_path / "tmp", tmp_path / "tmp" / "honed-1000"
    shared.mkdir()
    shared.chmod(0o1777)
    environ = {"HONED_RUNTIME_DIR": str(folder)}
    assert from_environment(environ) is not None, "the daemon makes it later"
    folder.mkdir(mode=0o750)
    assert from_environment(environ) is not None
    folder.chmod(0o777)
    with pytest.raises(ValueError, match=r"HONED_RUNTIME_DIR: .* was made by another user"):
        from_environment(environ)
    folder.chmod(0o750)
    if os.getuid() == 0:  # whose folders are anybody's to use
        os.chown(folder, 12345, -1)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(ValueError, match="was made by another user"):
        from_environment(environ)
    shared.chmod(0o755)
    assert from_environment(environ) is not None, "a service's, whose group vLLM's user is in"


def test_a_misspelt_variable_is_named_with_the_nearest_one() -> None:
    environ = {"HONED_ENGIN_ID": "a", "HONED_RING_BITES": "1", "HONED_XYZZY_PLUGH": "1", "HONED_STORE__ANYTHING": "1"}
    assert unknown_variables(environ | dict.fromkeys((*VARIABLES, *OF_THE_DAEMON), "1")) == [
        "unknown variable HONED_ENGIN_ID is ignored; did you mean HONED_ENGINE_ID?",
        "unknown variable HONED_RING_BITES is ignored; did you mean HONED_RING_BYTES?",
        "unknown variable HONED_XYZZY_PLUGH is ignored",
    ]


def test_both_sides_know_the_same_variables() -> None:
    assert set(OF_THE_DAEMON) == {*variables.PATHS, *variables.OTHERS} - {"HONED_RUNTIME_DIR"}


SWITCHES = [
    ("1", True),
    (" on", True),
    ("True", True),
    ("0", False),
    (" 0", False),
    ("FALSE", False),
    ("No", False),
    ("off", False),
]


@pytest.mark.parametrize(("text", "is_on"), [*SWITCHES, ("graphs", True), (" Graphs", True), ("", False)])
def test_trees_are_wanted_where_it_says_so(text: str, is_on: bool) -> None:
    settings = from_environment({"HONED_RUNTIME_DIR": "/run/honed", "HONED_TREES": text})
    assert settings is not None
    assert settings.wants_trees is is_on
    assert settings.wants_tree_graphs is (text.strip().lower() == "graphs")


@pytest.mark.fault("a switch-off in other letters that left capture on")
@pytest.mark.parametrize(("text", "is_on"), [*SWITCHES, ("", True)])
def test_capture_is_off_where_it_says_so(text: str, is_on: bool) -> None:
    settings = from_environment({"HONED_RUNTIME_DIR": "/run/honed", "HONED_CAPTURE": text})
    assert settings is not None
    assert settings.is_capture_on is is_on


def test_plugin_is_inert_when_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from honed.attach import plugin

    monkeypatch.delenv("HONED_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("builtins.__import__", _no_vllm(__import__))
    plugin.register()


def _no_vllm(real: object) -> object:
    def guarded(name: str, *args: object, **kwargs: object) -> object:
        assert not name.startswith(("vllm", "torch", "honed.attach.engine.engine_hook")), f"{name} was imported"
        return real(name, *args, **kwargs)  # type: ignore[operator]

    return guarded
