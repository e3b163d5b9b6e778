"""Plain PyTorch twins of the ops on recurrent states: the definition of each, used without Triton. None waits for a device.

A Gated DeltaNet head keeps a state S of [V, K]. A token with query q, key k, value v, log decay g and strength β makes of it

    S' = exp(g) S,   u = β (v − S' k),   S = S' + u kᵀ,   out = S q

where q and k have length 1, and q is divided by √K (arXiv 2412.06464). In a tree each node goes on from its parent's S. The
ops here make no node's S. With G the sum of g over a node's path, its state is

    S_i = exp(G_i) S_root + Σ exp(G_i − G_j) u_j k_jᵀ   over its ancestors j and itself

So all u of a tree solve one triangular system of the tree's size. A node then needs V + K numbers, where a copy of its state
would need V·K. The state after a path is made once, when it is known.

Letters: B = requests, R = rows of all requests (the anchor, then its nodes), I = rows of the largest, J = the rows they go on
from, P = most nodes of a path, Q = heads of queries and keys, H = heads of values, K and V = their widths, S = states held, C
= channels, X = taps of the convolution.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from honed.kernels.trees.reference import unpack_bits

_LENGTH_EPS = 1e-6
"""vLLM's own."""


class TreeUpdates(NamedTuple):
    """What rows add to their request's state: of row j exp(G_i − G_j) u_j k_jᵀ for a row i that goes on from it."""

    keys: torch.Tensor  # [R, Q, K] float32, of length 1
    values: torch.Tensor  # [R, H, V] float32, u
    decays: torch.Tensor  # [R, H] float32, G


def tree_delta_rule(
    q: torch.Tensor,  # [R, Q, K]
    k: torch.Tensor,  # [R, Q, K]
    v: torch.Tensor,  # [R, H, V]
    log_decay: torch.Tensor,  # [R, H]
    strength: torch.Tensor,  # [R, H]
    states: torch.Tensor,  # [S, H, V, K]
    root: torch.Tensor,  # [B]
    row_starts: torch.Tensor,  # [B + 1]
    row_masks: torch.Tensor,  # [B, ≥ max_rows, W] int32
    max_rows: int,
) -> tuple[torch.Tensor, TreeUpdates]:  # [R, H, V] float32
    """Read every row's output, and find what it adds to the state.

    Args:
        q: of any length, as k; a key's head serves H / Q heads of values beside each other.
        states: read alone.
        root: the state after each request's anchor. So an anchor's own row adds nothing.
        row_masks: as `DraftTrees` has them.
    """
    o_i = torch.arange(max_rows, device=q.device)
    starts = row_starts.long()
    at = (starts[:-1, None] + o_i).clamp(max=max(len(q) - 1, 0))  # [B, I]
    is_row = o_i < (starts[1:] - starts[:-1])[:, None]
    goes_on = unpack_bits(row_masks[:, :max_rows])[:, :, :max_rows] & is_row[:, :, None] & is_row[:, None, :]  # [B, I, J]
    is_node = (is_row & (o_i > 0))[:, :, None]
    group = v.shape[1] // k.shape[1]
    queries, keys = unit(q) * q.shape[2] ** -0.5, unit(k)
    b_q, b_k = (x[at].repeat_interleave(group, 2) for x in (queries, keys))  # [B, I, H, K]
    b_v = torch.where(is_node[..., None], v.float()[at], 0.0)
    b_beta, b_g = (torch.where(is_node, x.float()[at], 0.0) for x in (strength, log_decay))  # [B, I, H]
    decays = torch.einsum("bij,bjh->bih", goes_on.float(), b_g)
    kept = (decays[:, :, None] - decays[:, None]).clamp(max=0.0).exp() * goes_on[..., None]  # [B, I, J, H]
    b_s = states[root.long()].float()
    from_root = decays.exp()[..., None]
    wanted = b_beta[..., None] * (b_v - from_root * torch.einsum("bhvk,bihk->bihv", b_s, b_k))
    system = b_beta[:, :, None] * kept * torch.einsum("bihk,bjhk->bijh", b_k, b_k)
    system = system.permute(0, 3, 1, 2).tril(-1)
    values = torch.linalg.solve_triangular(system, wanted.transpose(1, 2), upper=False, unitriangular=True).transpose(1, 2)
    weights = kept * torch.einsum("bihk,bjhk->bijh", b_q, b_k)
    out = from_root * torch.einsum("bhvk,bihk->bihv", b_s, b_q) + torch.einsum("bijh,bjhv->bihv", weights, values)
    request = torch.searchsorted(starts[1:].contiguous(), torch.arange(len(q), device=q.device), right=True)
    request = request.clamp(max=max(len(starts) - 2, 0))
    place = (torch.arange(len(q), device=q.device) - starts[request]).clamp(0, max_rows - 1)
    return out[request, place], TreeUpdates(keys, values[request, place], decays[request, place])


def commit(
    states: torch.Tensor,  # [S, H, V, K]
    root: torch.Tensor,  # [B]
    target: torch.Tensor,  # [B]
    updates: TreeUpdates,
    row_starts: torch.Tensor,  # [B + 1]
    path: torch.Tensor,  # [B, P]
    num_accepted: torch.Tensor,  # [B]
) -> None:
    """Write the state after each request's accepted path.

    Args:
        root: states after the anchors, as `tree_delta_rule` read them.
        target: where to write. For a path without nodes it is `root`, and nothing changes.
        path: rows of the accepted nodes in their requests, rising; −1 past them.
    """
    rows = row_starts[:-1, None].long() + path.clamp(min=0)  # [B, P]
    is_on = torch.arange(path.shape[1], device=path.device) < num_accepted[:, None]
    last = rows.gather(1, (num_accepted.long()[:, None] - 1).clamp(min=0))[:, 0]
    whole = torch.where(num_accepted[:, None] > 0, updates.decays[last], 0.0)  # [B, H]
    kept = torch.where(is_on[..., None], (whole[:, None] - updates.decays[rows]).clamp(max=0.0).exp(), 0.0)  # [B, P, H]
    group = updates.values.shape[1] // updates.keys.shape[1]
    keys = updates.keys[rows].repeat_interleave(group, 2)
    added = torch.einsum("bphv,bphk->bhvk", kept[..., None] * updates.values[rows], keys)
    made = whole.exp()[..., None, None] * states[root.long()].float() + added
    states[target.long()] = made.to(states.dtype)


def tree_conv(
    inputs: torch.Tensor,  # [N, C]
    at: torch.Tensor,  # [R, X]
    weight: torch.Tensor,  # [C, X]
    bias: torch.Tensor | None = None,  # [C]
) -> torch.Tensor:  # [R, C] float32
    """Convolve each row with the rows it follows, each channel for itself.

    Args:
        at: the inputs of each row's taps, the oldest first, its own last.
    """
    out = (inputs[at].float() * weight.float().t()).sum(1)
    return out if bias is None else out + bias.float()


def unit(x: torch.Tensor) -> torch.Tensor:  # [..., K] -> float32
    """Scale vectors to length 1, as vLLM does it."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _LENGTH_EPS)
