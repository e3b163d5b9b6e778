"""A folder that this process may not enter, whoever runs the tests: root may enter everything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def shut_out(folder: Path) -> Iterator[None]:
    """Close a folder to everybody meanwhile. Then no new module of root's Python may be found."""
    user = os.geteuid()
    folder.chmod(0)
    try:
        os.seteuid(user or 65534)
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o700)
