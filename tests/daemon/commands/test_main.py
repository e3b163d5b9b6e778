"""The command line against the real daemon: every command says what the daemon says, and ends as it should."""

import json
import os
import pwd
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import typer
import typer.main
from click.testing import Result
from typer.testing import CliRunner

from honed.daemon.client import terminal
from honed.daemon.client.client import AdminClient, Unreachable
from honed.daemon.commands import changes
from honed.daemon.commands.global_options import SECTIONS, moved
from honed.daemon.commands.main import app
from honed.daemon.commands.show import status as show
from honed.daemon.process.serve import start
from honed.daemon.settings.sections import PathSettings
from honed.daemon.settings.settings import load
from tests.daemon.commands.show.test_status import HEALTHY
from tests.daemon.fake_engine import FakeEngine
from tests.daemon.small_server import serving
from tests.tools import ROOT

Run = Callable[..., Result]


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    for name in [name for name in os.environ if name.startswith("HONED_")]:
        monkeypatch.delenv(name)
    found = {"runtime_dir": tmp_path / "run", "state_dir": tmp_path / "state"}
    monkeypatch.setenv("HONED_RUNTIME_DIR", str(found["runtime_dir"]))
    monkeypatch.setenv("HONED_STATE_DIR", str(found["state_dir"]))
    monkeypatch.setenv("COLUMNS", "220")
    return found


@pytest.fixture
def run(paths: dict[str, Path]) -> Run:
    return lambda *arguments, **options: CliRunner().invoke(app, [str(a) for a in arguments], **options)


@pytest.fixture
def daemon(paths: dict[str, Path]) -> Iterator[None]:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # its log is not the command's output
    with ExitStack() as stack:
        stack.callback(structlog.reset_defaults)
        start(load(None, {"paths": paths, "http": {"metrics_listen": ""}}), stack)
        yield


@pytest.fixture
def engine(daemon: None, paths: dict[str, Path]) -> Iterator[FakeEngine]:
    fake = FakeEngine(paths["runtime_dir"] / "engine.sock")
    fake.hello()
    fake.send(fake.batch(1, rounds=8))
    fake.wait_acked(1)
    yield fake
    fake.close()


