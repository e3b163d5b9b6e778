"""Makes this process ready for the runner under test, before any test module brings in Triton or vLLM."""

from __future__ import annotations

from tests.e2e import triton_on_cpu
from tests.e2e.engine import IS_V2

if IS_V2:
    triton_on_cpu.install()
