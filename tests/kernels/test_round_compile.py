"""The kernels of a verify round compile for an H200; no GPU is needed, since ptxas comes with Triton."""

from __future__ import annotations

from tests.kernels.interpreting import needs_triton, run_cases


@needs_triton
def test_the_kernels_of_a_round_compile() -> None:
    run_cases("round_compile", "none")