def answer(result: Result) -> Any:
    """The JSON that a command printed."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# --- nobody there ---------------------------------------------------------------------------------------------------------

CLIENT_COMMANDS = (
    "status",
    "engines",
    "workloads",
    "drafters",
    "operations",
    "audit",
    "explain",
    "recalibrate",
    "promote v0001-x",
    "rollback",
    "cancel op-1",
    "pause",
    "resume",
    "purge --yes",
    "override list",
    "override set policy off",
    "override clear policy",
)


@pytest.mark.parametrize("command", CLIENT_COMMANDS)
def test_without_a_daemon_each_command_says_so_and_ends_with_3(run: Run, command: str) -> None:
    result = run(*command.split())
    assert result.exit_code == 3
    assert result.stdout == ""
    assert "no daemon is running" in result.stderr
    assert "honed serve" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.fault("wrong settings that restart for ever")
def test_a_typo_in_the_settings_names_the_key_and_ends_with_2_or_a_service_with_78(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "honed.toml"
    config.write_text("[store]\nmax_raw_byte = 1\n")
    for command, code in (("status", 2), ("serve", 78), ("train", 78), ("vllm-args", 2)):
        result = run("--config", config, command)
        assert result.exit_code == code
        assert "max_raw_bytes" in result.stderr


@pytest.mark.parametrize("command", ["status", "serve", "train"])
def test_a_settings_file_that_may_still_come_ends_with_2(run: Run, tmp_path: Path, command: str) -> None:
    result = run("--config", tmp_path / "none.toml", command)
    assert result.exit_code == 2
    assert f"settings file {tmp_path / 'none.toml'}: No such file" in result.stderr


@pytest.mark.fault("wrong settings that restart for ever")
@pytest.mark.parametrize(("is_there", "says"), [(False, "needs PyTorch"), (True, "built for the CPU")])
def test_a_trainer_that_can_never_work_ends_with_78(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_there: bool, says: str
) -> None:
    monkeypatch.setenv("HONED_TRAINER__DEVICE", "cuda")
    if is_there:
        monkeypatch.setattr("torch.version.cuda", None)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    else:
        monkeypatch.delitem(sys.modules, "honed.recalib.process.trainer", raising=False)
        monkeypatch.setitem(sys.modules, "torch", None)
    result = run("train")
    assert result.exit_code == 78
    assert says in " ".join(result.stderr.split())


def test_a_trainer_whose_gpu_may_still_come_ends_with_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONED_TRAINER__DEVICE", "cuda")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("train")
    assert result.exit_code == 1
    assert "see that its driver is loaded" in " ".join(result.stderr.split())


def test_a_trainer_without_its_folder_says_so(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("train", "--state-dir", tmp_path / "file")
    assert result.exit_code == 1
    assert f"the trainer can't start: the folder {tmp_path / 'file'}" in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_watching_outlives_a_restart_of_the_daemon(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([HEALTHY, HEALTHY, Unreachable("no daemon is running")])

    def get(client: AdminClient, path: str) -> Any:
        answer = next(answers, KeyboardInterrupt())
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(AdminClient, "get", get)
    monkeypatch.setattr("honed.daemon.commands.main.time", SimpleNamespace(sleep=lambda seconds: None))
    result = run("status", "--watch")
    assert result.exit_code == 0
    assert "This is the last answer: no daemon is running" in result.stdout
    assert HEALTHY["drafters"]["active"] in result.stdout


@pytest.mark.parametrize("command", ["train", "vllm-args"])
def test_a_runtime_folder_that_others_may_have_made_is_refused(run: Run, paths: dict[str, Path], command: str) -> None:
    """Anybody may make it in /tmp first. Trainer and vLLM would talk to them."""
    paths["runtime_dir"].mkdir()
    paths["runtime_dir"].chmod(0o777)
    paths["runtime_dir"].parent.chmod(0o1777)
    result = run(command)
    assert result.exit_code == 2
    assert "was made by another user" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        *("nonsense", "promote", "override set policy", "workloads --window x", f"workloads --window {'9' * 400}"),
        *(f"override set draft_tokens {value}" for value in ("nan", "inf", "1e400")),
        *(f"events export --out x --since {'9' * 400}{unit}" for unit in ("", "d")),
        *("status --watch --json", "status --watch --check"),
        *("recalibrate --scope half", "calibrate --url http://127.0.0.1:1 --prompts p --scope half"),
    ],
)
def test_wrong_usage_ends_with_2(run: Run, command: str) -> None:
    assert run(*command.split()).exit_code == 2


@pytest.mark.parametrize(
    ("token", "says"), [(b"\xff\xfe", "can't be read"), ("ticket-é".encode(), "can't be read"), (b" \n", "is empty")]
)
def test_a_token_that_is_no_text_ends_with_2(run: Run, tmp_path: Path, token: bytes, says: str) -> None:
    (tmp_path / "token").write_bytes(token)
    result = run("--url", "http://127.0.0.1:1", "--token-file", tmp_path / "token", "status")
    assert result.exit_code == 2
    assert f"the token file {tmp_path / 'token'} {says}" in result.stderr


# --- reading --------------------------------------------------------------------------------------------------------------


def test_a_pipe_has_no_width_and_columns_gives_it_one(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {"operation_id": "op-1", "reason": "many words " * 30, "error": "and more " * 30}
    terminal.put(show.operations([document]))
    assert len(capsys.readouterr().out.splitlines()) > 2
    monkeypatch.delenv("COLUMNS", raising=False)
    terminal.put(show.operations([document]))
    assert len(capsys.readouterr().out.splitlines()) == 2
    terminal.put(show.status({}))
    assert max(map(len, capsys.readouterr().out.splitlines())) < 150, "frames are as wide as what they hold"


def test_status_shows_what_the_engine_sent(run: Run, engine: FakeEngine) -> None:
    document = answer(run("status", "--json"))
    assert document["engines"][0]["engine_id"] == "engine-0"
    assert document["engines"][0]["rounds"] == 8
    text = run("status").stdout
    assert "engine-0" in text
    assert "no trainer is connected" in text


def test_check_tells_errors_from_warnings(run: Run, engine: FakeEngine) -> None:
    engine.send_status()
    assert run("status", "--check").exit_code == 4  # only warnings, as that there is no trainer
    assert run("status").exit_code == 0
    engine.send(engine.batch(2, rounds=8, lost_rounds=5))
    engine.wait_acked(2)
    result = run("status", "--check")
    assert result.exit_code == 1
    assert "5 verify rounds were lost" in result.stdout


def test_the_port_for_metrics_is_told_from_the_admin_api(run: Run, paths: dict[str, Path]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with ExitStack() as stack:
        stack.callback(structlog.reset_defaults)
        start(load(None, {"paths": paths, "http": {"metrics_listen": f"127.0.0.1:{port}"}}), stack)
        result = run("--url", f"http://127.0.0.1:{port}", "status")
    assert result.exit_code == 1
    assert f"isn't a route of 127.0.0.1:{port}" in result.stderr
    assert "honed's port for metrics" in result.stderr
    assert "admin.sock" in result.stderr


def test_a_daemon_s_address_without_http_is_wrong_usage(run: Run) -> None:
    result = run("--url", "127.0.0.1:9465", "status")
    assert result.exit_code == 2
    assert "--url 127.0.0.1:9465 isn't an address" in result.stderr
    assert "http://127.0.0.1:9465" in result.stderr


def test_workloads_and_engines_show_figures(run: Run, engine: FakeEngine) -> None:
    (row,) = answer(run("workloads", "--window", "10m", "--json"))
    assert (row["rounds"], row["acceptance_length"]) == (8, 2.5)
    assert "2.50" in run("workloads").stdout
    assert answer(run("engines", "--json"))[0]["num_spec_tokens"] == 3
    assert "engine-0" in run("engines").stdout


@pytest.mark.parametrize("command", ["drafters", "operations", "audit", "override list", "config"])
def test_lists_are_there_even_when_empty(run: Run, daemon: None, command: str) -> None:
    assert answer(run(*command.split(), "--json")) is not None
    assert run(*command.split()).exit_code == 0


def test_explain_gives_beliefs_of_each_engine(run: Run, engine: FakeEngine) -> None:
    assert list(answer(run("explain", "--json"))) == ["engine-0"]
    assert "engine-0" in run("explain").stdout
    result = run("explain", "nobody")
    assert result.exit_code == 1
    assert "nobody" in result.stderr


def test_an_unknown_operation_ends_with_1(run: Run, daemon: None) -> None:
    result = run("operations", "op-none")
    assert result.exit_code == 1
    assert "op-none" in result.stderr


# --- options that say which daemon is meant ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("status --socket s --json", "--socket s status --json"),
        ("status --socket=s", "--socket=s status"),
        ("--socket s status", "--socket s status"),
        ("marks follow --url u --engine e", "--url u marks follow --engine e"),
        ("serve --config c --state-dir d", "--config c serve --state-dir d"),
        ("override set draft_tokens 2 --timeout 3", "--timeout 3 override set draft_tokens 2"),
        ("calibrate --url u --prompts p", "calibrate --url u --prompts p"),  # an option of its own: vLLM's address
        ("--url u calibrate --url v", "--url u calibrate --url v"),
        ("status -- --socket s", "status -- --socket s"),
        ("status --socket", "--socket"),  # without its value
        ("nothing --help", "nothing --help"),
        ("", ""),
    ],
)
def test_options_of_the_daemon_may_follow_the_command(given: str, parsed: str) -> None:
    assert " ".join(moved(typer.main.get_command(app), given.split())) == parsed


def test_a_socket_after_the_command_is_the_one_asked(run: Run, daemon: None, paths: dict[str, Path]) -> None:
    assert run("status", "--socket", paths["runtime_dir"] / "admin.sock").exit_code == 0
    elsewhere = run("status", "--json", "--socket", paths["state_dir"] / "admin.sock")
    assert elsewhere.exit_code == 3
    assert "does not exist" in elsewhere.stderr


# --- changing -------------------------------------------------------------------------------------------------------------


def test_an_override_is_set_listed_and_cleared(run: Run, engine: FakeEngine) -> None:
    made = answer(run("override", "set", "draft_tokens", "2", "--ttl", "2m", "--reason", "drill", "--json"))
    assert (made["value"], made["reason"]) == (2, "drill")
    assert 110 < made["ttl_s"] <= 120
    again = run("override", "set", "draft_tokens", "2", "--ttl", "600", "--reason", "drill")
    assert again.stdout == "draft_tokens = 2 for 10m\n"
    assert "drill" in run("override", "list").stdout
    assert run("override", "clear", "draft_tokens").exit_code == 0
    assert answer(run("override", "list", "--json")) == []
    me = pwd.getpwuid(os.getuid()).pw_name
    done = [(row["actor"], row["action"]) for row in answer(run("audit", "--json"))]
    assert done == [(me, "override.clear"), (me, "override.set"), (me, "override.set")]


def test_an_override_that_makes_no_sense_ends_with_2(run: Run, daemon: None) -> None:
    result = run("override", "set", "policy", "faster")
    assert result.exit_code == 2
    assert "goodput" in result.stderr


def test_a_change_against_an_older_generation_is_refused(run: Run, daemon: None) -> None:
    result = run("rollback", "--if-match", "99")
    assert result.exit_code == 1
    assert "generation" in result.stderr
    assert "honed drafters" in result.stderr


def test_a_roll_back_of_a_version_that_is_not_active_is_refused(run: Run, daemon: None) -> None:
    result = run("rollback", "v0002-0badcafe")
    assert result.exit_code == 1
    assert "v0002-0badcafe can't be taken out: none is active" in result.stderr
    assert "honed operations" in result.stderr


def test_calibrate_refuses_more_requests_than_are_captured_at_once(run: Run) -> None:
    """The rest would be completed, paid for and lost."""
    done = run("calibrate", "--url", "http://127.0.0.1:1", "--prompts", "p", "--concurrency", "64")
    assert done.exit_code == 2
    assert "less than or equal to 32" in done.output


@pytest.mark.parametrize("command", ["recalibrate", "rollback"])
def test_what_is_not_possible_now_ends_with_1_and_the_reason(run: Run, engine: FakeEngine, command: str) -> None:
    result = run(command)
    assert result.exit_code == 1
    assert re.search(r"no trainer|no previous", result.stderr)


def test_pause_and_resume(run: Run, daemon: None) -> None:
    assert "paused" in run("pause", "--reason", "drill").stdout
    assert "training is paused: `honed resume`" in run("status").stdout
    assert "training resumed" in run("resume").stdout
    assert "training is paused" not in run("status").stdout
    actions = [(row["action"], row["reason"]) for row in answer(run("audit", "--json"))]
    assert ("training.pause", "drill") in actions


def test_purge_asks_first(run: Run, daemon: None) -> None:
    result = run("purge", input="n\n")
    assert result.exit_code == 1
    assert answer(run("audit", "--json")) == []


# --- following an operation -------------------------------------------------------------------------------------------------


def operation(state: str, stage: str, /, **detail: Any) -> dict[str, Any]:
    return {"operation_id": "op-1", "kind": "recalibrate", "state": state, "stage": stage, "detail": detail, "error": ""}


@pytest.fixture
def scripted(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[dict[str, Any]], list[Any]]]:
    """A daemon that goes through the views of a list; it stays at the last one."""
    views: list[dict[str, Any]] = []
    paths["runtime_dir"].mkdir()
    monkeypatch.setattr("honed.daemon.client.client.time.sleep", lambda _: None)

    def say(method: str, path: str) -> tuple[int, Any]:
        return (202 if method == "POST" else 200), views.pop(0) if len(views) > 1 else views[0]

    with serving(paths["runtime_dir"] / "admin.sock", say) as seen:
        yield views, seen


@pytest.mark.parametrize(
    ("changes", "code"), [({}, 0), ({"trainer": None}, 4), ({"trainer": None, "problems": ["the writer thread has ended"]}, 1)]
)
def test_check_ends_with_what_was_found(run: Run, scripted: Any, changes: dict[str, Any], code: int) -> None:
    views, _ = scripted
    views.append(HEALTHY | changes)
    assert run("status", "--check").exit_code == code
    assert run("status", "--check", "--json").exit_code == code


@pytest.mark.parametrize(("kind", "shown"), [("recalibrate", True), ("verify", False), ("promote", False), ("rollback", False)])
def test_only_what_trains_shows_how_far_training_is(run: Run, scripted: Any, kind: str, shown: bool) -> None:
    views, _ = scripted
    views += [operation("running", stage) | {"kind": kind} for stage in ("asking", "asking", "done")]
    views[-1]["state"] = "succeeded"
    command = {"recalibrate": "recalibrate --wait", "verify": "verify e", "promote": "promote v", "rollback": "rollback"}[kind]
    result = run(*command.split())
    assert result.exit_code == 0, result.output
    assert ("samples" in result.stderr) == shown
    assert "op-1: asking the engine" in result.stderr


@pytest.mark.parametrize(("arguments", "body"), [(["v2"], {"version": "v2"}), ([], {})])
def test_a_roll_back_may_name_the_version_that_is_to_go(run: Run, scripted: Any, arguments: list[str], body: Any) -> None:
    views, seen = scripted
    views.append(operation("succeeded", "done") | {"kind": "rollback"})
    assert run("rollback", *arguments).exit_code == 0
    assert seen[0]["body"] == body


GATE = [{"workload": "b", "sessions": 9, "parent": 1.2, "candidate": 1.8, "gain_low": 1.4, "gain_high": 1.6, "passed": True}]


def test_recalibrate_waits_and_ends_with_gate_and_pause(run: Run, scripted: Any) -> None:
    views, seen = scripted
    views += [
        operation("queued", "collecting"),
        operation("running", "training", state="waiting"),
        operation("running", "training", state="training", steps=5, max_steps=10, loss=1.5),
        operation("succeeded", "watching", gate=GATE, pause_ms=2.5, version="v0002-x"),
    ]
    result = run("recalibrate", "--wait", "--workload", "b", "--workload", "c", "--max-seconds", "30", "--reason", "why")
    assert result.exit_code == 0
    for text in ("+50.0 %", "2.50 ms pause", "v0002-x"):
        assert text in result.stdout
    assert "waiting: the engine is busy or asleep" in result.stderr
    assert seen[0]["body"] == {"workloads": ["b", "c"], "max_seconds": 30.0, "reason": "why"}


def test_a_failed_recalibration_ends_with_1(run: Run, scripted: Any) -> None:
    views, _ = scripted
    views += [operation("running", "training"), operation("failed", "done", gate=[GATE[0] | {"passed": False}])]
    views[-1]["error"] = "no candidate passed the gate"
    result = run("recalibrate", "--wait", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"] == "no candidate passed the gate"
    assert result.stderr == ""


def test_recalibrate_without_waiting_tells_how_to_follow(run: Run, scripted: Any) -> None:
    views, seen = scripted
    views += [operation("queued", "collecting")]
    result = run("recalibrate", "--dry-run")
    assert result.exit_code == 0
    assert "honed operations op-1" in result.stderr
    assert len(seen) == 1
    assert seen[0]["body"] == {"dry_run": True}


def test_leaving_a_wait_leaves_the_operation_running(run: Run, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    views, seen = scripted
    views += [operation("running", "training")]

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("honed.daemon.client.client.time.sleep", interrupt)
    result = run("recalibrate", "--wait")
    assert result.exit_code == 130
    assert "honed cancel op-1" in result.stderr
    assert not any(request["path"].endswith(":cancel") for request in seen)


# --- without the daemon -----------------------------------------------------------------------------------------------------


def test_export_reads_what_the_daemon_stored(run: Run, engine: FakeEngine, tmp_path: Path) -> None:
    out = tmp_path / "rounds.jsonl"
    assert answer(run("events", "export", "--out", out, "--json")) == {"rounds": 8, "batches": 1, "unreadable_batches": 0}
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["num_accepted_tokens"] for row in rows] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_export_to_stdout_is_only_rows(run: Run, engine: FakeEngine) -> None:
    result = run("events", "export", "--out", "-", "--since", "1h")
    assert len([json.loads(line) for line in result.stdout.splitlines()]) == 8
    assert "8 rounds" in result.stderr


def test_export_without_a_database_ends_with_1(run: Run, tmp_path: Path) -> None:
    result = run("events", "export", "--out", tmp_path / "x")
    assert result.exit_code == 1
    assert "no database" in result.stderr


def test_vllm_args_refuse_a_drafter_of_another_target(run: Run, tmp_path: Path) -> None:
    target, drafter = tmp_path / "target", tmp_path / "Qwen3-8B-DFlash-b16"
    for folder, raw in (
        (target, {"hidden_size": 2880, "vocab_size": 201088, "num_hidden_layers": 24}),
        (drafter, {"hidden_size": 4096, "vocab_size": 151936, "num_target_layers": 36, "block_size": 16}),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw))
    refused = run("vllm-args", "--model", str(target), "--drafter", str(drafter))
    assert refused.exit_code == 2
    assert "was trained for another target: layers of its target 36, the target has 24; vocabulary" in refused.stderr
    assert "Serve the drafter that was trained for this target" in refused.stderr
    (target / "config.json").write_text(json.dumps({"hidden_size": 4096, "vocab_size": 151936, "num_hidden_layers": 36}))
    assert run("vllm-args", "--model", str(target), "--drafter", str(drafter)).exit_code == 0
    (target / "config.json").unlink()
    assert run("vllm-args", "--model", str(target), "--drafter", str(drafter)).exit_code == 0, "nobody knows"


def test_vllm_args_name_this_daemons_folder(run: Run, paths: dict[str, Path]) -> None:
    document = answer(run("vllm-args", "--json", "--drafter", "d", "--draft-tokens", "7"))
    assert document["environment"]["HONED_RUNTIME_DIR"] == str(paths["runtime_dir"])
    assert "honed.attach.scheduler.make_scheduler" in document["flags"]
    assert run("vllm-args", "--format", "yaml").exit_code == 2
    assert run("vllm-args", "--drafter", "d").exit_code == 2
    refused = run("vllm-args", "--engine-id", "Qwen/Qwen3-8B")
    assert refused.exit_code == 2
    assert "'Qwen/Qwen3-8B' is no engine id: use letters" in refused.stderr


def test_version_names_what_is_installed(run: Run) -> None:
    assert answer(run("version", "--json"))["honed"]
    assert "honed" in run("version").stdout


def test_serve_refuses_a_second_daemon_on_the_same_state(run: Run, daemon: None) -> None:
    command = [sys.executable, "-m", "honed.daemon.commands.main", "serve"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert made.returncode == 2
    assert "or give this one its own folders" in made.stderr


def test_status_needs_nothing_heavy(paths: dict[str, Path]) -> None:
    program = (
        "import sys; sys.argv = ['honed', 'status']\n"
        "from honed.daemon.commands.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 3, end.code\n"
        "print(sorted({'torch', 'vllm', 'fastapi', 'uvicorn', 'pyarrow', 'transformers'} & set(sys.modules)))"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert made.stdout.strip() == "[]"


# --- small things -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400), ("0", 0)])
def test_durations(text: str, seconds: float) -> None:
    assert terminal.duration_s(text) == seconds
    assert terminal.duration_s(terminal.duration_text(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "-1", "5 parsecs", "1h30", "nan"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        terminal.duration_s(text)


def test_moments() -> None:
    assert terminal.moment_s("2h", 10_000.0) == 2800.0
    assert terminal.moment_s("1790000000.5", 0.0) == 1790000000.5
    assert terminal.moment_s("2026-11-20T12:00:00+00:00", 0.0) == 1795176000.0
    with pytest.raises(typer.BadParameter):
        terminal.moment_s("yesterday", 0.0)


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("0.25", 0.25), ("off", "off")])
def test_override_values_are_numbers_where_they_can_be(text: str, value: Any) -> None:
    made = changes.number_or_text(text)
    assert (made, type(made)) == (value, type(value))


# --- the command line as a whole --------------------------------------------------------------------------------------------


def commands(command: Any = None, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command with its full name."""
    command = command or typer.main.get_command(app)
    for child, found in getattr(command, "commands", {}).items():
        if getattr(found, "commands", None):
            yield from commands(found, f"{name} {child}".strip())
        else:
            yield f"{name} {child}".strip(), found


