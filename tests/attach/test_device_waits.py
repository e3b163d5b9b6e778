"""That nothing in the engine's steps makes PyTorch wait for the device where the source alone can show it.

`tests/e2e/device_waits.py` runs an engine for the rest.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.tools import ROOT

SOURCES = sorted(path for folder in ("attach", "kernels") for path in (ROOT / folder).rglob("*.py"))
ON_HOST = {"self._has_tree", "trees.row_masks"}
"""Variables index these, and no device has them: a list, and the tree builder's arrays in NumPy."""


def numbers_put_by_index(source: str) -> list[str]:
    """Assignments `tensor[name] = number`.

    Where the name is a CUDA tensor, PyTorch makes a CPU scalar of the number and copies it: for that the host waits until the
    device has done all that was asked of it. `index_fill_` takes the number as it is. Slices and integers need no copy.
    Names in capitals are integers.
    """
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and is_number(node.value)
        for target in node.targets
        if isinstance(target, ast.Subscript) and ast.unparse(target.value) not in ON_HOST and is_by_variable(target.slice)
    ]


def is_number(node: ast.expr) -> bool:
    value = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(value, ast.Constant) and isinstance(value.value, bool | int | float)


def is_by_variable(index: ast.expr) -> bool:
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return any(isinstance(part, ast.Name | ast.Attribute | ast.Subscript) and not ast.unparse(part).isupper() for part in parts)


@pytest.mark.fault("a step with a new request that waits for the device")
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_number_is_copied_to_the_device_by_an_assignment(path: Path) -> None:
    assert numbers_put_by_index(path.read_text()) == []


FEW_BYTES = {"attach/trees/telling.py"}


@pytest.mark.fault("pinned memory that grows with the drafter")
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_large_goes_to_pinned_memory_of_its_own(path: Path) -> None:
    """`to("cpu", non_blocking=True)` pins memory: launches wait meanwhile, and PyTorch keeps a power of two for good."""
    calls = [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    pinning = [call for call in calls if "to('cpu', non_blocking=True)" in call]
    assert not pinning or str(path.relative_to(ROOT)) in FEW_BYTES


def test_such_assignments_are_found() -> None:
    waiting = ["x[slots] = 0.5", "x[step.rows] = -1", "x[:, rows] = True", "self.x[at[0]] = 1"]
    passing = ["x[3] = 1", "x[:, 0, 0] = True", "x[2:] = 0.0", "x[COLUMN] = 0", "x[slots] = y", "self._has_tree[slot] = False"]
    assert [len(numbers_put_by_index(line)) for line in waiting] == [1] * len(waiting)
    assert [numbers_put_by_index(line) for line in passing] == [[]] * len(passing)
