"""The daemon as a process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from honed.daemon.errors import SettingsError, StartError
from honed.daemon.process import serve
from honed.daemon.process.http_server import bind_tcp
from honed.daemon.process.serve import locked, make_engines_folder, make_folder
from honed.daemon.store.database import connect
from honed.daemon.views.findings import findings
from tests.daemon.conftest import DaemonProcess, wait_for
from tests.full_tmpfs import run_on_tmpfs


def refused(daemon: DaemonProcess, code: int = 2) -> str:
    """Start a daemon that mustn't start; returns the one line that it says. 78: systemd doesn't start it again."""
    process = daemon.spawn()
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    lines = [line for line in said.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, said
    assert lines[0].startswith("honed: ")
    return lines[0]


def test_sigterm_commits_what_was_received_and_cleans_up(daemon: DaemonProcess) -> None:
    daemon.env["HONED_STORE__COMMIT_INTERVAL_S"] = "0.5"
    daemon.start()
    assert (daemon.runtime_dir / "admin.sock").stat().st_mode & 0o777 == 0o660
    assert (daemon.runtime_dir / "engine.sock").stat().st_mode & 0o777 == 0o660
    assert daemon.runtime_dir.stat().st_mode & 0o777 == 0o750
    assert stat.S_IMODE((daemon.runtime_dir / "engines").stat().st_mode) == 0o2770, "for vLLM, as another user of the group"
    engine = daemon.engine(is_immediate=False)  # it is to see the last acknowledgement however slow it is to read
    engine.hello()
    for seq in range(1, 31):
        engine.send(engine.batch(seq))
    with daemon.http() as client:
        while client.get("/v1/status").json()["events"]["batches"] < 30:
            pass
    assert daemon.process is not None
    daemon.process.terminate()
    engine.wait_acked(30)
    assert daemon.end(None) == 0, "another signal would end it while Python ends"
    assert not (daemon.runtime_dir / "admin.sock").exists()
    assert not (daemon.runtime_dir / "engine.sock").exists()
    reader = connect(daemon.state_dir / "honed.db", read_only=True)
    assert reader.conn.execute("SELECT committed_seq, rounds FROM boots").fetchall()[0][:] == (30, 240)
    reader.close()


def test_a_folder_for_engines_that_is_there_stays_as_it_is(daemon: DaemonProcess) -> None:
    (daemon.runtime_dir / "engines").mkdir(parents=True)
    (daemon.runtime_dir / "engines").chmod(0o700)
    daemon.start()
    assert stat.S_IMODE((daemon.runtime_dir / "engines").stat().st_mode) == 0o700


def test_a_second_daemon_on_the_same_state_or_sockets_is_refused(daemon: DaemonProcess, folder: Path) -> None:
    daemon.start()
    assert daemon.process is not None
    said = refused(daemon)
    assert f"another honed daemon (process {daemon.process.pid}) uses {daemon.state_dir}: stop it" in said
    assert f"`kill {daemon.process.pid}`" in said
    assert "HONED_STATE_DIR and HONED_RUNTIME_DIR" in said
    other = DaemonProcess(folder / "other")
    other.env["HONED_RUNTIME_DIR"] = str(daemon.runtime_dir)
    assert f"uses {daemon.runtime_dir}" in refused(other)
    assert daemon.answers()


@pytest.fixture
def start_trainer(daemon: DaemonProcess) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts `honed train` with the daemon's folders."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "honed.daemon.commands.main", "train"]
        started.append(subprocess.Popen(command, env=daemon.env, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=60)


def wait_connected(trainer: subprocess.Popen[str]) -> None:
    assert trainer.stderr is not None
    assert any("connected to the daemon" in line for line in trainer.stderr), "it has ended"


@pytest.mark.fault("two trainers on one state folder")
def test_a_second_trainer_on_the_same_state_is_refused_and_a_killed_one_leaves_no_lock(
    daemon: DaemonProcess, start_trainer: Callable[[], subprocess.Popen[str]]
) -> None:
    """Both would train, and a pause would reach one of them."""
    daemon.start()
    first = start_trainer()
    wait_connected(first)
    second = start_trainer()
    said = " ".join(second.communicate(timeout=60)[1].split())
    assert second.returncode == 2
    assert f"another honed trainer (process {first.pid}) uses {daemon.state_dir}: stop it" in said
    assert f"`systemctl stop honed-trainer` or `kill {first.pid}`" in said
    first.kill()
    first.wait(60)
    third = start_trainer()
    wait_connected(third)
    third.terminate()
    assert third.wait(60) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it makes the lock in another user's folder")
def test_a_lock_that_root_made_is_the_folders_owners(tmp_path: Path) -> None:
    """Else the service couldn't start after somebody has tried it as root."""
    os.chown(tmp_path, 61234, 61234)
    with locked(tmp_path / "lock"):
        assert (tmp_path / "lock").stat().st_uid == 61234


