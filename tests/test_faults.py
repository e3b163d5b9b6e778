"""The list that `make test-faults` reports on, and the marks of the tests."""

from __future__ import annotations

import re

from tests.faults import FAULTS, files
from tests.tools import ROOT


def test_every_marked_fault_is_in_the_list_and_has_a_test() -> None:
    marked = {name for path in files() for name in re.findall(r'mark\.fault\(\s*"([^"]+)"', (ROOT / path).read_text())}
    assert marked == set(FAULTS)
