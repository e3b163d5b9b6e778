"""Installs, updates and removes the units.

Guarantee: a file that someone else wrote or changed is always listed, and replaced or removed only on request. `RECORD` keeps
the SHA-256 of the files we wrote. Nothing here starts or stops a service; only the command `uninstall` stops them before it
removes their units.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Literal

from honed.daemon.errors import HonedError

SOURCES = files("honed") / "systemd"
RECORD = "/etc/honed/installed.json"
DEFAULT_PREFIX = Path("/opt/honed")
COPY = ".before-honed"
"""Suffix of the copy of a replaced file."""
UNIT_FOLDERS = ("/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system", "/lib/systemd/system")
_DROP_IN = re.compile(r"/etc/systemd/system/(.+\.service)\.d/honed\.conf")
HIDDEN_FROM_UNITS = (Path("/home"), Path("/root"), Path("/tmp"), Path("/var/tmp"))
"""Folders hidden from the services by ProtectHome and PrivateTmp."""

State = Literal["new", "same", "update", "changed", "settings", "ours", "gone", "kept"]
"""new: absent so far; same: nothing to do; update: our own older file; changed: changed by someone else; settings: the
operator's existing settings; ours, gone: for removal; kept: the copy of a replaced file."""


class InstallError(HonedError, OSError):
    """The files can't be installed."""


@dataclass(frozen=True, slots=True)
class Item:
    """One file: its path, its new content and its present content."""

    path: str
    state: State
    text: str = ""
    present: str = ""

    @property
    def diff(self) -> str:
        """Diff of the change; "" for a new file."""
        if self.state not in ("update", "changed", "settings") or self.present == self.text:
            return ""
        lines = (self.present.splitlines(True), self.text.splitlines(True))
        return "".join(difflib.unified_diff(*lines, fromfile=self.path, tofile=f"{self.path} (honed's)"))


@dataclass(frozen=True, slots=True)
class Place:
    """Target place.

    Args:
        root: folder used as "/"; differs for tests and images.
        prefix: the environment whose `bin/honed` the units start.
        vllm_unit: the unit that gets a drop-in, besides those that have one of ours; "": none.
    """

    root: Path = Path("/")
    prefix: Path = DEFAULT_PREFIX
    vllm_unit: str = ""

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    @property
    def is_live(self) -> bool:
        """True for the running system."""
        return self.root == Path("/")

    @property
    def has_systemd(self) -> bool:
        """True for a running system that systemd has booted: sd_booted(3)."""
        return self.is_live and self.at("/run/systemd/system").is_dir()


def texts(place: Place) -> dict[str, tuple[str, bool]]:
    """Path -> (content, whether the operator owns the file after its creation). Raises InstallError."""
    units = "/etc/systemd/system"
    wanted = {
        "/etc/sysusers.d/honed.conf": ("honed.sysusers.conf", False),
        "/etc/tmpfiles.d/honed.conf": ("honed.tmpfiles.conf", False),
        f"{units}/honed.service": ("honed.service", False),
        f"{units}/honed-trainer.service": ("honed-trainer.service", False),
        "/etc/honed/honed.env": ("honed.env", True),
        "/etc/honed/honed.toml": ("honed.toml", True),
    }
    command = f"{DEFAULT_PREFIX}/bin/honed"
    found = {
        path: ((SOURCES / name).read_text().replace(command, in_unit(place.prefix / "bin" / "honed")), is_theirs)
        for path, (name, is_theirs) in wanted.items()
    }
    for unit in dict.fromkeys([*filter(None, [place.vllm_unit]), *_units_with_drop_in(place)]):
        found[f"{units}/{unit}.d/honed.conf"] = (drop_in(unit, has_id=_has_engine_id(place, unit)), False)
    return found


def in_unit(program: Path) -> str:
    """A program's path as a unit's ExecStart= takes it. Raises InstallError for one that systemd doesn't start."""
    text = str(program)
    if any(sign in "\"'\\$" or not sign.isprintable() for sign in text):
        cure = f"Install honed into a folder without such signs, such as {DEFAULT_PREFIX}, and give it as --prefix."
        raise InstallError(
            f"systemd starts no program with quotes, \\, $ or control characters in its path: {text!r}", cure=cure
        )
    text = text.replace("%", "%%")
    return f'"{text}"' if " " in text else text


