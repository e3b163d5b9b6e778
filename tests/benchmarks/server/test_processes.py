"""Whatever a benchmark starts is gone when it ends; nothing else is touched."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.server.processes import ProcessError, Processes, free_port

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    """Alive and not just waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, timeout_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while is_alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not is_alive(pid)


def test_all_are_ended_when_the_block_is_left_by_an_exception(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Processes(tmp_path) as processes:  # noqa: PT012
        pids = [processes.start(name, ["sleep", "600"], os.environ).pid for name in ("one", "two")]
        raise KeyboardInterrupt
    assert all(gone(pid) for pid in pids)


def test_sigterm_ends_a_benchmark_as_ctrl_c_does(tmp_path: Path) -> None:
    """A benchmark that was killed left its daemon and its attackers behind, and they spoiled what was measured next."""
    program = f"""
import os, signal
from pathlib import Path
from benchmarks.server.processes import Processes
with Processes(Path({str(tmp_path)!r})) as processes:
    print(processes.start("one", ["sleep", "600"], os.environ).pid, flush=True)
    signal.pause()
"""
    benchmark = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert benchmark.stdout is not None
    child = int(benchmark.stdout.readline())
    benchmark.terminate()
    assert benchmark.wait(60) != 0
    assert gone(child)
    benchmark.stdout.close()


def test_a_program_that_ignores_sigterm_goes_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.server.processes.STOP_S", 0.3)
    with Processes(tmp_path) as processes:
        child = processes.start("stubborn", [sys.executable, "-c", STUBBORN], os.environ)
        child.wait_until(lambda: child.log.read_text().endswith("\n"), 30.0, "pid")
        grandchild = int(child.log.read_text())
        assert processes.stop(child) == -signal.SIGKILL
    assert gone(child.pid)
    assert gone(grandchild)


def test_children_left_by_a_program_that_ended_are_swept_up(tmp_path: Path) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    with Processes(tmp_path) as processes:
        child = processes.start("parent", [sys.executable, "-c", program], os.environ)
        child.popen.wait(30)
        orphan = int(child.log.read_text())
        assert is_alive(orphan)
    assert gone(orphan)


def test_what_is_left_by_a_program_has_time_to_tidy_up(tmp_path: Path) -> None:
    """As Python's resource tracker, which gives shared memory back once the program has gone: half a second's work here."""
    tidy = (
        "import hashlib, pathlib, signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\n"
        "sys.stdin.read()\n"  # to its end, which is the program's
        "hashlib.pbkdf2_hmac('sha256', b'', b'', 1_500_000)\npathlib.Path(sys.argv[1]).touch()"
    )
    program = (
        "import signal, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], stdin=subprocess.PIPE)\nsignal.pause()"
    )
    with Processes(tmp_path) as processes:
        child = processes.start("sharing", [sys.executable, "-c", program, tidy, str(tmp_path / "tidied")], os.environ)
        child.wait_until(lambda: child.log.read_text().endswith("\n"), 30.0, "ready")
        processes.stop(child)
    assert (tmp_path / "tidied").exists()


def test_what_it_did_not_start_is_left_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        with Processes(tmp_path) as processes:
            processes.start("ours", ["sleep", "600"], os.environ)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_an_early_end_is_told_with_the_end_of_the_log(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        child = processes.start("broken", [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"], os.environ)
        with pytest.raises(ProcessError, match=r"(?s)exit code 3.*no such model"):
            child.wait_until(lambda: False, 30.0, "answer")
        with pytest.raises(ProcessError, match="broken"):
            processes.check()


def test_waiting_is_bounded(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        child = processes.start("slow", ["sleep", "600"], os.environ)
        with pytest.raises(ProcessError, match=r"no answer after 0\.2 s"):
            child.wait_until(lambda: False, 0.2, "answer")


def test_the_environment_is_exactly_the_given_one(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        child = processes.start("env", ["/usr/bin/env"], {"ONLY": "this"})
        child.popen.wait(30)
        assert child.log.read_text().strip() == "ONLY=this"


def test_cpu_time_is_that_of_all_its_processes(tmp_path: Path) -> None:
    busy = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with Processes(tmp_path) as processes:
        idle = processes.start("idle", ["sleep", "600"], os.environ)
        parent = processes.start("busy", [sys.executable, "-c", busy], os.environ)
        parent.wait_until(lambda: parent.cpu_seconds() > 0.3, 60.0, "work")
        assert idle.cpu_seconds() < 0.1


def test_a_free_port_can_be_bound() -> None:
    assert 1024 <= free_port() < 65536
