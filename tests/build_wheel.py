"""A wheel of a copy of the sources: building leaves folders behind in the tree that it builds from."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build_wheel(folder: Path, names: Iterable[str], files: Iterable[str]) -> Path:
    """Build it into `folder` out of the checkout's folders `names` and top-level `files`."""
    source = folder / "source"
    source.mkdir()
    for name in sorted(names):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in files:
        shutil.copy(ROOT / name, source / name)
    done = pip_wheel(source, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("honed-*.whl"))


def pip_wheel(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Have pip build the wheel of a source into `folder`."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    return subprocess.run([*command, "-w", str(folder), str(source)], capture_output=True, text=True, check=False)