def _units_with_drop_in(place: Place) -> list[str]:
    """vLLM's units that earlier installations gave a drop-in, if it is still there. Raises InstallError."""
    found = {path: _DROP_IN.fullmatch(path) for path in read_record(place)}
    return [match[1] for path, match in found.items() if match and place.at(path).exists()]


def _has_engine_id(place: Place, unit: str) -> bool:
    """Whether a vLLM unit, or another drop-in of it, sets an engine id."""
    folders = [place.at(folder) for folder in UNIT_FOLDERS]
    paths = [folder / name for folder in folders for name in _names_of(unit)]
    paths += [
        path for one in list(paths) for path in one.with_name(f"{one.name}.d").glob("*.conf") if path.name != "honed.conf"
    ]
    return any("HONED_ENGINE_ID=" in (_read(path) or "") for path in paths)


def _names_of(unit: str) -> list[str]:
    """A unit's name, and that of the template that it is an instance of."""
    return list(dict.fromkeys((unit, re.sub(r"@.*(?=\.service$)", "@", unit))))


def drop_in(vllm_unit: str, *, has_id: bool = False) -> str:
    """Make the drop-in of a vLLM unit. A unit that isn't `vllm.service` gets an engine id: a host may have several.

    Args:
        has_id: whether the unit sets an engine id itself.
    """
    text = (SOURCES / "vllm-honed.conf").read_text().replace("vllm.service", vllm_unit)
    if vllm_unit == "vllm.service" or has_id:
        return text
    stem = vllm_unit.removesuffix(".service")
    engine_id = re.sub(r"[^A-Za-z0-9_.-]", "-", stem) + ("%i" if stem.endswith("@") else "")
    return f'{text}Environment="HONED_ENGINE_ID={engine_id}"\n'


def plan(place: Place) -> list[Item]:
    """Plan of an installation, file by file. Raises InstallError."""
    written = read_record(place)
    items = []
    for path, (text, is_theirs) in texts(place).items():
        present = _read(place.at(path))
        state: State
        if present is None:
            state = "new"
        elif present == text:
            state = "same"
        elif is_theirs:
            state = "settings"
        else:
            state = "update" if _sha256(present) == written.get(path) else "changed"
        items.append(Item(path, state, text, present or ""))
    return items


