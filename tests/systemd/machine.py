"""A machine of its own for tests: systemd as PID 1 in a container over this machine's root (see boot.sh)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from honed.daemon.install.units import is_hidden
from tests.build_wheel import ROOT, build_wheel

BOOT = Path(__file__).with_name("boot.sh")
BESIDE = ("server", "tiny")
"""What of benchmarks/ the container needs."""


def why_not() -> str:
    """Why no machine can be booted here; "" when one can."""
    if os.geteuid() != 0:
        return "booting a container needs root"
    if not nspawn():
        return "systemd-nspawn is not installed (package systemd-container); HONED_TEST_NSPAWN may name one"
    if shutil.which("nsenter") is None or not Path("/lib/systemd/systemd").exists():
        return "systemd or nsenter is not installed"
    if not interpreter():
        return f"Python is in {sys.base_prefix}, which services don't see; python3.{sys.version_info[1]} of the system would do"
    return ""


def interpreter() -> str:
    """A Python of this release that a service with ProtectHome can run; "" where there is none."""
    own = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info[1]}"
    found = [own, Path("/usr/bin") / own.name]
    return next((str(path) for path in found if path.exists() and not is_hidden(path)), "")


def nspawn() -> str:
    return os.environ.get("HONED_TEST_NSPAWN") or shutil.which("systemd-nspawn") or ""


def stuff(folder: Path) -> Path:
    """What the container finds below /opt/test: the wheel, the tiny pair, a client."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())
    made = folder / "stuff"
    made.mkdir()
    names = ["src", *(path.name for path in (ROOT / "src" / "honed").iterdir() if path.is_symlink())]
    files = ["pyproject.toml", setup["project"]["readme"], *setup["project"]["license-files"]]
    wheel_folder = folder / "wheel"
    wheel_folder.mkdir()
    shutil.copy(build_wheel(wheel_folder, names, files), made)
    (made / "benchmarks").mkdir()
    for name in BESIDE:
        shutil.copytree(ROOT / "benchmarks" / name, made / "benchmarks" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return made


class Machine:
    """The booted container. Commands run in it as root; every wait has a deadline and shows the journal when it is over."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self._popen, self._log = popen, log
        self._init = 0

    def wait_booted(self, timeout_s: float = 180.0) -> None:
        def is_up() -> bool:
            assert self._popen.poll() is None, self._log.read_text()
            self._init = self._init or self._find_init()
            asked = ("systemctl", "is-active", "multi-user.target")
            return bool(self._init) and self.run(*asked, check=False).stdout == "active\n"

        wait_until(is_up, timeout_s, lambda: f"a boot; {self._log.read_text()}")

    def _find_init(self) -> int:
        children = Path(f"/proc/{self._popen.pid}/task/{self._popen.pid}/children")
        for pid in children.read_text().split() if children.exists() else ():
            fields = Path(f"/proc/{pid}/status").read_text()
            if any(line.startswith("NSpid:") and line.split()[-1] == "1" for line in fields.splitlines()):
                return int(pid)
        return 0

    def run(
        self, *command: str, check: bool = True, timeout_s: float = 120.0, units: Iterable[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the container; if it fails, the journal of these units is shown."""
        enter = ["nsenter", f"--target={self._init}", "--mount", "--uts", "--ipc", "--net", "--pid", "--"]
        env = {"PATH": "/opt/honed/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"}
        given: dict[str, Any] = {"env": env | {"SYSTEMD_PAGER": ""}, "stdin": subprocess.DEVNULL, "timeout": timeout_s}
        done = subprocess.run([*enter, *command], capture_output=True, text=True, check=False, **given)
        if check and done.returncode:
            said = "\n".join([done.stdout, done.stderr, *map(self.journal, units)])
            raise AssertionError(f"{' '.join(command)} ended with {done.returncode}\n{said}")
        return done

    def honed(self, *arguments: str, timeout_s: float = 120.0) -> Any:
        """The JSON that a `honed` command prints."""
        return json.loads(self.run("honed", *arguments, "--json", timeout_s=timeout_s).stdout)

    def python(self, program: str, timeout_s: float = 300.0) -> Any:
        """Run a Python program in /opt/honed's environment, beside the benchmarks; the JSON of its last line."""
        path = "/opt/test"
        done = self.run("env", f"PYTHONPATH={path}", "/opt/honed/bin/python", "-c", program, timeout_s=timeout_s)
        return json.loads(done.stdout.splitlines()[-1])

    def write(self, path: str, text: str, mode: str = "0644") -> None:
        """Make a file in the container."""
        program = f"import os, sys; p = {path!r}; os.makedirs(os.path.dirname(p), exist_ok=True); open(p, 'w').write({text!r})"
        self.run("/opt/honed/bin/python", "-c", program)
        self.run("chmod", mode, path)

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        done = self.run("systemctl", "show", unit, *(f"--property={name}" for name in names))
        return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)

    def journal(self, unit: str, lines: int = 40) -> str:
        """The last lines that a unit logged."""
        done = self.run("journalctl", "--no-pager", f"--unit={unit}", f"--lines={lines}", "--output=cat", check=False)
        return f"{unit}:\n{done.stdout}"

    def until(self, is_so: Callable[[], Any], what: str, timeout_s: float, *units: str) -> Any:
        """Wait until something is so, and return what it gave."""
        return wait_until(is_so, timeout_s, lambda: "\n".join([what, *map(self.journal, units)]))

    def stop(self) -> None:
        """Power off; what doesn't end by itself is ended."""
        if self._init:
            self.run("systemctl", "poweroff", check=False)
        try:
            self._popen.wait(90)
        except subprocess.TimeoutExpired:
            self._popen.terminate()
            try:
                self._popen.wait(10)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait(10)


def wait_until(is_so: Callable[[], Any], timeout_s: float, what: Callable[[], str]) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if found := is_so():
            return found
        time.sleep(0.5)
    raise AssertionError(f"waited {timeout_s:g} s in vain for {what()}")


@contextmanager
def booted(folder: Path) -> Iterator[Machine]:
    """A machine with honed's wheel in /opt/honed and nothing installed yet."""
    space, log = folder / "space", folder / "boot.log"
    space.mkdir()
    site = sysconfig.get_paths()["purelib"]
    arguments = [str(space), str(stuff(folder)), interpreter(), sys.executable, site, nspawn()]
    command = ["unshare", "--mount", "--propagation", "private", "sh", str(BOOT), *arguments]
    with log.open("wb") as output:
        popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    machine = Machine(popen, log)
    try:
        machine.wait_booted()
        yield machine
    finally:
        machine.stop()
