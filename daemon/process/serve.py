"""The daemon's process: start in order, wait for a signal, stop in order.

Order of the start: folders, lock, database, registry, sockets, HTTP; then READY is sent to systemd. A failure on the way
gives one clear line on stderr and exit code 2, or 78 for wrong settings.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import os
import resource
import secrets
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO, cast

import structlog

from honed.adapt.protocol.folder_owner import why_untrusted
from honed.daemon.errors import EXIT_CONFIG, HonedError, SettingsError, StartError
from honed.daemon.log_stream import LogStream
from honed.daemon.process.http_server import HttpServer
from honed.daemon.process.notify import Notifier
from honed.daemon.process.supervise import supervise
from honed.daemon.service import Service
from honed.daemon.settings.settings import Settings, load
from honed.recalib.registry.access import OWN_FOLDER
from honed.recalib.registry.shared import UrlError

log = structlog.get_logger("honed.serve")

EXIT_USAGE = 2
OPEN_FILES = 8192
"""As the unit's LimitNOFILE."""
SWITCH_INTERVAL_S = 0.0005
"""Time after which a thread that computes lets a waiting one run."""
_M_ARENA_MAX = -8
"""glibc's number of this option of `mallopt`."""
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def run(settings: Settings, stop: threading.Event | None = None) -> int:
    """Serve until SIGTERM or SIGINT (or `stop`). Returns the exit code."""
    is_asked = stop or threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: is_asked.set())
    try:
        log_stream = configure_logging()
        faulthandler.enable()  # the watchdog's SIGABRT leaves every thread's stack in the journal
        os.umask(0o027)
        prepare_threads()
        raise_file_limit()
        with ExitStack() as stack:
            service, http = start_all(settings, stack, log_stream)
            collect_seldom()
            code = supervise(service, is_asked, Notifier(), http.problems)
        log.info("stopped", exit_code=code)
        return code
    except HonedError as error:
        return refuse(error)


def refuse(error: HonedError) -> int:
    """Say why the daemon can't start, if stderr can be written; returns the exit code."""
    with suppress(OSError):
        print(f"honed: {error}", file=sys.stderr)
    return EXIT_CONFIG if isinstance(error, SettingsError) else EXIT_USAGE


def prepare_threads() -> None:
    """Let threads take turns often, and share their memory.

    A batch's storing waits for the interpreter at each of its statements; Python's own interval is 5 ms. glibc keeps memory for
    each thread, and what one has freed isn't used by others.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def collect_seldom() -> None:
    """Make Python's garbage collector look at what is new, seldom at all of it: that holds up every thread for 0.15 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def start(settings: Settings, stack: ExitStack) -> Service:
    """Start everything; `stack` stops it in the opposite order. Raises SettingsError or StartError."""
    return start_all(settings, stack)[0]


def start_all(settings: Settings, stack: ExitStack, log_stream: LogStream | None = None) -> tuple[Service, HttpServer]:
    """Like `start`, but also return the HTTP server."""
    paths = settings.paths
    make_folder(paths.state_dir, 0o750)
    make_folder(paths.runtime_dir, 0o750)
    make_engines_folder(paths.runtime_dir / "engines")
    for folder in (paths.state_dir, paths.runtime_dir):
        stack.enter_context(locked(folder / "lock"))
    try:
        service = Service(settings, daemon_id=secrets.token_hex(8), log_stream=log_stream)
    except UrlError as error:
        raise SettingsError(str(error)) from error
    except (OSError, ValueError) as error:
        raise StartError(str(error)) from error
    stack.callback(service.stop)
    http = HttpServer(service, settings)
    http.bind()
    service.start()
    stack.callback(http.stop)
    http.start()
    return service, http


