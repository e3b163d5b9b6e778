"""Compiles a Triton kernel to machine code of a GPU that needn't be there: ptxas comes with Triton.

The interpreter runs kernels as Python, so it takes much that the compiler refuses (a global name in an annotation, say).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HOPPER = ("cuda", 90, 32)


def machine_code(kernel: Any, constants: Mapping[str, object], num_warps: int = 4, **types: str) -> bytes:
    """The kernel's code for an H100 or H200.

    Args:
        constants: its constexpr arguments.
        types: the others' types as Triton writes them: "*bf16", "i32", "fp32".
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    values = {(index,): constants[name] for index, name in enumerate(names) if name in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    code: bytes = triton.compile(source, target=GPUTarget(*HOPPER), options={"num_warps": num_warps}).asm["cubin"]
    return code
