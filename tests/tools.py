"""Programs that some tests need: from HONED_TEST_TOOLS, from what `make test-observability` fetched, or from PATH."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FETCHED = ROOT / "build" / "tools" / "bin"


def tool(name: str) -> str | None:
    """Where a program is; None when it can't be found."""
    folders = [os.environ.get("HONED_TEST_TOOLS", ""), str(FETCHED), os.environ.get("PATH", "")]
    return shutil.which(name, path=os.pathsep.join(folder for folder in folders if folder))


def path_of(name: str) -> str:
    """Where a program is, which a `needs` has made sure of."""
    found = tool(name)
    assert found is not None, name
    return found


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip a test where one of these programs is missing."""
    missing = [name for name in names if tool(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}: `make test-observability` fetches them")