def raise_file_limit() -> None:
    """Allow this process as many open files as it needs, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_folder(path: Path, mode: int) -> None:
    """Make a folder and its parents. Raises StartError."""
    try:
        if not path.is_dir():
            path.mkdir(mode=mode, parents=True, exist_ok=True)
        found, parent = path.lstat(), path.parent.stat()
    except OSError as error:
        raise StartError(f"folder {path} can't be made: {error.strerror}") from error
    if why := why_untrusted(path, found.st_mode, found.st_uid, parent.st_mode, os.getuid()):
        raise StartError(f"{why}: {OWN_FOLDER}")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            raise StartError(
                f"folder {path} is on a file system that is mounted read-only, perhaps since a disk error (`dmesg`): "
                "mount it for writing, or set HONED_RUNTIME_DIR or HONED_STATE_DIR to another folder"
            )
        raise StartError(
            f"folder {path} belongs to user {found.st_uid}, with mode {stat.S_IMODE(found.st_mode):04o}, so user {os.getuid()} "
            f"can't write to it: `chown {os.getuid()} {path}`, or set HONED_RUNTIME_DIR or HONED_STATE_DIR to another folder"
        )


def make_engines_folder(path: Path) -> None:
    """Make the folder in which vLLM makes its engines' folders, perhaps as another user of the group. Raises StartError.

    Setgid, so that vLLM's folders there belong to the trainer's group. An existing folder is left unchanged.
    """
    if path.is_dir():
        return
    make_folder(path, 0o770)
    try:
        path.chmod(0o2770)  # mkdir ignores the setgid bit, and the umask removes the group's write right
    except OSError as error:
        path.rmdir()  # vLLM's user couldn't write to it, and the next start would leave it unchanged
        raise StartError(
            f"folder {path} can't be made with mode 2770, as a service may not ({error.strerror}): make it once, as root, with "
            f"`install -d -m 2770 -o honed -g honed {path}`; for each boot with a line in /etc/tmpfiles.d: "
            f"`d {path} 2770 honed honed`"
        ) from error


@contextmanager
def locked(path: Path, holders: str = "daemon", unit: str = "honed") -> Iterator[None]:
    """Hold a folder's lock until the end of the block or, however it ends, of the process.

    Args:
        holders: what holds this lock: the daemon, or the trainer.
        unit: the service that does.

    Raises:
        StartError: another process has it, or the file can't be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StartError(f"lock {path}: {error.strerror}") from error
    try:
        with suppress(PermissionError):  # another user's
            os.fchmod(descriptor, 0o600)  # who may open it may hold it for ever
        if os.geteuid() == 0 and os.fstat(descriptor).st_nlink == 1:  # no file of another's under a second name
            with suppress(OSError):  # what root makes mustn't lock out the folder's owner
                found = os.stat(path.parent)
                os.fchown(descriptor, found.st_uid, found.st_gid)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = f"another process holds {path}: stop it (`fuser -v {path}` names it)"
            if holder := _honed_process(os.pread(descriptor, 32, 0)):
                stop = f"`systemctl stop {unit}` or `kill {holder}`"
                text = f"another honed {holders} (process {holder}) uses {path.parent}: stop it ({stop})"
            raise StartError(
                f"{text}, or give this one its own folders with --state-dir and --runtime-dir, or HONED_STATE_DIR and "
                "HONED_RUNTIME_DIR"
            ) from error
        with suppress(OSError):  # a full disk: the number only helps whoever finds the lock held
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _honed_process(number: bytes) -> int:
    """The process that a lock file names, if it is alive and one of honed's; else 0."""
    try:
        process = int(number)
        is_other = process != os.getpid()  # in another container it may have our number
        return process if is_other and b"honed" in Path(f"/proc/{process}/cmdline").read_bytes() else 0
    except (OSError, ValueError):
        return 0


def configure_logging() -> LogStream:
    """Log JSON lines to stderr, for the journal; returns its stream. Raises SettingsError for an unknown HONED_LOG_LEVEL."""
    level = os.environ.get("HONED_LOG_LEVEL", "info").lower()
    if level not in LOG_LEVELS:
        raise SettingsError(f"HONED_LOG_LEVEL={level!r}: use one of {', '.join(LOG_LEVELS)}")
    stream = LogStream(sys.stderr)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, stream)),
        cache_logger_on_first_use=False,
    )
    return stream


def main() -> int:
    """`python -m honed.daemon.process.serve`: settings from file and environment only."""
    try:
        settings = load()
    except HonedError as error:
        return refuse(error)
    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
