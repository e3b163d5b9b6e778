"""Images and containers for tests: podman, with images made from packages, for no registry of images has to be reached."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.build_wheel import ROOT

HERE = Path(__file__).parent
DEPLOY = ROOT / "deploy"
PREFIX = "localhost/honed-test"
"""Of all images that the tests make. They stay, so that a second run builds only what changed."""
BASE_PACKAGES = (
    *("python3", "python3-venv", "python3-pip", "python3-dev", "gcc", "libc6-dev", "libgomp1", "libnuma1", "ca-certificates"),
    *("prometheus", "prometheus-alertmanager"),
)
SUITE = "bookworm"
CONF = """\
[engine]
{runtime}
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=8192:8192"]
"""


def why_not() -> str:
    """Why no containers can be run here; "" when they can."""
    if os.geteuid() != 0:
        return "making images from packages needs root"
    missing = [name for name in ("podman", "mmdebstrap") if shutil.which(name) is None]
    if find_spec("podman_compose") is None:
        missing.append("podman-compose")
    packages = "Debian: apt install podman runc netavark aardvark-dns iptables mmdebstrap"
    return f"not installed: {', '.join(missing)} ({packages})" if missing else ""


class Podman:
    """podman, as these tests set it up.

    Args:
        folder: for its configuration.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, conf = folder, folder / "containers.conf"
        # crun refuses machines whose control groups are of both versions; runc takes them.
        conf.write_text(CONF.format(runtime='runtime = "runc"' if shutil.which("runc") else ""))
        self.env = os.environ | {"CONTAINERS_CONF": str(conf)}

    def run(self, *arguments: str, timeout_s: float = 120.0, check: bool = True, text: str = "") -> str:
        """Standard output of `podman …`. Raises AssertionError with all output if it fails and `check`."""
        return called(["podman", *arguments], self.env, timeout_s, check=check, text=text)

    def has(self, image: str) -> bool:
        """Whether there is such an image."""
        done = subprocess.run(["podman", "image", "exists", image], env=self.env, check=False)
        return done.returncode == 0

    def make_images(self, folder: Path) -> dict[str, str]:
        """Build every image; the variables of compose.yaml that name them."""
        if not self.has(f"{PREFIX}/base"):
            self._bootstrap(folder)
        names = {"vllm": "VLLM_IMAGE", "prometheus": "PROMETHEUS_IMAGE", "alertmanager": "ALERTMANAGER_IMAGE"}
        for name in names:
            self.build(HERE / "Dockerfile", name, f"{PREFIX}/{name}", HERE)
        found = {variable: f"{PREFIX}/{name}" for name, variable in names.items()}
        bases = {"PYTHON_IMAGE": f"{PREFIX}/base", "VLLM_IMAGE": found["VLLM_IMAGE"]}
        for target, variable in (("honed", "HONED_IMAGE"), ("vllm", "VLLM_HONED_IMAGE")):
            found[variable] = f"{PREFIX}/{target}-built"
            self.build(DEPLOY / "Dockerfile", target, found[variable], ROOT, bases)
        return found

    def build(self, file: Path, target: str, tag: str, context: Path, args: Mapping[str, str] | None = None) -> None:
        """Build a target of a Dockerfile, with this machine's way to the package index."""
        given = [f"--build-arg={name}={value}" for name, value in (args or {}).items()]
        given += [f"--volume={volume}" for volume in pip_volumes(self._folder)]
        options = ["--layers", "--network=host", f"--file={file}", f"--target={target}", f"--tag={tag}"]
        self.run("build", *options, *given, str(context), timeout_s=1800)

    def _bootstrap(self, folder: Path) -> None:
        """The image that all others begin with, from Debian's packages."""
        tar, sources = folder / "base.tar", Path("/etc/apt/sources.list.d/debian.sources")
        mirror = [str(sources)] if sources.exists() and SUITE in sources.read_text() else []
        command = [
            "mmdebstrap",
            "--mode=root",
            "--variant=apt",
            f"--include={','.join(BASE_PACKAGES)}",
            SUITE,
            str(tar),
            *mirror,
        ]
        called(command, self.env, 900)
        self.run("import", "--quiet", str(tar), f"{PREFIX}/base", timeout_s=300)
        tar.unlink()


