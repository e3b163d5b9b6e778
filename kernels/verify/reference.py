"""Plain PyTorch twins of `verify_chain` and `walk_tree`, including the noise: same seeds, same tokens.

Letters: B = requests, K = draft tokens at most, N = tree nodes, V = vocabulary, R = rows of logits.
"""

from __future__ import annotations

import torch

from honed.kernels.verify.sampling import GREEDY_BELOW, LARGEST, PURPOSE_ACCEPT, PURPOSE_CHUNK, PURPOSE_TOKEN, VOCAB_CHUNK

WORD = 0xFFFFFFFF


def philox(
    seed: torch.Tensor, index: torch.Tensor, low: torch.Tensor, high: torch.Tensor, purpose: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 in int64 arithmetic: key = the seed's 64 bits, counter = the other four words.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    key_0, key_1 = seed & WORD, (seed >> 32) & WORD
    c_0, c_1, c_2, c_3 = torch.broadcast_tensors(index, low, high, purpose)  # type: ignore[no-untyped-call]
    for _ in range(10):
        high_a, low_a = _multiply(c_0, 0xD2511F53)
        high_b, low_b = _multiply(c_2, 0xCD9E8D57)
        c_0, c_1, c_2, c_3 = high_b ^ c_1 ^ key_0, low_b, high_a ^ c_3 ^ key_1, low_a
        key_0, key_1 = (key_0 + 0x9E3779B9) & WORD, (key_1 + 0xBB67AE85) & WORD
    return c_0, c_1, c_2, c_3


def _multiply(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a product of 32-bit words, by halves, because it overflows int64."""
    above, below = (word >> 16) * factor, (word & 0xFFFF) * factor
    return (above + (below >> 16)) >> 16, (((above & 0xFFFF) << 16) + below) & WORD


def uniform(seed: torch.Tensor, position: torch.Tensor, index: torch.Tensor, purpose: int) -> torch.Tensor:
    """Float32 numbers in (0, 1), one for each (seed, position, index), broadcast."""
    word, _, _, _ = philox(seed, index, position & WORD, (position >> 32) & WORD, torch.full_like(position, purpose))
    return ((word.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)


def clean_logits(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Divide logits by the temperature; NaN becomes −inf, +inf the largest finite number. A greedy row keeps its scale."""
    inverse = torch.where(temperature >= GREEDY_BELOW, 1.0 / temperature, torch.ones_like(temperature))
    scaled = logits.float() * inverse[..., None]
    return torch.where(scaled.isnan(), float("-inf"), scaled).clamp(max=LARGEST)


def softmax(clean: torch.Tensor) -> torch.Tensor:
    """Probabilities of clean logits; zeros where all are −inf."""
    peak = clean.amax(-1, keepdim=True)
    weight = (clean - torch.where(peak == float("-inf"), 0.0, peak)).exp()
    return weight / weight.sum(-1, keepdim=True).clamp(min=1e-38)


def draw(weight: torch.Tensor, seed: torch.Tensor, position: torch.Tensor, chunk: int = VOCAB_CHUNK) -> torch.Tensor:
    """Draw an index of each row [M, V] by its weights: a race over chunks, then one within the winner (sampling.py)."""
    rows, vocab = weight.shape
    chunk = min(chunk, vocab)
    num_chunks = -(-vocab // chunk)
    pieces = torch.nn.functional.pad(weight, (0, num_chunks * chunk - vocab)).view(rows, num_chunks, chunk)
    winner = _race(pieces.sum(-1), seed, position, torch.zeros_like(seed), PURPOSE_CHUNK)
    within = pieces[torch.arange(rows, device=weight.device), winner]
    return winner * chunk + _race(within, seed, position, winner * chunk, PURPOSE_TOKEN)


def _race(weight: torch.Tensor, seed: torch.Tensor, position: torch.Tensor, first: torch.Tensor, purpose: int) -> torch.Tensor:
    index = first[:, None] + torch.arange(weight.shape[1], device=weight.device)
    noise = -torch.log1p(-uniform(seed[:, None], position[:, None].expand_as(index), index, purpose))
    return torch.where(weight > 0, weight / noise, -1.0).argmax(-1)


def rows_of(logits: torch.Tensor, first_rows: torch.Tensor | None, num_requests: int, num_rows: int) -> torch.Tensor:
    """Return each request's rows [B, num_rows, V] of [R, V] logits, from `first_rows` on; past the end the last row repeats."""
    if first_rows is None:
        return logits
    index = first_rows.long()[:, None] + torch.arange(num_rows, device=logits.device)
    if not logits.shape[0]:
        return logits.new_empty((num_requests, num_rows, logits.shape[1]))
    return logits[index.clamp(0, logits.shape[0] - 1)]


def verify_chain(
    target_logits: torch.Tensor,  # [B, K + 1, V], or [R, V] with first_rows
    draft_tokens: torch.Tensor,  # [B, K]
    num_draft_tokens: torch.Tensor,  # [B]
    temperature: torch.Tensor,  # [B]
    seeds: torch.Tensor,  # [B] int64
    positions: torch.Tensor,  # [B] int64
    first_rows: torch.Tensor | None = None,  # [B]
    draft_logits: torch.Tensor | None = None,  # [B, K, V]
    draft_temperature: torch.Tensor | None = None,  # [B]
    chunk: int = VOCAB_CHUNK,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accepted counts [B], tokens [B, K + 1] and bonus tokens [B], int32: see verify_chain.py.

    Source: arXiv 2211.17192, algorithm 1; arXiv 2302.01318, algorithm 2.
    """
    num_requests, depth = draft_tokens.shape
    row = torch.arange(depth + 1, device=draft_tokens.device)
    limit = num_draft_tokens.long().clamp(0, depth)
    place = positions.long()[:, None] + row
    logits = rows_of(target_logits, first_rows, num_requests, depth + 1)
    vocab = logits.shape[-1]
    clean = clean_logits(logits, temperature.float()[:, None].expand(-1, depth + 1))
    is_greedy = ~(temperature >= GREEDY_BELOW)
    draft = draft_tokens.long()
    is_token = (draft >= 0) & (draft < vocab)
    token = draft.clamp(0, vocab - 1)

    p = softmax(clean)
    q = torch.nn.functional.one_hot(token, vocab).float() * is_token[..., None]
    if draft_logits is not None:
        q_temperature = (temperature if draft_temperature is None else draft_temperature).float()
        is_full = (q_temperature >= GREEDY_BELOW)[:, None] & is_token
        q = torch.where(is_full[..., None], softmax(clean_logits(draft_logits, q_temperature[:, None].expand(-1, depth))), q)
    p_token, q_token = (x.gather(-1, token[..., None])[..., 0] for x in (p[:, :depth], q))
    threshold = torch.where(q_token > 0, p_token / q_token, 1.0)
    u = uniform(seeds.long()[:, None], place[:, :depth], torch.zeros_like(draft), PURPOSE_ACCEPT)
    is_accepted = (u < threshold) & (p_token > 0)
    best = clean.argmax(-1)
    is_accepted = torch.where(is_greedy[:, None], best[:, :depth] == draft, is_accepted & is_token)
    accepted = (is_accepted & (row[:depth] < limit[:, None])).long().cumprod(-1).sum(-1)

    requests = torch.arange(num_requests, device=draft.device)
    p_break = p[requests, accepted]
    q_break = torch.nn.functional.pad(q, (0, 0, 0, 1))[requests, accepted] * (accepted < limit)[:, None]
    weight = (p_break - q_break).clamp(min=0.0)
    weight = torch.where(weight.sum(-1, keepdim=True) > 0, weight, p_break)
    drawn = draw(weight, seeds.long(), place[requests, accepted], chunk)
    bonus = torch.where(is_greedy, best[requests, accepted], drawn)

    kept = torch.nn.functional.pad(draft, (0, 1))
    tokens = torch.where(row < accepted[:, None], kept, torch.where(row == accepted[:, None], bonus[:, None], -1))
    return accepted.int(), tokens.int(), bonus.int()


def walk_tree(
    tokens: torch.Tensor,  # [B, N]
    parents: torch.Tensor,  # [B, N], −1: the anchor
    num_verified: torch.Tensor,  # [B]
    drawn: torch.Tensor,  # [B, N + 1]
    max_depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Path [B, max_depth], accepted counts [B] and tokens [B, max_depth + 1], int64: see walk_tree.py."""
    count, room = tokens.shape
    node = torch.arange(room, device=drawn.device)
    is_node = (node < num_verified[:, None]) & (parents < node)
    row = torch.zeros(count, dtype=torch.int64, device=drawn.device)
    is_on = torch.ones(count, dtype=torch.bool, device=drawn.device)
    path = torch.full((count, max_depth), -1, dtype=torch.int64, device=drawn.device)
    emitted = torch.full((count, max_depth + 1), -1, dtype=torch.int64, device=drawn.device)
    for depth in range(max_depth + 1):
        token = drawn.long().gather(1, row[:, None])[:, 0]
        emitted[:, depth] = torch.where(is_on, token, -1)
        if depth == max_depth or not room:
            break
        is_child = is_node & (parents == (row - 1)[:, None]) & (tokens == token[:, None])
        is_on = is_on & is_child.any(1)
        row = torch.where(is_on, is_child.int().argmax(1) + 1, row)
        path[:, depth] = torch.where(is_on, row, -1)
    return path, (path > 0).sum(1), emitted
