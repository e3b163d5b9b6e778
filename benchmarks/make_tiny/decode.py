"""Decoding of the tiny target, greedy or sampled, with K/V written in place: several times faster than a growing cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3ForCausalLM

from honed.recalib.drafter.layers import rotary_tables, rotate

# Letters: S sequences, T new tokens of each, M capacity for all tokens, H width, G key/value heads, R query heads of each, D
# head width.


class GreedyDecoder:
    """Reads a Qwen3's weights, keeps K/V for `num_sequences` sequences of equal length."""

    def __init__(self, model: Qwen3ForCausalLM, num_sequences: int, room_tokens: int) -> None:
        config = model.config
        self.model, self.head_dim, self.kv_heads = model.model, config.head_dim, config.num_key_value_heads
        self.theta = float(config.rope_parameters["rope_theta"])
        shape = (config.num_hidden_layers, 2, num_sequences, self.kv_heads, room_tokens, self.head_dim)
        self.cache = torch.empty(shape)
        self.num_tokens = 0

    def feed(self, token_ids: Tensor) -> Tensor:  # [S, T] -> [S] next tokens
        """Append tokens; return the greedy next token of each sequence."""
        return self.logits(token_ids).argmax(-1)

    def logits(self, token_ids: Tensor) -> Tensor:  # [S, T] -> [S, V]
        """Append tokens; return the logits of the next token."""
        first, self.num_tokens = self.num_tokens, self.num_tokens + token_ids.shape[1]
        tables = rotary_tables(torch.arange(first, self.num_tokens), self.head_dim, self.theta)
        x = F.embedding(token_ids, self.model.embed_tokens.weight)
        for layer, cache in zip(self.model.layers, self.cache, strict=True):
            x = x + self._attend(layer.self_attn, layer.input_layernorm(x), cache, tables, first)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return F.linear(self.model.norm(x[:, -1]), self.model.embed_tokens.weight)

    def _attend(
        self, attention: nn.Module, x: Tensor, cache: Tensor, tables: tuple[Tensor, Tensor], first: int
    ) -> Tensor:  # [S, T, H]
        s, t, _ = x.shape
        q, k, v = (proj(x).view(s, t, -1, self.head_dim) for proj in self._projections(attention))
        q, k = rotate(attention.q_norm(q), tables), rotate(attention.k_norm(k), tables)
        cache[0, :, :, first : first + t] = k.transpose(1, 2)
        cache[1, :, :, first : first + t] = v.transpose(1, 2)
        keys, values = cache[:, :, :, : first + t]  # [S, G, M, D]
        q = q.view(s, t, self.kv_heads, -1, self.head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [S, G, R * T, D]
        scores = (q * self.head_dim**-0.5) @ keys.transpose(-1, -2)
        if t > 1:
            is_future = torch.ones(t, first + t, dtype=torch.bool).triu(first + 1)
            scores = scores.unflatten(2, (-1, t)).masked_fill(is_future, float("-inf")).flatten(2, 3)
        out = (scores.softmax(-1) @ values).unflatten(2, (-1, t))  # [S, G, R, T, D]
        projected: Tensor = attention.o_proj(out.permute(0, 3, 1, 2, 4).reshape(s, t, -1))
        return projected

    @staticmethod
    def _projections(attention: nn.Module) -> tuple[nn.Module, ...]:
        return attention.q_proj, attention.k_proj, attention.v_proj  # type: ignore[return-value]


@torch.inference_mode()
def continue_greedily(model: PreTrainedModel, prompts: Tensor, num_tokens: int) -> Tensor:  # [S, P] -> [S, P + num]
    """Continue greedily; a sequence continues past the end token, `emitted_length` cuts it."""
    if not isinstance(model, Qwen3ForCausalLM):
        return _continue_with_its_own_cache(model, prompts, num_tokens)
    decoder = GreedyDecoder(model, len(prompts), prompts.shape[1] + num_tokens)
    pieces = [prompts, decoder.feed(prompts)[:, None]]
    for _ in range(num_tokens - 1):
        pieces.append(decoder.feed(pieces[-1])[:, None])
    return torch.cat(pieces, dim=1)


def _continue_with_its_own_cache(model: PreTrainedModel, prompts: Tensor, num_tokens: int) -> Tensor:
    pieces, cache = [prompts], None
    for _ in range(num_tokens):
        found = model(pieces[-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = found.past_key_values
        pieces.append(found.logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(pieces, dim=1)
