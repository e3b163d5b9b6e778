"""The walk through a draft tree by tokens that are drawn already: from the anchor, descend while a child has the drawn token.

Computes: reference.walk_tree. It draws nothing, so every emitted token is the target's own draw after its own ancestors.

How: one program of one warp a request holds the tree's parents and tokens, and steps down: a load of the token, a minimum over
the nodes. In PyTorch each depth would take some 20 launches.
Moves: 8·N bytes a request and its path; launch and latency are all of its time. Not measured.
Layout: contiguous. A child whose parent isn't an earlier node counts as none. Of siblings with equal tokens the first counts.
CUDA graphs: the grid depends on shapes only, nothing is read back.
"""

from __future__ import annotations

import torch

from honed.kernels.verify import reference

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

Walked = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Rows of the accepted nodes, rising, [B, P]; their number [B]; accepted tokens, then the one that no child has, [B, P + 1].
All are int64. Past the end is −1. Node n's row is n + 1."""

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _walk_kernel(
        token_ptr: tl.tensor,
        parent_ptr: tl.tensor,
        num_verified_ptr: tl.tensor,
        drawn_ptr: tl.tensor,
        path_ptr: tl.tensor,
        num_accepted_ptr: tl.tensor,
        emitted_ptr: tl.tensor,
        num_nodes: tl.tensor,
        max_depth: tl.tensor,
        ROWS: tl.constexpr,
        PATH: tl.constexpr,
    ) -> None:
        i_b = tl.program_id(0).to(tl.int64)
        o_r, o_p = tl.arange(0, ROWS), tl.arange(0, PATH)
        o_n = i_b * num_nodes + o_r - 1
        m_n = (o_r > 0) & (o_r <= num_nodes) & (o_r <= tl.load(num_verified_ptr + i_b))
        b_parent_row = tl.load(parent_ptr + o_n, mask=m_n, other=-2).to(tl.int32) + 1
        b_token = tl.load(token_ptr + o_n, mask=m_n, other=-1).to(tl.int32)
        p_drawn = drawn_ptr + i_b * (num_nodes + 1)
        b_path = tl.full((PATH,), -1, tl.int32)
        b_out = tl.full((PATH,), -1, tl.int32)
        choice = tl.load(p_drawn).to(tl.int32)
        current = choice * 0
        accepted = current
        is_walking = accepted < max_depth
        while is_walking:
            child = tl.min(tl.where((b_parent_row == current) & (b_token == choice) & (o_r > current), o_r, ROWS), axis=0)
            is_walking = child < ROWS
            if is_walking:
                b_path = tl.where(o_p == accepted, child, b_path)
                b_out = tl.where(o_p == accepted, choice, b_out)
                accepted += 1
                current = child
                choice = tl.load(p_drawn + child).to(tl.int32)
                is_walking = accepted < max_depth
        b_out = tl.where(o_p == accepted, choice, b_out)
        tl.store(path_ptr + i_b * max_depth + o_p, b_path, mask=o_p < max_depth)
        tl.store(emitted_ptr + i_b * (max_depth + 1) + o_p, b_out, mask=o_p <= max_depth)
        tl.store(num_accepted_ptr + i_b, accepted)


def walk_tree(
    tokens: torch.Tensor,  # [B, N] integers
    parents: torch.Tensor,  # [B, N] integers, −1: the anchor
    num_verified: torch.Tensor,  # [B] integers: nodes that count, each tree's first ones
    drawn: torch.Tensor,  # [B, 1 + N] integers, the token drawn at each row
    max_depth: int,  # P
) -> Walked:
    """Walk each request's tree; Triton on a GPU, its plain twin elsewhere.

    Raises:
        ValueError: shapes don't fit each other.
    """
    count, room = tokens.shape
    if parents.shape != tokens.shape or num_verified.shape != (count,) or drawn.shape != (count, room + 1) or max_depth < 0:
        raise ValueError(
            f"walk_tree: parents {list(parents.shape)}, counts {list(num_verified.shape)} and drawn {list(drawn.shape)} don't "
            f"fit tokens {list(tokens.shape)}: they are [B, N], [B] and [B, 1 + N]; max_depth {max_depth} must be 0 or more"
        )
    walk = launch if drawn.is_cuda else reference.walk_tree
    return walk(tokens, parents, num_verified, drawn, max_depth)


def launch(
    tokens: torch.Tensor, parents: torch.Tensor, num_verified: torch.Tensor, drawn: torch.Tensor, max_depth: int
) -> Walked:
    """Run the Triton kernel itself (on a GPU, or under Triton's interpreter); arguments as `walk_tree`."""
    if triton is None:
        raise RuntimeError("Triton is not installed: pip install triton")
    count, room = tokens.shape
    path = torch.empty((count, max_depth), dtype=torch.int64, device=drawn.device)
    num_accepted = torch.empty(count, dtype=torch.int64, device=drawn.device)
    emitted = torch.empty((count, max_depth + 1), dtype=torch.int64, device=drawn.device)
    if count:
        _walk_kernel[(count,)](
            tokens.contiguous(),
            parents.contiguous(),
            num_verified.contiguous(),
            drawn.contiguous(),
            path,
            num_accepted,
            emitted,
            room,
            max_depth,
            ROWS=triton.next_power_of_2(room + 1),
            PATH=triton.next_power_of_2(max_depth + 1),
            num_warps=1,
        )
    return path, num_accepted, emitted


def compile_walk(num_nodes: int, max_depth: int, device: torch.device) -> None:
    """Compile the kernel for trees of so many nodes, by a walk through one without nodes."""
    nodes = torch.zeros((1, num_nodes), dtype=torch.int32, device=device)
    counts = torch.zeros(1, dtype=torch.int64, device=device)
    launch(nodes, nodes, counts, counts.new_zeros((1, num_nodes + 1)), max_depth)