def test_every_command_that_says_something_says_it_as_json_too() -> None:
    without = {name for name, found in commands() if not any("--json" in param.opts for param in found.params)}
    assert without == {"serve", "train"}  # they run until they are stopped, and log


def test_every_operation_of_the_api_has_a_command() -> None:
    """One to one: a command for each change, and for each thing to be read that isn't for machines."""
    paths = (path for path in (ROOT / "daemon").rglob("*.py") if "api" not in path.relative_to(ROOT).as_posix())
    source = "".join(path.read_text() for path in paths)
    document = json.loads((ROOT / "daemon" / "openapi.json").read_text())
    for path in document["paths"]:
        start, _, end = path.partition("{")
        last = end.rpartition("}")[2]
        is_for_machines = path in ("/metrics", "/healthz", "/readyz", "/v1/batches")
        assert is_for_machines or (f'"{start}' in source and last in source), path
    assert "/v1/status" in document["paths"]


@pytest.mark.parametrize(
    ("words", "offers"), [("honed ov", "override"), ("honed override ", "set"), ("honed doctor --pro", "--prometheus")]
)
def test_the_shell_completes_commands_and_options(paths: dict[str, Path], words: str, offers: str) -> None:
    given = {"_HONED_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    program = "import sys; sys.argv = ['honed']; from honed.daemon.commands.main import main; main()"
    made = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | given, capture_output=True, text=True, timeout=60, check=False
    )
    assert offers in made.stdout.split(), made.stderr