def test_a_database_that_another_program_writes_to_is_refused_with_what_to_do(daemon: DaemonProcess) -> None:
    daemon.state_dir.mkdir()
    other = connect(daemon.state_dir / "honed.db")
    other.conn.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.conn.execute("CREATE TABLE held (a)")
    said = refused(daemon)
    assert f"another program is writing to it (`fuser {daemon.state_dir / 'honed.db'}` names it)" in said
    other.close()


FIRST_START = """
import sys
from pathlib import Path
from honed.daemon.process.serve import run
from honed.daemon.settings.settings import load
folder, runtime_dir = map(Path, sys.argv[1:])
(folder / "state").mkdir()
try:
    (folder / "ballast").write_bytes(bytes(1 << 21))
except OSError as error:
    assert error.errno == 28
settings = load(None, {"paths": {"state_dir": folder / "state", "runtime_dir": runtime_dir}, "http": {"metrics_listen": ""}})
print("code", run(settings))
"""


@pytest.mark.fault("a first start on a full disk")
def test_a_first_start_on_a_full_disk_is_one_clear_line(folder: Path) -> None:
    # The number of its process, which the lock's file names for the next, ended it with a traceback.
    (folder / "disk").mkdir()
    said = run_on_tmpfs(folder / "disk", "1m", FIRST_START, str(folder / "disk"), str(folder / "run"))
    first, last = said.splitlines()
    assert first.startswith(f"honed: database {folder / 'disk' / 'state' / 'honed.db'}: ")
    assert "full" in first
    assert last == "code 2"


READ_ONLY = """
import subprocess, sys
from pathlib import Path
from honed.daemon.errors import StartError
from honed.daemon.process.serve import make_folder
folder = Path(sys.argv[1])
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
try:
    make_folder(folder, 0o750)
except StartError as error:
    print(error)
"""


def test_a_disk_that_was_mounted_read_only_is_named_as_such(folder: Path) -> None:
    (folder / "disk").mkdir()
    said = run_on_tmpfs(folder / "disk", "1m", READ_ONLY, str(folder / "disk"))
    assert said.startswith(f"folder {folder / 'disk'} is on a file system that is mounted read-only")
    assert "chown" not in said


def test_a_port_in_use_is_one_clear_line(daemon: DaemonProcess) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        daemon.env["HONED_HTTP__METRICS_LISTEN"] = f"127.0.0.1:{port}"
        assert f"127.0.0.1:{port}: Address already in use" in refused(daemon)
    assert not (daemon.runtime_dir / "admin.sock").exists()


def test_an_unknown_setting_is_named(daemon: DaemonProcess) -> None:
    daemon.env["HONED_STORE__MAX_RAW_BITES"] = "1"
    said = refused(daemon, 78)
    assert "unknown setting HONED_STORE__MAX_RAW_BITES in the environment; did you mean HONED_STORE__MAX_RAW_BYTES?" in said


