"""Opens the database: required SQLite release, and settings of our connections."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pysqlite3 as sqlite3
from sqlite_utils import Database

from honed.daemon.errors import StartError
from honed.daemon.store.rollups import add_json

BROKEN_SQLITE = ((3, 7, 0), (3, 51, 2))
"""First and last release whose WAL reset can corrupt a database used by several connections."""

LEAST_FREE_BYTES = 1 << 20


def check_sqlite_version(version: tuple[int, int, int] = sqlite3.sqlite_version_info) -> None:
    """Refuse releases with the WAL-reset corruption bug. Raises StartError."""
    if BROKEN_SQLITE[0] <= version <= BROKEN_SQLITE[1]:
        text = ".".join(map(str, version))
        raise StartError(
            f"SQLite {text} can corrupt databases in WAL mode (fixed in 3.51.3); install the pysqlite3 wheel, which "
            "bundles a newer one"
        )


def connect(path: Path, synchronous: str = "FULL", *, read_only: bool = False) -> Database:
    """Open a connection with our settings. Any thread may use it, one at a time."""
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    connection = sqlite3.connect(uri, uri=True, check_same_thread=False, timeout=10.0)
    connection.row_factory = sqlite3.Row
    database = Database(connection)
    if not read_only:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA journal_size_limit = 67108864")
    connection.create_function("add_positions", 2, add_json, deterministic=True)
    return database


class Reader:
    """A read-only connection that threads share, one query at a time."""

    def __init__(self, path: Path) -> None:
        self._db, self._lock = connect(path, read_only=True), threading.Lock()

    def rows(self, sql: str, parameters: Any = ()) -> list[dict[str, Any]]:
        """Rows of a query, from the last committed state. Raises sqlite3.Error."""
        with self._lock:
            return [dict(row) for row in self._db.conn.execute(sql, parameters)]

    def close(self) -> None:
        """Wait for the query that runs, and close the connection."""
        with self._lock:
            self._db.close()


class DatabaseFiles:
    """The database's three files as they were when it was opened.

    SQLite writes on into a file that was deleted, and all of it is gone with the process.
    """

    def __init__(self, path: Path) -> None:
        self._paths = [f"{path}{suffix}" for suffix in ("", "-wal", "-shm")]
        self._identities = [_identity(name) for name in self._paths]

    def check(self) -> None:
        """Raises sqlite3.OperationalError if one was deleted or replaced."""
        for name, identity in zip(self._paths, self._identities, strict=True):
            if _identity(name) != identity:
                raise sqlite3.OperationalError(
                    f"{name} was deleted or replaced while honed ran, so nothing is stored: restart honed; engines keep "
                    "their events until then"
                )


def _identity(name: str) -> tuple[int, int] | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def why_not(error: sqlite3.Error, path: Path) -> str:
    """Cure for a database that can't be opened, as the end of a sentence; "" if unknown."""
    text = str(error)
    if "locked" in text or "busy" in text:
        return f"; another program is writing to it (`fuser {path}` names it): end it, or choose another --state-dir"
    if "unable to open" in text or "readonly" in text:
        return f"; {path.parent} must be a folder that this user can write to: `chown` it, or choose another --state-dir"
    if "not a database" in text or "malformed" in text:
        return "; move the file away: the daemon makes a new one; the drafters beside it stay"
    # SQLite reports an I/O error if its log can't grow.
    if ("I/O" in text or "full" in text) and shutil.disk_usage(path.parent).free < LEAST_FREE_BYTES:
        return f"; the disk of {path.parent} is full: free some space"
    return ""


def reader_cure(error: sqlite3.Error) -> str:
    """Cure for a database that can't be read, as a sentence; "" if unknown."""
    text = str(error)
    if "not a database" in text or "malformed" in text:
        return (
            "The file is damaged. Stop honed and move the file away: honed makes a new one. `sqlite3 FILE .recover` may save "
            "what it held."
        )
    if "unable to open" in text or "readonly" in text:
        return "You may lack the right to read it: try as the daemon's user, or sudo."
    if "locked" in text or "busy" in text:
        return "Another program holds it: try again."
    return ""
