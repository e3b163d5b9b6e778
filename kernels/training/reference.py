"""Plain PyTorch twins of the training ops: the definition of each, with everything materialised.

Letters: N blocks, B tokens of a block (anchor included), T context rows, G key/value heads, Q query heads, D head width; M rows
of hidden states, H width, V vocabulary. p is the target's distribution, q the draft's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def anchor_attention(
    q: torch.Tensor,  # [N, B, Q, D]
    own_k: torch.Tensor,  # [N, C, G, D]
    own_v: torch.Tensor,  # [N, C, G, D]
    context_k: torch.Tensor,  # [T, G, D]
    context_v: torch.Tensor,  # [T, G, D]
    begins: torch.Tensor,  # [N]
    ends: torch.Tensor,  # [N]
    scale: float,
    *,
    window: int | None = None,
    is_causal: bool = False,
) -> torch.Tensor:  # [N, B, Q, D]
    """Attend from the last B tokens of block n to the context rows begins[n] … ends[n] − 1 and to all tokens of its own block.

    With a window, token i sees no context row before ends[n] + i + 1 − window. If causal, it sees its block's tokens 0 … i.
    Query head j reads key/value head j // (Q / G).
    """
    (n, b, _, d), c = q.shape, own_k.shape[1]
    rows, own = (torch.arange(count, device=q.device) for count in (len(context_k), c))
    tokens = own[c - b :]
    low = begins[:, None].expand(n, b)
    if window is not None:
        low = torch.maximum(low, ends[:, None] + 1 - window + tokens)
    is_visible = (rows >= low[..., None]) & (rows < ends[:, None, None])  # [N, B, T]
    grouped = (q * scale).view(n, b, own_k.shape[2], -1, d)  # [N, B, G, R, D]
    by_context = torch.einsum("nbgrd,tgd->gnrbt", grouped, context_k)
    by_own = torch.einsum("nbgrd,ncgd->gnrbc", grouped, own_k)
    by_context = by_context.masked_fill(~is_visible[None, :, None], float("-inf"))
    if is_causal:
        by_own = by_own.masked_fill(own > tokens[:, None], float("-inf"))
    weights = torch.cat((by_context, by_own), dim=-1).softmax(dim=-1)
    out = torch.einsum("gnrbt,tgd->nbgrd", weights[..., :-c], context_v)
    out = out + torch.einsum("gnrbc,ncgd->nbgrd", weights[..., -c:], own_v)
    return out.reshape(q.shape)


def block_loss(
    hidden: torch.Tensor,  # [M, H]
    head: torch.Tensor,  # [V, H]
    *,
    labels: torch.Tensor | None = None,  # [M]
    goal: torch.Tensor | None = None,  # [M, H']
    goal_head: torch.Tensor | None = None,  # [V, H']
) -> tuple[torch.Tensor, torch.Tensor]:  # [M], [M]
    """Compute every row's loss and most likely token: the full logits, then cross-entropy to labels, or KL to the goal."""
    logits = F.linear(_wide(hidden), _wide(head))
    top = logits.argmax(-1)
    if labels is not None:
        return F.cross_entropy(logits, labels, reduction="none"), top
    assert goal is not None
    goal_logits = F.linear(_wide(goal), _wide(head if goal_head is None else goal_head)).detach()
    return forward_kl(logits, goal_logits), top


def forward_kl(logits: torch.Tensor, goal_logits: torch.Tensor) -> torch.Tensor:  # 2 x [..., V] -> [...]
    """KL(p || q) = Σ p · (log p − log q): covers every mode of p. Source: arXiv 2310.07177, section 3."""
    log_q, log_p = logits.log_softmax(-1), goal_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Convert to at least float32: half-precision operands, but no half-precision logits."""
    return x if x.dtype == torch.float64 else x.float()
