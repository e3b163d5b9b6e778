"""Plain PyTorch twins of the tree ops: the definition of each, used without Triton. None of them waits for a device.

Letters: B = requests, D = depths (draft tokens of a block), m = candidates a depth, V = vocabulary, N = capacity in nodes, W =
32-bit words of a mask row, R = rows of all requests (the anchor, then its nodes), I = rows of the largest, J = the rows
attended to, H = heads, H_kv = K/V heads, G = heads of a K/V head, E = head size, L = tokens of the longest prefix, P =
candidates a depth that the next token's probability may depend on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from honed.kernels.trees.tree_attention_inputs import AttendedPrefix, PagedPrefix

FORBIDDEN = -1e30
"""Logits at or under it count as −inf: masks are often written as the lowest finite number."""
GREEDY_TEMPERATURE = 1e-5
"""vLLM samples greedily below it. Likely tokens then follow from the drafter's own distribution (temperature 1)."""
MAX_DEPTHS = 16
MAX_CANDIDATES = 16
NUM_CANDIDATES = 8
"""Tokens a depth from which an engine's trees grow."""
ROOT = -1
_LOW_32 = 0xFFFF_FFFF
_LAST_ID = 0x7FFF_FFFF


class DraftTrees(NamedTuple):
    """The trees of a batch, nodes in the order they were admitted, parents before children.

    `row_masks` has one more row: row 0 is the anchor, node n is row n + 1. Bit j of a row says that it attends to row j of its
    own request (bit j % 32 of word j // 32). Past a tree's last node, tokens, ranks, depths and words are 0, and parents ROOT.
    """

    tokens: torch.Tensor  # [B, N] int32
    ranks: torch.Tensor  # [B, N] int32, index among its depth's candidates, 0 the most likely
    parents: torch.Tensor  # [B, N] int32, ROOT for children of the anchor
    depths: torch.Tensor  # [B, N] int32, from 1
    row_masks: torch.Tensor  # [B, N + 1, W] int32
    num_nodes: torch.Tensor  # [B] int32


def top_candidates(
    logits: torch.Tensor,  # [B, D, V]
    num_candidates: int,
    temperature: torch.Tensor | None = None,  # [B]
) -> tuple[torch.Tensor, torch.Tensor]:  # [B, D, m] float32, [B, D, m] int32
    """Take each depth's most likely tokens and their log-probabilities under softmax(logits / temperature) of all tokens.

    Equal logits are ordered by token id, the lower first. NaN and logits at or under FORBIDDEN count as −inf; a candidate of
    −inf has id 0. A depth with a logit of +inf has no distribution: all of its candidates are −inf. A temperature that is NaN,
    infinite or under GREEDY_TEMPERATURE counts as 1.
    """
    x = logits.float()
    x = torch.where(x > FORBIDDEN, x, float("-inf")) + 0.0  # −0 must equal 0
    bits = x.view(torch.int32)
    order = (bits ^ ((bits >> 31) & _LAST_ID)).long()  # compares as the floats do
    ids = torch.arange(x.shape[-1], device=x.device)
    kept = ((order << 32) + (_LAST_ID - ids)).topk(num_candidates, dim=-1).values
    top_ids = _LAST_ID - (kept & _LOW_32)
    scale = torch.ones(len(x), device=x.device) if temperature is None else usable(temperature)
    scale = scale[:, None, None]
    best = x.amax(-1, keepdim=True)
    log_sum = ((x - best) / scale).exp().sum(-1, keepdim=True).log()
    log_probs = (x.gather(-1, top_ids) - best) / scale - log_sum
    is_known = log_probs.isfinite()
    return torch.where(is_known, log_probs, float("-inf")), torch.where(is_known, top_ids, 0).int()


def usable(temperature: torch.Tensor) -> torch.Tensor:  # [B] -> [B] float32
    """Replace a temperature that is NaN, infinite or under GREEDY_TEMPERATURE by 1."""
    scale = temperature.float()
    return torch.where((scale >= GREEDY_TEMPERATURE) & (scale < float("inf")), scale, 1.0)


