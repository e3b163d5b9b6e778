"""Makes `simulate` importable for the tests of this folder, and keeps hypothesis from measuring time."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("honed", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("honed")
