"""That every kernel compiles for an H200: the interpreter accepts what the compiler doesn't."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.kernels.interpreting import FOLDER, needs_triton, run_cases

KERNELS = sorted((FOLDER.parents[1] / "kernels").rglob("*.py"))


@needs_triton
def test_every_kernel_compiles_for_sm_90_through_its_launcher() -> None:
    run_cases("compile", "none")


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_kernels_annotate_with_what_the_compiler_knows(path: Path) -> None:
    """`x: Any` is a global variable to Triton's compiler, which knows none but `tl`'s."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(line) for line in node.decorator_list):
            notes = {ast.unparse(arg.annotation) for arg in node.args.args if arg.annotation is not None}
            assert notes <= {"tl.constexpr", "tl.tensor"}, f"{path.name}: {node.name}"
