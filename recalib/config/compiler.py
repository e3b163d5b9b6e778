"""What this machine lacks to compile kernels: Triton builds a Python module in C for each."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def c_compiler() -> str | None:
    """Return the path of the C compiler that Triton would run: the one that CC names, else gcc or clang; None without one."""
    named = os.environ.get("CC")
    return next((path for name in ((named,) if named else ("gcc", "clang")) if (path := shutil.which(name))), None)


def lacks_for_kernels(headers: Path) -> list[str]:
    """Return what is missing, in words.

    Args:
        headers: folder of Python.h.
    """
    named, lacks = os.environ.get("CC"), []
    if c_compiler() is None:
        lacks.append(f"no C compiler ({named or 'gcc or clang'})" + (", which CC names" if named else ""))
    if not (header := headers / "Python.h").is_file():
        lacks.append(f"no {header}")
    return lacks
