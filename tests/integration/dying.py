"""A program that kills itself, by SIGKILL, at a step that a file names: `python dying.py ARM_FILE daemon|save …`.

The arm file holds "TARGET before|after NTH": TARGET is a function ("honed.daemon.lifecycle.swaps.Swaps.begin"), NTH counts its
calls since the file appeared. Once it has killed, the file is gone, so that the program can be started again and live.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SWAP_TIMEOUT_S = 3.0
"""The daemon gives up an engine that was killed well before the test gives up the daemon."""


def patch(target: str, arm: Path) -> None:
    """Wrap a function so that it asks the arm file before and after each call."""
    module_name, _, name = target.rpartition(".")
    try:
        owner: Any = importlib.import_module(module_name)
    except ModuleNotFoundError:  # a method
        module_name, _, class_name = module_name.rpartition(".")
        owner = getattr(importlib.import_module(module_name), class_name)
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    @functools.wraps(original)
    def fragile(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        armed = arm.read_text().split() if arm.exists() else []
        if len(armed) != 3 or armed[0] != target:
            calls = 0
            return original(*args, **kwargs)
        calls += 1
        is_now = calls == int(armed[2])
        if is_now and armed[1] == "before":
            die(arm)
        result = original(*args, **kwargs)
        if is_now:
            die(arm)
        return result

    setattr(owner, name, fragile)


def die(arm: Path) -> None:
    arm.unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def daemon(arm: Path, targets: list[str]) -> None:
    for target in targets:
        patch(target, arm)
    from honed.daemon.lifecycle import swaps
    from honed.daemon.process import serve

    swaps.TIMEOUT_S = swaps.LOST_S = SWAP_TIMEOUT_S
    sys.argv = ["honed-serve"]
    sys.exit(serve.main())


def save(arm: Path, targets: list[str], root: str, source: str, parent: str) -> None:
    """What a trainer does last: a version goes to the registry."""
    for target in targets:
        patch(target, arm)
    from honed.recalib.registry.registry import Registry

    def copy(folder: Path) -> None:
        for file in Path(source).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())

    print(Registry(Path(root)).create(copy, parent=parent, scope="kv-frozen", target_path="/models/tiny").version)


if __name__ == "__main__":
    arm_file, kind, names, *rest = sys.argv[1:]
    if kind == "daemon":
        daemon(Path(arm_file), names.split(","))
    else:
        save(Path(arm_file), names.split(","), *rest)