def tree_build(
    log_probs: torch.Tensor,  # [B, D, m] or [B, D, P, m], float32 or float64, most likely first
    ids: torch.Tensor,  # the same
    budgets: torch.Tensor,  # [B]
    max_nodes: int,  # N
    candidates: torch.Tensor | None = None,  # [B, D, P, m]
) -> DraftTrees:
    """Build every request's best tree of at most min(its budget, N) nodes.

    Every admitted node, and the anchor, has exactly one child that may come next: the heap is one slot a node. Slots are
    compared by score, then by a key of their node's depth and path of ranks, four bits each: (depth − 8)·2^60 + path. A score
    that isn't finite (−inf, NaN) is never admitted, nor are its later siblings and descendants.

    With `candidates`, a node's children are those of row p of the next depth, where p is the node's own place among its depth's
    P candidates. Children of the anchor are those of row 0.
    """
    num_requests, num_depths, num_rows, num_candidates = (log_probs[:, :, None] if log_probs.ndim == 3 else log_probs).shape
    device = log_probs.device
    room = num_requests, num_depths + 1, num_rows, num_candidates + 1
    table = torch.full(room, float("-inf"), dtype=torch.float64, device=device)
    table[:, :-1, :, :-1] = log_probs.double().reshape(num_requests, num_depths, num_rows, num_candidates)
    flat = table.flatten(1)

    def score_of(above: torch.Tensor, depth: torch.Tensor, row: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        """Score the candidate `rank` below nodes [B] of a depth and a row of the table."""
        at = (depth * num_rows + row) * (num_candidates + 1) + rank
        score = above + flat.gather(1, at[:, None])[:, 0]
        return torch.where(score.isfinite(), score, float("-inf"))

    zero = torch.zeros(num_requests, dtype=torch.int64, device=device)
    nodes = torch.zeros((4, num_requests, max_nodes), dtype=torch.int64, device=device)
    tokens, ranks, parents, depths = nodes.unbind()
    parents.fill_(ROOT)
    num_words = words_of(max_nodes)
    attends = torch.zeros((num_requests, max_nodes + 1, num_words * 32), dtype=torch.bool, device=device)
    attends[:, 0, 0] = True
    pending = torch.full((num_requests, max_nodes + 1), float("-inf"), dtype=torch.float64, device=device)
    above = torch.zeros_like(pending)
    key = torch.zeros((num_requests, max_nodes + 1), dtype=torch.int64, device=device)
    rank_of = torch.zeros_like(key)
    key[:, 0] = -(2**63)
    row_of = torch.zeros_like(key)
    pending[:, 0] = score_of(above[:, 0], zero, zero, zero)
    num_nodes = zero.clone()

    for n in range(max_nodes):
        score = pending.amax(1)
        tied = torch.where(pending == score[:, None], key, 2**63 - 1)
        slot = tied.argmin(1, keepdim=True)
        is_new = (score > float("-inf")) & (n < budgets)
        own_key, rank = key.gather(1, slot)[:, 0], rank_of.gather(1, slot)[:, 0]
        depth, path = (own_key >> 60) + 8, own_key & (2**60 - 1)
        row_above = row_of.gather(1, slot)[:, 0]
        place = (depth.clamp(max=num_depths - 1) * num_rows + row_above) * num_candidates + rank.clamp(max=num_candidates - 1)
        found = ids.flatten(1).gather(1, place[:, None])[:, 0]
        own_row = zero if candidates is None else candidates.flatten(1).gather(1, place[:, None])[:, 0].long()
        for column, value in ((tokens, found), (ranks, rank), (parents, slot[:, 0] - 1), (depths, depth + 1)):
            column[:, n] = torch.where(is_new, value, column[:, n])
        row = attends.gather(1, slot[:, :, None].expand(-1, -1, num_words * 32))[:, 0]
        row[:, n + 1] = True
        attends[:, n + 1] = row & is_new[:, None]
        num_nodes += is_new
        # The sibling takes the slot, the first child a new one.
        sibling = score_of(above.gather(1, slot)[:, 0], depth, row_above, rank + 1)
        pending.scatter_(1, slot, torch.where(is_new, sibling, pending.gather(1, slot)[:, 0])[:, None])
        rank_of.scatter_(1, slot, (rank + is_new)[:, None])
        longer = path * 16 + rank  # wraps at the last depth, which has no children
        child = score_of(score, (depth + 1).clamp(max=num_depths), own_row, zero)
        pending[:, n + 1] = torch.where(is_new, child, pending[:, n + 1])
        above[:, n + 1], row_of[:, n + 1] = score, own_row
        key[:, n + 1] = ((depth - 7) << 60) + longer

    tokens, ranks, parents, depths = nodes.int().unbind()
    return DraftTrees(tokens, ranks, parents, depths, pack_bits(attends), num_nodes.int())


def words_of(max_nodes: int) -> int:
    """Count the words of a mask row: one bit for the anchor and for each node."""
    return max_nodes // 32 + 1


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack booleans [..., 32·W] into int32 words [..., W], the first in the lowest bit."""
    words = (bits.view(*bits.shape[:-1], bits.shape[-1] // 32, 32).long() << torch.arange(32, device=bits.device)).sum(-1)
    return (words - ((words >> 31) << 32)).int()


def unpack_bits(words: torch.Tensor) -> torch.Tensor:
    """Undo `pack_bits`: int32 words [..., W] to booleans [..., 32·W]."""
    bits: torch.Tensor = ((words[..., None] >> torch.arange(32, device=words.device)) & 1).bool().flatten(-2)
    return bits


def tree_attention(
    q: torch.Tensor,  # [R, H, E]
    k: torch.Tensor,  # [R, H_kv, E]
    v: torch.Tensor,  # [R, H_kv, E]
    row_starts: torch.Tensor,  # [B + 1]
    row_masks: torch.Tensor,  # [B, ≥ max_rows, W] int32
    max_rows: int,
    scale: float,
    prefix: PagedPrefix | AttendedPrefix | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # [R, H, E] in q's type, [R, H] float32
    """Attend from every row to its request's prefix and to the rows of its request that its mask names.

    A row that may attend to nothing gets 0 and −inf, as do rows past the last request's. Sums are in float32.
    """
    num_rows, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    o_i, o_r = torch.arange(max_rows, device=q.device), torch.arange(num_rows, device=q.device)
    starts = row_starts.long()
    at = (starts[:-1, None] + o_i).clamp(max=max(num_rows - 1, 0))  # [B, I]
    is_row = o_i < (starts[1:] - starts[:-1])[:, None]
    b_q = q.float()[at].view(*at.shape, k.shape[1], group, q.shape[2])  # [B, I, H_kv, G, E]
    keys, values = [k.float()[at]], [torch.where(is_row[:, :, None, None], v.float()[at], 0.0)]
    may = [unpack_bits(row_masks[:, :max_rows])[:, :, :max_rows] & is_row[:, None, :]]  # [B, I, J]
    if isinstance(prefix, PagedPrefix):
        pages = prefix.block_table.long().clamp(0, max(len(prefix.k_cache) - 1, 0))
        o_t = torch.arange(pages.shape[1] * prefix.k_cache.shape[1], device=q.device)
        is_token = o_t < prefix.lengths[:, None]  # [B, L]
        first = None if prefix.firsts is None else torch.where(is_row, prefix.firsts[at], prefix.firsts[at[:, :1]])  # [B, I]
        if first is not None:
            is_token &= o_t >= first.amin(1, keepdim=True)
        for held, cache, factor in ((keys, prefix.k_cache, prefix.k_scale), (values, prefix.v_cache, prefix.v_scale)):
            tokens = cache[pages].flatten(1, 2).float() * (1.0 if factor is None else factor)
            held.append(torch.where(is_token[:, :, None, None], tokens, 0.0))
        may.append(is_token[:, None, :] if first is None else is_token[:, None, :] & (o_t >= first[:, :, None]))
        may[-1] = may[-1].expand(-1, max_rows, -1)
    scores = torch.einsum("bihge,bjhe->bihgj", b_q, torch.cat(keys, 1)) * scale
    scores = torch.where(torch.cat(may, 2)[:, :, None, None, :], scores, float("-inf"))
    lse = scores.logsumexp(-1)  # [B, I, H_kv, G]
    weights = (scores - torch.where(lse > float("-inf"), lse, 0.0)[..., None]).exp()
    out = torch.einsum("bihgj,bjhe->bihge", weights, torch.cat(values, 1))
    request = torch.searchsorted(starts[1:].contiguous(), o_r, right=True)
    is_held = request < len(starts) - 1
    request = request.clamp(max=max(len(starts) - 2, 0))
    place = (o_r - starts[request]).clamp(0, max_rows - 1)
    out = torch.where(is_held[:, None, None], out.flatten(2, 3)[request, place], 0.0)
    lse = torch.where(is_held[:, None], lse.flatten(2, 3)[request, place], float("-inf"))
    if isinstance(prefix, AttendedPrefix):
        out, lse = merge(out, lse, prefix.out.float(), prefix.lse.float())
    return out.to(q.dtype), lse


def merge(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two parts of an attention: [..., E] and [...] of each; a part whose lse is −inf isn't read.

    Source: arXiv 2501.01005 (FlashInfer), section 2.2.
    """
    both = torch.logaddexp(lse, other_lse)
    base = torch.where(both > float("-inf"), both, 0.0)
    joined = torch.zeros_like(out)
    for part, own in ((out, lse), (other_out, other_lse)):
        joined += torch.where((own > float("-inf"))[..., None], part * (own - base).exp()[..., None], 0.0)
    return joined, both
