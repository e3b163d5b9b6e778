"""One run of everything real, which all of these tests look at. It takes minutes, so it has a make target of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.observability import stack as stack_module
from tests.observability.stack import Stack
from tests.tools import tool

PROGRAMS = ("prometheus", "promtool", "alertmanager", "chromium")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in PROGRAMS if tool(name) is None]
    for item in items:
        if Path(__file__).parent in item.path.parents and (missing or not os.environ.get("HONED_TEST_OBSERVABILITY")):
            item.add_marker(pytest.mark.skip(reason="minutes long: make test-observability"))


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Traffic, then a day's events in a few minutes: override, training, a bad version that is rolled back, drift."""
    # In memory, as honed wants its runtime directory; a short path, since a socket's may have 107 bytes.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="honed-", dir=memory, ignore_cleanup_errors=True) as runtime_dir,
        tempfile.TemporaryDirectory(prefix="honed-o-", ignore_cleanup_errors=True) as folder,
        stack_module.running(Path(folder), Path(runtime_dir)) as running,
    ):
        yield running