def apply(place: Place, items: list[Item], *, overwrite: bool = False) -> list[str]:
    """Write the files of `plan`; return their paths. `overwrite` also replaces changed files, kept as NAME.before-honed.

    Raises:
        InstallError: no right to write, no space.
    """
    written, record = [], read_record(place)
    try:
        for item in items:
            if item.state == "changed" and overwrite:
                _write(place.at(f"{item.path}{COPY}"), item.present)
            elif item.state not in ("new", "update"):
                if item.state == "same":
                    record[item.path] = _sha256(item.text)
                continue
            _write(place.at(item.path), item.text)
            record[item.path] = _sha256(item.text)
            written.append(item.path)
        _write(place.at(RECORD), json.dumps(record, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise _refused(error) from error
    return written


def plan_removal(place: Place) -> list[Item]:
    """Plan of a removal: `ours` is removed; `changed`, `settings` and `kept` (copies of replaced files) stay."""
    items = []
    for path, sha256 in sorted(read_record(place).items()):
        present = _read(place.at(path))
        state: State
        if present is None:
            state = "gone"
        elif path.startswith("/etc/honed/"):
            state = "settings"
        else:
            state = "ours" if _sha256(present) == sha256 else "changed"
        items.append(Item(path, state, present=present or ""))
        if (copy := _read(place.at(f"{path}{COPY}"))) is not None:
            items.append(Item(f"{path}{COPY}", "kept", present=copy))
    return items


def remove(place: Place, items: list[Item]) -> list[str]:
    """Delete our unchanged files; return their paths. Raises InstallError."""
    deleted = []
    try:
        for item in items:
            if item.state == "ours":
                path = place.at(item.path)
                path.unlink()
                deleted.append(item.path)
                if path.parent.name.endswith(".service.d") and not any(path.parent.iterdir()):
                    path.parent.rmdir()
        kept = {item.path: _sha256(item.present) for item in items if item.state == "settings"}
        if kept:
            _write(place.at(RECORD), json.dumps(kept, indent=2, sort_keys=True) + "\n")
        else:
            place.at(RECORD).unlink(missing_ok=True)
    except OSError as error:
        raise _refused(error) from error
    return deleted


def has_unit(place: Place, name: str) -> bool:
    """True if a unit of that name is installed, or the template that it is an instance of."""
    return any(place.at(f"{folder}/{one}").exists() for folder in UNIT_FOLDERS for one in _names_of(name))


def obstacles(place: Place) -> Iterator[str]:
    """Yield reasons why services would not start after the installation."""
    if place.vllm_unit and not has_unit(place, place.vllm_unit):
        yield f"there is no {place.vllm_unit}: its drop-in has no effect yet (--vllm-unit names another, - none)"
    command = place.prefix / "bin" / "honed"
    python = (place.at(str(place.prefix)) / "bin" / "python").resolve()
    if is_hidden(place.prefix):
        yield f"{place.prefix} is hidden from the services (ProtectHome, PrivateTmp): install honed into {DEFAULT_PREFIX}"
    elif not place.at(str(command)).exists():
        yield f"{command} does not exist: install honed there (`python3 -m venv {quote(str(place.prefix))}`), or give --prefix"
    elif closed := next((path for path in (*reversed(command.parents), command) if not _is_open(place, path)), None):
        yield (
            f"only root can use {closed}, so the user honed can't start {command} (a umask of 027 or 077 makes such folders): "
            f"`chmod -R a+rX {quote(str(place.prefix))}`"
        )
    elif place.is_live and is_hidden(python):
        yield (
            f"the Python of {place.prefix} is {python}, which is hidden from the services (ProtectHome): make the environment "
            f"with the system's (`/usr/bin/python3 -m venv {place.prefix}`)"
        )


def _is_open(place: Place, path: Path) -> bool:
    """True if every user can enter a folder, or run a program."""
    return place.at(str(path)).stat().st_mode & 0o001 != 0


def is_hidden(path: Path) -> bool:
    """True if a service set up like ours can't see a path."""
    return any(path.is_relative_to(folder) for folder in HIDDEN_FROM_UNITS)


def read_record(place: Place) -> dict[str, str]:
    """Path -> SHA-256 of our content. Raises InstallError for an unreadable record."""
    text = _read(place.at(RECORD))
    if text is None:
        return {}
    try:
        found = json.loads(text)
        return {str(path): str(sha256) for path, sha256 in found.items()}
    except (ValueError, AttributeError) as error:
        cure = "Move it away: existing files then count as changed by you."
        raise InstallError(f"{place.at(RECORD)} is damaged ({error})", cure=cure) from error


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it isn't text"
        raise InstallError(f"{path} can't be read: {why}", cure="Move it away, or run this as root.") from error


def _write(path: Path, text: str) -> None:
    """Write all or nothing: a truncated unit file must never be loaded."""
    name = ""
    try:
        missing = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            folder.chmod(0o755)  # whatever the umask: systemd leaves a folder's mode alone, and the services read theirs
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o644)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError as error:
        if name:
            Path(name).unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _refused(error: OSError) -> InstallError:
    cures = {
        errno.ENOSPC: f"Make room on the disk of {error.filename}, and run it again.",
        errno.EROFS: f"Mount the file system of {error.filename} for writing, and run it again.",
    }
    cure = (
        "Run it as root: `sudo honed install --apply`."
        if isinstance(error, PermissionError)
        else cures.get(error.errno or 0, "")
    )
    return InstallError(f"{error.filename} can't be written: {error.strerror}", cure=cure)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
