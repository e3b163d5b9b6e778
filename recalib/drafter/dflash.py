"""The DFlash drafter in plain PyTorch: the same function as vLLM's, and trainable.

Every layer attends to the target's context features, projected to keys and values (KV injection), and to the block's own
tokens: all of them, or in a causal layer the earlier ones. A layer with a sliding window sees only the nearest context. The
block of an anchor at position p is [anchor, MASK x k] at positions p .. p + k. Its context is all features *strictly before* p.
The output at position p + j predicts the token at p + j: there is no shift.

Context keys and values depend only on `fc`, `hidden_norm`, `k_proj`, `v_proj` and `k_norm` (`makes_context`). Query tokens
go through the layer's input norm first. Context features don't: they have `hidden_norm` instead.

DFlash2 adds convolutions along the block, and a selector that walks over each position's best tokens. DSpark adds a Markov
head: a low-rank score of each token after the one before it. In its own form the anchor's row predicts the first token, and
there is a mask less. In speculators' form it has DFlash's rows.

Source: arXiv 2602.06036, section 3; vLLM 0.32 `model_executor/models/qwen3_dflash.py`, `qwen3_dflash2.py`, `qwen3_dspark.py`
and `v1/spec_decode/dflash.py`, `v1/worker/gpu/spec_decode/dflash2/speculator.py`, `dspark/speculator.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from honed.kernels.training.anchor_attention import Visible, anchor_attention
from honed.kernels.training.block_loss import top_tokens
from honed.kernels.trees.reference import MAX_CANDIDATES
from honed.kernels.trees.top_candidates import top_candidates
from honed.recalib.config.drafter import Convolution, DrafterConfig, Markov, Selector
from honed.recalib.drafter.drafter import Candidates, Drafter, Vocabulary
from honed.recalib.drafter.layers import MLP, RMSNorm, rotate

__all__ = ["DFlashDrafter", "DrafterConfig"]

# Letters: N blocks, B tokens of a block (anchor included), K = B - 1, T context rows, H width, A width of unfused
# features, V vocabulary, W words that are drafted, G key/value heads, R query heads of each, D head width.

_ROWS = 64
"""Rows whose logits are held at once."""


class Attention(nn.Module):
    """Attention of block tokens to context keys and to their own block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim, self.value_scale = config.num_key_value_heads, config.head_dim, config.value_scale
        width, query_width = config.hidden_size, config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, query_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_width, width, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # 2 x [..., G, D]
        """Compute normed and rotated keys, and values, of any rows."""
        shape = (*x.shape[:-1], self.num_kv_heads, self.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).view(shape)), tables)
        values: Tensor = self.v_proj(x).view(shape)
        return keys, values if self.value_scale == 1.0 else values * self.value_scale

    def forward(
        self,
        x: Tensor,  # [N, B, H]
        tables: tuple[Tensor, Tensor],  # 2 x [N, B, D/2]
        context: tuple[Tensor, Tensor],  # 2 x [T, G, D]
        visible: Visible,  # of N blocks
    ) -> Tensor:  # [N, B, H]
        n, b, _ = x.shape
        q = rotate(self.q_norm(self.q_proj(x).view(n, b, -1, self.head_dim)), tables)
        out = anchor_attention(q, *self.keys_values(x, tables), *context, visible)
        projected: Tensor = self.o_proj(out.reshape(n, b, -1))
        return projected


class GroupedConv(nn.Module):
    """DFlash2's convolution over a block: before and after what it surrounds, each token mixes with those just before it.

    A kernel is a fixed one for each channel plus one that the token gives to each group of channels.
    """

    def __init__(self, config: DrafterConfig, convolution: Convolution) -> None:
        super().__init__()
        self.taps, self.num_groups = convolution.taps, config.hidden_size // convolution.group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.num_groups, bias=False)

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [N, B, H] -> [N, B, H], [N, B, taps, groups]
        """Convolve the input; also return the tokens' part of the output's kernel."""
        kernels: Tensor = self.kernel_projection(x).view(*x.shape[:2], 2, self.taps, self.num_groups)
        return self._convolve(x, kernels[:, :, 0], 0), kernels[:, :, 1]

    def finish(self, x: Tensor, kernels: Tensor) -> Tensor:  # [N, B, H], [N, B, taps, groups] -> [N, B, H]
        """Convolve the output."""
        return self._convolve(x, kernels, 1)

    def _convolve(self, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        grouped = x.view(*x.shape[:2], self.num_groups, -1)  # [N, B, groups, size]
        fixed = self.base_kernel[side].view(self.taps, self.num_groups, -1).to(x.dtype)  # [taps, groups, size]
        made: Tensor = (fixed[0] + kernels[:, :, 0, :, None]) * grouped
        for tap in range(1, self.taps):
            earlier = F.pad(grouped[:, :-tap], (0, 0, 0, 0, tap, 0))
            made = made + (fixed[tap] + kernels[:, :, tap, :, None]) * earlier
        return made.flatten(-2)


class CandidateSelector(nn.Module):
    """DFlash2's scores of a pair of neighbouring tokens; the codebooks are never trained, see `scored`."""

    def __init__(self, config: DrafterConfig, selector: Selector) -> None:
        super().__init__()
        self.top_k = selector.top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, selector.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, selector.rank))
        self.hidden_projection = nn.Linear(config.hidden_size, selector.rank, bias=False)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:  # [..., H], [...] -> [..., rank]
        """Compute the queries for the successors' codebook: their products with its rows score pairs of tokens."""
        edges: Tensor = self.hidden_projection(hidden) * self.predecessor_codebook[previous].to(hidden.dtype)
        return edges


