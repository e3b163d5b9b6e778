"""Keeps hypothesis from measuring time: on a busy machine an example may take long.

Reports name the faults that their tests are about, see faults.py. Proofs run when HONED_TEST_PROOFS is set.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

for name in ("COLUMNS", "LINES"):  # pytest's parallel processes have them; output in pipes is as wide as its content without
    os.environ.pop(name, None)
settings.register_profile("honed", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("honed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("proof") and not os.environ.get("HONED_TEST_PROOFS"):
            item.add_marker(pytest.mark.skip(reason="half a minute of statistics: make test-proofs"))
        item.user_properties += [("fault", mark.args[0]) for mark in item.iter_markers("fault")]