@pytest.mark.parametrize(
    ("name", "says", "code"),
    [
        ("HONED_STATE_DIR", "can't be made", 2),
        ("HONED_RUNTIME_DIR", "longer than 107 bytes", 78),
        ("HONED_HTTP__METRICS_LISTEN", "isn't a loopback address", 78),
        ("HONED_LOG_LEVEL", "use one of debug", 78),
        ("HONED_TRAINER__DEVICE", "use auto, cpu, cuda, or cuda:N", 78),
        ("HONED_HTTP__METRICS_WEB_CONFIG", "web.yml isn't YAML", 78),
        ("HONED_HTTP__ADMIN_LISTEN", "needs an admin token", 78),
        ("HONED_REGISTRY__URL", "'s3://bucket/honed' can't be used: Install s3fs", 78),
    ],
)
@pytest.mark.fault("wrong settings that restart for ever")
def test_what_cannot_work_is_said(daemon: DaemonProcess, folder: Path, name: str, says: str, code: int) -> None:
    (folder / "file").write_text("")
    values = {
        "HONED_STATE_DIR": str(folder / "file" / "state"),
        "HONED_RUNTIME_DIR": str(folder / ("x" * 100)),
        "HONED_HTTP__METRICS_LISTEN": "0.0.0.0:9464",
        "HONED_LOG_LEVEL": "loud",
        "HONED_TRAINER__DEVICE": "cdua",
        "HONED_HTTP__METRICS_WEB_CONFIG": str(folder / "web.yml"),
        "HONED_HTTP__ADMIN_LISTEN": "127.0.0.1:0",
        "HONED_REGISTRY__URL": "s3://bucket/honed",
    }
    (folder / "web.yml").write_text("tls_server_config: [")
    (folder / "s3fs.py").write_text("raise ImportError('as if it were not installed')")
    daemon.env |= {"PYTHONPATH": f"{folder}:{daemon.env.get('PYTHONPATH', '')}", "HONED_HTTP__METRICS_LISTEN": "127.0.0.1:0"}
    daemon.env.pop("CREDENTIALS_DIRECTORY", None)
    daemon.env[name] = values[name]
    assert says in refused(daemon, code)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users reach, as pytest's own ones can't be."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.mark.fault("a folder or a file of another user's")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it becomes another user")
