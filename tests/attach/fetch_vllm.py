"""Brings the Python sources of every supported vLLM release from the package index: `python tests/attach/fetch_vllm.py`.

They are unpacked below the user's cache folder, one folder a release, and never imported. Prints the folders. A release that is
there already is not fetched again; which releases there are is asked each time, so that a new one is noticed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from honed.attach.contract.compatibility import is_supported

WHEEL = ("--only-binary=:all:", "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_31_x86_64")
"""Any machine can read the Python in a wheel for Linux. A source distribution would be built first, for its metadata."""


def folder() -> Path:
    """Where the sources lie: below it, RELEASE/vllm."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "honed" / "vllm-sources"


def releases() -> list[str]:
    """The supported releases that the package index has, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "vllm"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in listed.splitlines() if line.startswith("Available versions:"))
    found = [version for version in re.findall(r"[^\s,:]+", line.partition(":")[2]) if is_supported(version)]
    return found[::-1]


def fetch(release: str) -> Path:
    """The package folder of a release's sources, brought here if it isn't."""
    package = folder() / release / "vllm"
    if package.exists():
        return package
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder()) as name:
        work = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *WHEEL, "-d", str(work), f"vllm=={release}"]
        subprocess.run(command, check=True)
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            sources = [n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py") and ".." not in n]
            archive.extractall(work / release, sources)
        (work / release).rename(folder() / release)
    return package


if __name__ == "__main__":
    for release in releases():
        print(fetch(release), flush=True)
