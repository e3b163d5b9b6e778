"""Files that exist completely or not at all, even after a crash.

The order guarantees it: write under a temporary name, fsync the file, rename, fsync the folder. A rename is atomic for readers.
On disk it can't overtake the data, because that was forced out first. A symbolic link has no data: file systems keep its text
with its name, so that it is whole without a sync.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

MAX_DOCUMENT_BYTES = 4 << 20
"""Longest configuration or manifest."""


def fsync_path(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes, mode: int = 0o640) -> None:
    """Replace the content of `path` with `data`: a reader, or a crash, sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)  # independent of the umask
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def replace_link(path: Path, text: str) -> None:
    """Make a symbolic link of a short `text`, or change it: a reader, or a crash, sees the old text or the new.

    It syncs nothing, so a crash of the machine may bring the old text back until `fsync_path` of the folder.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.symlink_to(text)
    try:
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_folder(path: Path, mode: int = 0o750) -> None:
    """Make a folder and its parents; a new one gets `mode` despite the umask, and keeps an inherited setgid bit."""
    if path.is_dir():
        return
    make_folder(path.parent, mode)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
        return  # another process made it first, and has set the mode
    path.chmod(mode | path.stat().st_mode & 0o2000)


def open_regular(path: Path) -> BufferedReader:
    """Open a file that others may have made: a pipe could block for ever. Raises OSError if it is no regular file.

    Others may have named it, too: a name that no file can have is OSError.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a NUL, or half a surrogate
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(fd, "rb")


def is_missing(path: Path) -> bool:
    """Return whether nothing is at a path. What this user may not look for isn't missing: who opens it hears why."""
    try:
        return not path.exists()
    except OSError:
        return False


def read_document(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Read a file that should be short. Raises OSError: it can't be read, is longer, or is no regular file."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"longer than {max_bytes} bytes", str(path))
    return data


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, as hex. Raises OSError: it can't be read, or is no regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock of a lock file; the kernel releases it when the holder dies.

    Every call opens the file again, so threads of one process exclude each other as well.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # who may open it may hold it for ever
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
