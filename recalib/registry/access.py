"""Whether another user may read a file that this process has opened, or has made a folder that it is about to use.

An engine names the folder of its drafter, and the registry keeps a copy that the whole group can read. So the copy must not
give away a file that the engine's user can't read.
"""

from __future__ import annotations

import os
import pwd
import stat
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from honed.adapt.protocol.folder_owner import why_untrusted

OWN_FOLDER = "remove it, or set --runtime-dir or --state-dir (HONED_RUNTIME_DIR, HONED_STATE_DIR) to a folder of your own"
"""Cure for a folder that somebody else may have made."""


class User(NamedTuple):
    """A process's user, as the kernel tells it of a connection's other end."""

    uid: int
    gid: int

    @property
    def groups(self) -> set[int]:
        """All groups of the user, the process's own included."""
        try:
            return {self.gid, *os.getgrouplist(pwd.getpwuid(self.uid).pw_name, self.gid)}
        except KeyError:
            return {self.gid}


def check_readable(file: BufferedReader, user: User) -> None:
    """Check the modes of a file and of the folders above it; access lists don't count.

    Raises:
        PermissionError: the user can't read it.
    """
    if user.uid in (0, os.geteuid()):
        return
    path = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
    found = os.fstat(file.fileno())
    if not (_has(found, user, 4) and all(_has(folder.stat(), user, 1) for folder in path.parents)):
        raise PermissionError(13, f"user {user.uid}, whose engine names it, can't read it", str(path))


def check_owner(folder: Path) -> None:
    """Check that nobody else can have made a folder to be given what goes there. It may also be missing.

    Raises:
        ValueError: somebody else can.
    """
    try:
        found, parent = folder.lstat(), folder.parent.stat()
    except OSError:
        return
    if why := why_untrusted(folder, found.st_mode, found.st_uid, parent.st_mode, os.getuid()):
        raise ValueError(f"{why}: {OWN_FOLDER}")


def _has(found: os.stat_result, user: User, bit: int) -> bool:
    if found.st_uid == user.uid:
        return bool(stat.S_IMODE(found.st_mode) >> 6 & bit)
    if found.st_gid in user.groups:
        return bool(stat.S_IMODE(found.st_mode) >> 3 & bit)
    return bool(found.st_mode & bit)