@pytest.mark.parametrize("foreign", ["run", "run/lock", "state", "state/lock", "state/honed.db", "state/registry"])
def test_what_belongs_to_another_user_is_one_clear_line(open_folder: Path, foreign: str) -> None:
    folder = open_folder
    for path in (folder / "run", folder / "state"):
        path.mkdir()
        os.chown(path, 61234, 61234)
    theirs = folder / foreign
    if foreign.endswith(("lock", "db")):
        theirs.write_text("")
    else:
        theirs.mkdir(exist_ok=True)
    os.chown(theirs, 0, 0)
    theirs.chmod(0o700)
    code = (  # all is imported first: that user may not read this Python
        "import os, logging.config, uvicorn.logging, honed.daemon.process.serve, honed.daemon.commands.main as m\n"
        "os.setgroups([]); os.setgid(61234); os.setuid(61234); m.main()"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("HONED_")}
    env |= {
        "HONED_RUNTIME_DIR": str(folder / "run"),
        "HONED_STATE_DIR": str(folder / "state"),
        "HONED_HTTP__METRICS_LISTEN": "",
    }
    made = subprocess.run(
        [sys.executable, "-c", code, "serve"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert made.returncode == 2, made.stderr
    line = made.stderr.strip().splitlines()[-1]
    assert line.startswith("honed: ")
    assert foreign.split("/")[-1] in line
    assert "Traceback" not in made.stderr


def test_a_daemon_killed_in_any_state_leaves_nothing_that_stops_the_next(daemon: DaemonProcess) -> None:
    for _ in range(2):
        daemon.start()
        daemon.end(signal.SIGKILL)
    daemon.start()
    assert daemon.end(signal.SIGTERM) == 0


def test_systemd_is_told(daemon: DaemonProcess, folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(folder / "notify"))
        manager.settimeout(30)
        daemon.env |= {"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "200000"}
        daemon.start()
        said = [manager.recv(100).decode() for _ in range(3)]
        assert said[0] == "READY=1"
        assert said[2] == "WATCHDOG=1"
        daemon.end(signal.SIGTERM)
        manager.setblocking(False)
        rest = []
        with contextlib.suppress(BlockingIOError):
            while True:
                rest.append(manager.recv(100))
        assert rest[-1] == b"STOPPING=1"


def test_the_log_is_json_and_holds_no_events(daemon: DaemonProcess) -> None:
    daemon.start()
    engine = daemon.engine()
    engine.hello()
    engine.send(engine.batch(1))
    engine.wait_acked(1)
    process = daemon.process
    assert process is not None
    assert process.stderr is not None
    process.terminate()
    lines = process.stderr.read().splitlines()
    process.wait(30)
    process.stderr.close()
    daemon.process = None
    assert {json.loads(line)["event"] for line in lines} >= {"serving", "engine says hello", "stopping"}
    assert json.loads(lines[-1])["event"] == "stopped", "so that nobody wonders whether it was killed on the way"


def failing_stderr(how: str) -> int:
    """A descriptor whose writes fail: a device that is always full, or a pipe whose reader has ended."""
    if how == "full":
        return os.open("/dev/full", os.O_WRONLY)
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.fault("a log that can't be written")
@pytest.mark.parametrize("how", ["full", "broken"])
def test_a_daemon_whose_log_cannot_be_written_serves_and_says_so(daemon: DaemonProcess, how: str) -> None:
    stderr = failing_stderr(how)
    daemon.start(stderr=stderr)
    os.close(stderr)
    engine = daemon.engine()
    engine.hello()
    engine.send(engine.batch(1))
    engine.wait_acked(1)
    with daemon.http() as client:
        assert client.put("/v1/overrides/draft_tokens", json={"value": 1, "ttl_s": 60}).is_success
        status = client.get("/v1/status").json()
        assert "honed_log_errors_total" in client.get("/metrics").text
    why = os.strerror(errno.ENOSPC if how == "full" else errno.EPIPE)
    assert (status["state"], status["log"]["errors"] > 0) == ("ok", True)
    assert any("log could not be written" in one.text and why in one.text for one in findings(status))
    assert daemon.end(signal.SIGTERM) == 0


@pytest.mark.fault("a log that can't be written")
def test_a_trainer_whose_log_cannot_be_written_works(daemon: DaemonProcess) -> None:
    daemon.start()
    stderr = failing_stderr("full")
    command = [sys.executable, "-m", "honed.daemon.commands.main", "train"]
    trainer = subprocess.Popen(command, env=daemon.env, stderr=stderr)
    os.close(stderr)

    def is_connected() -> bool:
        assert trainer.poll() is None
        with daemon.http() as client:
            return client.get("/v1/status").json()["trainer"] is not None

    try:
        wait_for(is_connected, "the trainer")
        trainer.terminate()
        assert trainer.wait(60) == 0
    finally:
        trainer.kill()
        trainer.wait()


@pytest.mark.fault("a log that can't be written")
@pytest.mark.parametrize("command", ["serve", "train"])
@pytest.mark.parametrize("how", ["full", "broken"])
def test_the_exit_code_says_that_a_start_failed_though_nothing_else_can(daemon: DaemonProcess, command: str, how: str) -> None:
    stderr = failing_stderr(how)
    words = [sys.executable, "-m", "honed.daemon.commands.main", command]
    environment = daemon.env | {"HONED_STORE__MAX_RAW_BITES": "1"}
    assert subprocess.run(words, env=environment, stderr=stderr, timeout=60, check=False).returncode == 78
    os.close(stderr)


def test_what_is_known_of_a_boot_survives_a_restart(daemon: DaemonProcess) -> None:
    daemon.start()
    engine = daemon.engine()
    engine.hello()
    engine.send(engine.batch(1))
    engine.wait_acked(1)
    daemon.end(signal.SIGKILL)
    daemon.start()
    engine.reconnect()
    assert engine.hello().committed_seq == 1
    with daemon.http() as client:
        assert client.get("/v1/engines").json()[0]["rounds"] == 8


def test_the_daemon_imports_no_torch() -> None:
    code = "import sys, honed.daemon.process.serve; print([m for m in ('torch', 'vllm', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ.copy())
    assert done.stdout.strip() == "[]"


def test_the_command_imports_nothing_heavy_before_it_is_needed() -> None:
    code = "import sys, honed.daemon.commands.main; print([m for m in ('numpy', 'torch', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ.copy())
    assert done.stdout.strip() == "[]"


def test_the_daemon_does_its_sums_on_one_core(daemon: DaemonProcess) -> None:
    """On two, of which others had one, fits took nine times as long, and engines were without a policy for seconds."""

    def num_threads(**changes: str) -> int:
        environment = {name: value for name, value in daemon.env.items() if not name.endswith("_NUM_THREADS")}
        command = [sys.executable, "-c", "from honed.daemon.commands.main import main; main()", "serve"]
        daemon.process = subprocess.Popen(command, env=environment | changes, stderr=subprocess.PIPE, text=True)
        wait_for(daemon.answers, "the daemon's answer")
        tasks = len(os.listdir(f"/proc/{daemon.process.pid}/task"))
        daemon.end(signal.SIGTERM)
        return tasks

    cores = len(os.sched_getaffinity(0))
    assert num_threads(OPENBLAS_NUM_THREADS="2") - num_threads() == min(cores, 2) - 1


def test_only_loopback_is_listened_on() -> None:
    for address in ("0.0.0.0:0", "[::]:0", "192.0.2.1:80"):
        with pytest.raises(SettingsError, match="loopback"):
            bind_tcp(address)
    for address in ("9464", "host:1", "127.0.0.1:x"):
        with pytest.raises(SettingsError, match="host:port"):
            bind_tcp(address)
    with pytest.raises(SettingsError):
        bind_tcp("127.0.0.1:99999")
    bind_tcp("localhost:0").close()


@pytest.mark.fault("wrong settings that restart for ever")
@pytest.mark.parametrize(("number", "kind"), [(errno.EACCES, SettingsError), (errno.EADDRNOTAVAIL, StartError)])
def test_a_port_that_is_roots_stays_so_and_an_address_may_still_come(
    number: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(listener: socket.socket, address: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(kind, match=os.strerror(number)):
        bind_tcp("127.0.0.1:80")


def test_a_folder_that_others_may_have_made_first_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In /tmp, to be given the sockets that go there."""
    shared, folder = tmp_path / "tmp", tmp_path / "tmp" / "honed-1000"
    shared.mkdir()
    shared.chmod(0o1777)
    make_folder(folder, 0o750)
    make_folder(folder, 0o750)
    folder.chmod(0o777)
    with pytest.raises(StartError, match="made by another user"):
        make_folder(folder, 0o750)
    shared.chmod(0o777)
    make_folder(folder, 0o750)  # a volume that is given to a container
    folder.chmod(0o750)
    shared.chmod(0o1777)
    if os.getuid() == 0:  # whose folders are anybody's to use
        os.chown(folder, 12345, -1)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(StartError, match="made by another user"):
        make_folder(folder, 0o750)


def test_a_lock_is_its_owners_alone(tmp_path: Path) -> None:
    """Anybody in the group could hold it, and keep the daemon from starting again."""
    (tmp_path / "lock").write_text("")
    (tmp_path / "lock").chmod(0o640)
    for name in ("lock", "new"):
        with locked(tmp_path / name):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("number", ["", "x", "1", "4194304"])
def test_a_process_that_is_none_of_honeds_is_not_to_be_killed(tmp_path: Path, number: str) -> None:
    """The file still has the number of the daemon that ended; another process may have it by now."""
    path = tmp_path / "lock"
    with path.open("w") as file:
        file.write(number)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StartError, match=r"another process holds .*: stop it ") as caught, locked(path):
            pass
    assert "kill" not in str(caught.value)


def test_a_lock_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StartError, match="lock"), locked(tmp_path / "lock"):
        pass
    assert (tmp_path / "victim").read_text() == "kept"


def test_a_folder_for_engines_that_a_service_may_not_make_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`RestrictSUIDSGID` refuses the bit. What is half made would be left as it is by the next start."""

    def refuse(self: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(self))

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(StartError, match="install -d -m 2770"):
        make_engines_folder(tmp_path / "engines")
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize("library", ["", "another"])
def test_threads_take_turns_often_whatever_the_c_library(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if library:
        monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    before = sys.getswitchinterval()
    try:
        serve.prepare_threads()
        assert sys.getswitchinterval() == pytest.approx(serve.SWITCH_INTERVAL_S)
    finally:
        sys.setswitchinterval(before)