class Compose:
    """deploy/compose.yaml as a running project, out of a copy of its folder, on free ports.

    Args:
        podman: what runs the containers.
        folder: of the copy.
        environment: what a user writes to deploy/.env.
    """

    def __init__(self, podman: Podman, folder: Path, environment: Mapping[str, str]) -> None:
        self.podman, self._folder = podman, folder / "deploy"
        shutil.copytree(DEPLOY, self._folder, ignore=shutil.ignore_patterns("secrets", ".env"))
        shutil.copytree(ROOT / "dashboards", folder / "dashboards", ignore=shutil.ignore_patterns("make", "__pycache__"))
        (self._folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in environment.items()))
        env = podman.env | {"CONTAINERS": "podman"} | dict(environment)
        called([str(self._folder / "secrets.sh")], env, 60)
        self.password = (self._folder / "secrets" / "prometheus-password").read_text()
        self._project = f"honed-test-{os.getpid()}"

    def call(self, *arguments: str, timeout_s: float = 300.0, check: bool = True) -> str:
        """Standard output of `podman-compose …`."""
        files = ["-f", "compose.yaml", "-f", str(HERE / "compose.cpu.yaml")]
        command = [sys.executable, "-m", "podman_compose", "-p", self._project, *files, *arguments]
        return called(command, self.podman.env, timeout_s, check=check, cwd=self._folder)

    def container(self, service: str) -> str:
        """The name of a service's container."""
        return f"{self._project}_{service}_1"

    def inside(self, service: str, *command: str, timeout_s: float = 120.0, check: bool = True) -> str:
        """Standard output of a command in a service's container."""
        return self.podman.run("exec", self.container(service), *command, timeout_s=timeout_s, check=check)

    def logs(self, service: str) -> str:
        """The last that a service said."""
        return f"{service}:\n" + self.podman.run("logs", "--tail=40", self.container(service), check=False)

    def state(self, service: str) -> dict[str, Any]:
        """Its container's state, as podman has it."""
        found: dict[str, Any] = json.loads(self.podman.run("inspect", self.container(service)))[0]
        return found


def called(
    command: list[str],
    env: Mapping[str, str],
    timeout_s: float,
    *,
    check: bool = True,
    text: str = "",
    cwd: Path | None = None,
) -> str:
    """Run a command; its standard output, and what it said on the other in case it fails."""
    given: dict[str, Any] = {"env": dict(env), "timeout": timeout_s, "cwd": cwd, "input": text}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **given)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout if check else done.stdout + done.stderr


def pip_volumes(folder: Path) -> list[str]:
    """Volumes by which pip in a container finds packages as it does here: its configuration, and the files that this names."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    found = dict(line.split("=", 1) for line in said.splitlines() if not line.startswith(":env:"))
    values = {name.partition(".")[2]: ast.literal_eval(value) for name, value in found.items()}
    (folder / "pip.conf").write_text("\n".join(["[global]", *(f"{name} = {value}" for name, value in values.items())]) + "\n")
    words = " ".join(values.values()).split()
    named = {Path(word) for word in words if word.startswith("/")}
    named |= {
        Path(word.removeprefix("file://")).parent for word in words if word.startswith("file://")
    }  # its pages link to …/files
    return [f"{folder / 'pip.conf'}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in sorted(named) if path.exists())]


@contextmanager
def running(folder: Path, environment: Mapping[str, str], podman: Podman, services: list[str]) -> Iterator[Compose]:
    """The project, up; taken down with its volumes at the end."""
    compose = Compose(podman, folder, environment)
    try:
        compose.call("up", "--detach", "--no-build", *services)
        yield compose
    finally:
        compose.call("down", "--volumes", "--timeout", "60", check=False)
