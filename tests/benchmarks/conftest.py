"""The benchmarks are scripts that import each other by name, so their folder has to be on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