class MarkovHead(nn.Module):
    """DSpark's scores of a token after the one before it: products of two embeddings; see `DFlashDrafter.UNTRAINED`."""

    def __init__(self, config: DrafterConfig, markov: Markov) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, markov.rank)
        self.markov_w2 = nn.Linear(markov.rank, config.num_words, bias=False)

    def forward(self, previous: Tensor) -> Tensor:  # [...] -> [..., rank]
        """Embed the tokens before."""
        embedded: Tensor = self.markov_w1(previous)
        return embedded


class Layer(nn.Module):
    """Pre-norm attention and MLP, each with its residual, and in DFlash2 with its convolutions."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv = GroupedConv(config, config.convolution) if config.convolution else None
        self.mlp_conv = GroupedConv(config, config.convolution) if config.convolution else None

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], visible: Visible
    ) -> Tensor:  # [N, B, H]
        x = x + _between(self.attention_conv, self.input_layernorm(x), lambda y: self.self_attn(y, tables, context, visible))
        return x + _between(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def _between(conv: GroupedConv | None, x: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply something between a convolution's two sides, if there is one."""
    if conv is None:
        return apply(x)
    x, kernels = conv.prepare(x)
    return conv.finish(apply(x), kernels)


class DFlashDrafter(Drafter):
    """A DFlash, DFlash2 or DSpark drafter."""

    UNTRAINED = (
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
        "markov_head.markov_w2.weight",
    )
    """DFlash2's codebooks and DSpark's head: losses need a frozen head."""

    def __init__(self, config: DrafterConfig, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self._kinds = [config.attention_of(layer) for layer in range(config.num_hidden_layers)]
        self.candidate_selector = CandidateSelector(config, config.selector) if config.selector else None
        self.markov_head = MarkovHead(config, config.markov) if config.markov else None
        self._pair_head: Tensor | None = None

    def scored(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:  # [N, K, H], [N, K] -> [N, K, H'], [W, H']
        """Rows and a head whose products are the scores of every token after a known previous one.

        Scores of pairs are products as well: each row gets some more columns, and so does the head.
        """
        selector, markov = self.candidate_selector, self.markov_head
        successors: Tensor
        if selector is not None:
            edges, successors = selector(hidden, previous), selector.successor_codebook
        elif markov is not None:
            edges, successors = markov(previous).to(hidden.dtype), markov.markov_w2.weight
        else:
            return hidden, self.lm_head
        if self._pair_head is None or self._pair_head.device != self.lm_head.device:
            self._pair_head = torch.cat((self.lm_head, successors.detach().to(self.lm_head)), dim=1)
        return torch.cat((hidden * self.config.logit_scale, edges), dim=-1), self._pair_head

    @torch.no_grad()
    def best_drafts(self, hidden: Tensor, anchor_ids: Tensor) -> Tensor:
        """Draft greedily; with scores of pairs, one token after the other."""
        if self.markov_head is not None:
            return self._follow(hidden, anchor_ids)
        if self.candidate_selector is None:
            return super().best_drafts(hidden, anchor_ids)
        return self._walk(self.candidate_selector, hidden, anchor_ids)

    @property
    def grows_trees(self) -> bool:
        """Whether engines grow draft trees from its `candidates`: they do for DFlash, and for DFlash2 with few enough."""
        selector = self.candidate_selector
        return self.markov_head is None and (selector is None or selector.top_k <= MAX_CANDIDATES)

    @torch.no_grad()
    def candidates(self, hidden: Tensor, anchor_ids: Tensor, count: int) -> Candidates:  # [N, K, H], [N]
        """Find each position's `count` likeliest tokens, at temperature 1; with a selector, after each of its own."""
        if self.candidate_selector is not None:
            return self._pairs(self.candidate_selector, hidden, anchor_ids, count)
        parts = [
            top_candidates(F.linear(rows, self.lm_head), min(count, len(self.lm_head)))
            for rows in hidden.split(max(1, _ROWS // hidden.shape[1]))  # type: ignore[no-untyped-call]
        ]
        log_probs, words = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        return Candidates(log_probs, self.to_target(words.long()))

    def _pairs(self, selector: CandidateSelector, hidden: Tensor, anchor_ids: Tensor, count: int) -> Candidates:
        scores, tokens, successors = self._selected(selector, hidden)
        before = torch.cat((anchor_ids[:, None, None].expand(-1, 1, selector.top_k), tokens[:, :-1]), dim=1)  # [N, K, P]
        edges = selector(hidden[:, :, None], before)  # [N, K, P, rank]
        totals = scores[:, :, None] + torch.einsum("nkpr,nkqr->nkpq", edges, successors).float()
        found = totals.log_softmax(-1).topk(min(count, selector.top_k), -1)
        return Candidates(found.values, tokens[:, :, None].expand_as(totals).gather(-1, found.indices), found.indices)

    def _follow(self, hidden: Tensor, anchor_ids: Tensor) -> Tensor:
        """Choose each position's best word after the one chosen before it."""
        previous, chosen = anchor_ids, list[Tensor]()
        for k in range(hidden.shape[1]):
            previous = self.to_target(top_tokens(*self.scored(hidden[:, k], previous)))
            chosen.append(previous)
        return torch.stack(chosen, dim=1)

    def _walk(self, selector: CandidateSelector, hidden: Tensor, anchor_ids: Tensor) -> Tensor:
        """Choose each position's best candidate after the one chosen before it."""
        scores, candidates, successors = self._selected(selector, hidden)
        previous, chosen = anchor_ids, list[Tensor]()
        for k in range(hidden.shape[1]):
            edges = selector(hidden[:, k], previous)
            total = scores[:, k] + (successors[:, k] * edges[:, None]).sum(-1).float()
            previous = candidates[:, k].gather(1, total.argmax(-1, keepdim=True))[:, 0]
            chosen.append(previous)
        return torch.stack(chosen, dim=1)

    def _selected(self, selector: CandidateSelector, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each position's tokens to select from: scores and ids [N, K, P], and what follows from each [N, K, P, rank]."""
        parts = [
            (F.linear(rows, self.lm_head).float() * self.config.logit_scale).topk(selector.top_k)
            for rows in hidden.flatten(0, 1).split(_ROWS)  # type: ignore[no-untyped-call]
        ]
        shape = (*hidden.shape[:2], selector.top_k)
        scores, tokens = (torch.cat([part[i] for part in parts]).view(shape) for i in (0, 1))
        return scores, tokens, selector.successor_codebook[tokens].to(hidden.dtype)

    def fuse(self, aux_hidden: Tensor) -> Tensor:  # [T, A] -> [T, H]
        """Fuse the target's auxiliary hidden states, concatenated in `target_layer_ids` order, into context features."""
        fused: Tensor = self.hidden_norm(self.fc(aux_hidden))
        return fused

    def context_keys_values(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Compute what vLLM keeps in the drafter's paged cache: for each layer, K and V `[T, G, D]` of fused features."""
        tables = self._rotary_tables(positions)
        return [layer.self_attn.keys_values(features, tables) for layer in self.layers]  # type: ignore[union-attr, operator]

    def draft_hidden(
        self,
        features: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        anchors: Tensor,
        segments: Tensor | None = None,
        num_draft_tokens: int | None = None,
    ) -> Tensor:  # [N, K, H]
        """Compute the normed hidden states of the rows that predict, before the target's head."""
        markov = self.config.markov
        first = 0 if markov is not None and markov.drafts_from_anchor else 1  # row that predicts the first token
        num_masks = (num_draft_tokens or self.config.num_draft_tokens) + first - 1
        offsets = torch.arange(num_masks + 1, device=anchors.device)
        masks = torch.full((len(anchors), num_masks), self.config.mask_token_id, device=anchors.device)
        block_ids = torch.cat((token_ids[anchors, None], masks), dim=1)
        x = F.embedding(block_ids, self.embed_tokens) * self.config.embedding_scale  # [N, B, H]
        block_positions = positions[anchors, None] + offsets
        tables = self._rotary_tables(block_positions)
        begins = torch.zeros_like(anchors) if segments is None else torch.searchsorted(segments, segments[anchors])
        visible = {kind: Visible(begins, anchors, window=kind.window, is_causal=kind.is_causal) for kind in self._kinds}
        context = self.context_keys_values(features, positions)
        is_recomputing = self.recomputes_layers and torch.is_grad_enabled()
        for layer, keys_values, kind in zip(self.layers, context, self._kinds, strict=True):
            given = (x, tables, keys_values, visible[kind])
            x = checkpoint(layer, *given, use_reentrant=False) if is_recomputing else layer(*given)
        hidden: Tensor = self.norm(x[:, first:])
        return hidden
