"""Checks of this machine: SQLite, folders and their modes, sockets, the trainer's needs."""

from __future__ import annotations

import os
import socket
import stat
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from honed.daemon.doctor.check import Check
from honed.daemon.settings.filesystem import IN_MEMORY, filesystem_of, folder_in_memory
from honed.daemon.settings.settings import Settings
from honed.recalib.config.compiler import c_compiler, lacks_for_kernels

DRIVER = "/dev/nvidiactl"


def check_host(settings: Settings) -> Iterator[Check]:
    """Run all checks that need no other process."""
    yield from check_sqlite()
    paths = settings.paths
    yield from check_folder("state directory", paths.state_dir)
    yield from check_folder("runtime directory", paths.runtime_dir)
    yield from check_in_memory(paths.runtime_dir)
    yield from check_engines_folder(paths.runtime_dir / "engines")
    yield from check_socket("admin socket", paths.admin_socket)
    yield from check_socket("engine socket", paths.engine_socket)


def check_sqlite() -> Iterator[Check]:
    """Check that the daemon's SQLite has no known corruption bug; nothing where honed is installed for vLLM alone."""
    if find_spec("sqlite_utils") is None:
        return
    from honed.daemon.errors import StartError
    from honed.daemon.store.database import check_sqlite_version

    try:
        import pysqlite3 as sqlite3
    except ImportError as error:
        yield Check("SQLite", "error", f"pysqlite3 can't be loaded: {error}", "pip install --force-reinstall pysqlite3")
        return
    try:
        check_sqlite_version(sqlite3.sqlite_version_info)
    except StartError as error:
        yield Check("SQLite", "error", str(error), "pip install --upgrade pysqlite3")
    else:
        yield Check("SQLite", "ok", f"{sqlite3.sqlite_version}, which has no known way to corrupt a database")


def check_folder(subject: str, path: Path) -> Iterator[Check]:
    """Check that a folder exists and only its owner and group may enter."""
    try:
        found = path.stat()
    except FileNotFoundError:
        yield Check(subject, "warning", f"{path} doesn't exist", "`honed serve`, or the service, makes it at the first start.")
        return
    except OSError as error:
        yield Check(subject, "unknown", f"{path}: {error.strerror}", "Run `sudo honed doctor`, or join the group honed.")
        return
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        yield Check(subject, "error", f"{path} isn't a folder", f"Move {path} away; honed makes the folder.")
    elif mode & 0o007:
        text = f"{path} has mode {mode:04o}: any user of this machine can read prompts from samples"
        is_ours = found.st_uid == os.geteuid() or not os.path.ismount(path)
        below = f"Use a folder below this volume's own, such as {path / 'private'}: honed makes it, closed to others."
        yield Check(subject, "error", text, f"chmod o= {path}" if is_ours else below)
    else:
        yield Check(subject, "ok", f"{path}, mode {mode:04o}")


def check_in_memory(runtime_dir: Path) -> Iterator[Check]:
    """Check that samples stay off the disk."""
    filesystem = filesystem_of(runtime_dir)
    if filesystem and filesystem not in IN_MEMORY:
        text = f"{runtime_dir} is on {filesystem}: samples, which reveal prompts, reach the disk"
        cure = f"Set HONED_RUNTIME_DIR to {folder_in_memory()}, for the daemon, the trainer and vLLM."
        yield Check("runtime directory", "warning", text, cure)


def check_engines_folder(path: Path) -> Iterator[Check]:
    """Check the folder in which vLLM's user makes its engines' folders: a service needs it group-writable and setgid."""
    try:
        found = path.stat()
    except OSError:
        return  # the first engine makes it if daemon and vLLM share a user
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o020 and not mode & stat.S_ISGID:
        text = f"{path} has mode {mode:04o}: folders that vLLM makes there lack the group, so the trainer can't read them"
        yield Check("engines' folders", "error", text, f"chmod g+s {path}, then restart vLLM; or `systemd-tmpfiles --create`.")
    else:
        yield Check("engines' folders", "ok", f"{path}, mode {mode:04o}")


def check_socket(subject: str, path: Path) -> Iterator[Check]:
    """Check that a daemon listens on a socket, and who may connect."""
    try:
        found = path.stat().st_mode
    except FileNotFoundError:
        cure = "Start the daemon: `systemctl start honed` or `honed serve`."
        yield Check(subject, "error", f"{path} doesn't exist: no daemon is running", cure)
        return
    except OSError as error:
        yield Check(subject, "unknown", f"{path}: {error.strerror}", "Run `sudo honed doctor`, or join the group honed.")
        return
    mode = stat.S_IMODE(found)
    if not stat.S_ISSOCK(found):
        yield Check(subject, "error", f"{path} isn't a socket", f"Move {path} away, then start the daemon; it makes one.")
        return
    if mode & 0o007:
        yield Check(subject, "error", f"{path} has mode {mode:04o}: every user may use it", f"chmod 0660 {path}")
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(2.0)
            probe.connect(str(path))
    except PermissionError:
        yield Check(subject, "unknown", f"this user may not use {path}", "usermod -aG honed USER, then log in again.")
    except ConnectionRefusedError:
        text = f"nobody listens on {path}: a killed daemon left it"
        yield Check(subject, "error", text, "Start it again: `systemctl restart honed` or `honed serve`.")
    except OSError as error:
        yield Check(subject, "error", f"{path}: {error}", "See `journalctl -u honed`.")
    else:
        yield Check(subject, "ok", f"{path}, mode {mode:04o}, answers")


def device_of(named: str) -> str:
    """The device that a trainer with this `trainer.device` tries first."""
    if named != "auto":
        return named
    return "cuda" if os.path.exists(DRIVER) else "cpu"


def check_torch(device: str, *, is_connected: bool = False) -> Iterator[Check]:
    """Check the trainer's device and PyTorch, without loading PyTorch.

    Args:
        is_connected: whether the daemon has a trainer, which may run in another container or environment.
    """
    if find_spec("torch") is None and is_connected:
        yield Check("trainer", "ok", "one is connected; it runs in another environment than this command")
    elif find_spec("torch") is None:
        cure = "pip install '/path/to/honed[train]'"
        yield Check("trainer", "warning", "PyTorch isn't installed here: nothing is retrained", cure)
    elif device.startswith("cuda") and not os.path.exists(DRIVER):
        text = f"trainer.device is {device}, and this machine shows no NVIDIA device ({DRIVER})"
        yield Check("trainer", "error", text, "Set trainer.device to cpu, or load the driver (`nvidia-smi`).")
    else:
        meant = device_of(device)
        if_so = " if a training fits there" if meant != device and meant != "cpu" else ""
        yield Check("trainer", "ok", f"PyTorch is there; trains on {meant}{if_so}")
        if meant.startswith("cuda"):
            yield check_compiler(Path(sysconfig.get_path("include")))


def check_compiler(headers: Path) -> Check:
    """Check that kernels can be compiled, with Python.h of this folder."""
    if lacks := lacks_for_kernels(headers):
        text = f"there is {' and '.join(lacks)}: training on CUDA must compile kernels and fails"
        cure = f"Debian: `apt install gcc python{sysconfig.get_python_version()}-dev`; other systems have similar names."
        return Check("trainer's compiler", "error", text, cure)
    return Check("trainer's compiler", "ok", f"{c_compiler()}, and Python's headers")