def test_the_service_is_found_by_users_without_a_daemon_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "SERVICE_DIR", tmp_path)
    monkeypatch.setattr("honed.daemon.settings.sections.default_runtime_dir", lambda: Path("/nowhere/honed"))
    assert terminal.socket_of(PathSettings(runtime_dir=Path("/nowhere/honed"))) == tmp_path / "admin.sock"
    assert terminal.socket_of(PathSettings(runtime_dir=Path("/elsewhere"))) == Path("/elsewhere/admin.sock")


def test_vllm_args_name_the_services_folder_to_users_without_a_daemon_of_their_own(
    run: Run, paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would look for honed where there is none."""
    monkeypatch.setattr(terminal, "SERVICE_DIR", tmp_path / "service")
    monkeypatch.setattr("honed.daemon.settings.sections.default_runtime_dir", lambda: paths["runtime_dir"])

    def named(*options: str) -> str:
        return str(answer(run(*options, "vllm-args", "--json"))["environment"]["HONED_RUNTIME_DIR"])

    assert named() == str(paths["runtime_dir"]), "there is no service"
    (tmp_path / "service").mkdir()
    assert named() == str(tmp_path / "service")
    assert named("--socket", str(tmp_path / "mine" / "admin.sock")) == str(tmp_path / "mine")
    paths["runtime_dir"].mkdir()
    (paths["runtime_dir"] / "admin.sock").touch()
    assert named() == str(paths["runtime_dir"]), "a daemon of the user's own"


def test_a_socket_in_a_folder_that_others_may_have_made_is_not_asked(
    run: Run, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = paths["runtime_dir"]
    monkeypatch.setattr("honed.daemon.settings.sections.default_runtime_dir", lambda: folder)
    folder.mkdir()
    (folder / "admin.sock").touch()
    folder.chmod(0o777)
    folder.parent.chmod(0o1777)
    result = run("status")
    assert result.exit_code == 2
    assert "was made by another user" in result.stderr


def test_the_help_lists_every_command_in_one_section(run: Run) -> None:
    listed = [name for names in SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    shown = run("-h").stdout
    assert shown == run("--help").stdout
    for title, names in SECTIONS.items():
        part = shown.split(f"\n{title}:\n")[1].split("\n\n")[0]
        assert [line.split()[0] for line in part.splitlines() if line[2] != " "] == list(names)
    assert "Show problems first" in run("status", "-h").stdout


def test_the_version_in_one_line(run: Run) -> None:
    assert re.fullmatch(r"honed \d+\.\d+\.\d+\n", run("--version").stdout)
