"""Qwen3.5's and Qwen3-Next's MTP head in plain PyTorch: the same function as vLLM's, and trainable.

`UnrolledDrafter` says how it drafts. The hidden state that it reads is the target's last one, after its final norm: rows need
no fusing. `fc` joins it with the embedding, and an ordinary layer of the target's kind follows. What the next row is fed is the
output after the last norm. Where the target has experts, the layer has its own. They and their router stay as they are; the
shared expert is trained.

A row in vLLM's cache depends on `fc`, both of its norms, `input_layernorm`, `k_proj`, `k_norm` and `v_proj` (`makes_context`).

Source: vLLM 0.32 `models/qwen3_5_mtp.py`, `models/qwen3_next_mtp.py`, `models/qwen3_next.py` (`Qwen3NextAttention`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from honed.recalib.config.drafter import DrafterConfig, Experts, Mtp
from honed.recalib.drafter.drafter import Vocabulary
from honed.recalib.drafter.layers import MLP, OnePlusNorm, rotate
from honed.recalib.drafter.unrolled import UnrolledDrafter

# Letters: N blocks, T context rows, H width, G key/value heads, R query heads, D head width, E experts, I an expert's width.


class Attention(nn.Module):
    """Attention with normed queries and keys, and a gate on its output that comes with each query."""

    def __init__(self, config: DrafterConfig, has_gate: bool) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim, self.has_gate = config.num_key_value_heads, config.head_dim, has_gate
        width, queries = config.hidden_size, config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries * (2 if has_gate else 1), bias=config.attention_bias)
        self.k_proj = nn.Linear(width, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, width, bias=False)
        self.q_norm = OnePlusNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = OnePlusNorm(config.head_dim, config.rms_norm_eps)

    def queries_gate(self, x: Tensor) -> tuple[Tensor, Tensor | None]:  # [..., H] -> [..., R, D], [..., R * D]
        """Compute queries, neither normed nor rotated, and the gate before its sigmoid."""
        made = self.q_proj(x).view(*x.shape[:-1], -1, self.head_dim * (2 if self.has_gate else 1))
        if not self.has_gate:
            return made, None
        queries, gate = made.chunk(2, dim=-1)
        return queries, gate.flatten(-2)


class SparseMLP(nn.Module):
    """Routed experts beside a shared one with a gate.

    Source: vLLM 0.32 `models/qwen3_next.py` (`Qwen3NextSparseMoeBlock`).
    """

    gate_up: Tensor
    down: Tensor

    def __init__(self, config: DrafterConfig, experts: Experts) -> None:
        super().__init__()
        self.top_k, self.renormalizes = experts.top_k, experts.renormalizes
        self.gate = nn.Linear(config.hidden_size, experts.count, bias=False)
        self.shared_expert = MLP(config)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)
        self.take_experts(torch.empty(0), torch.empty(0))

    def take_experts(self, gate_up: Tensor, down: Tensor) -> None:  # [E, 2 * I, H], [E, H, I]
        """Use these experts: never trained, never saved."""
        self.register_buffer("gate_up", gate_up, persistent=False)
        self.register_buffer("down", down, persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # [..., H]
        rows = x.reshape(-1, x.shape[-1])
        shares, chosen = self.gate(rows).float().softmax(-1).topk(self.top_k)
        if self.renormalizes:
            shares = shares / shares.sum(-1, keepdim=True)
        shared: Tensor = torch.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        routed = (self._experts_of(rows, chosen) * shares[:, :, None]).sum(1)
        summed: Tensor = (shared + routed.to(shared.dtype)).view(x.shape)
        return summed

    def _experts_of(self, rows: Tensor, chosen: Tensor) -> Tensor:  # [N, H], [N, top_k] -> [N, top_k, H]
        """Apply its experts to each row, sorted by expert: the device is waited for once."""
        order = chosen.flatten().argsort(stable=True)
        counts: list[int] = chosen.flatten().bincount(minlength=len(self.gate_up)).tolist()
        ordered, made, first = rows[:, None].expand(-1, self.top_k, -1).flatten(0, 1)[order], list[Tensor](), 0
        for expert, count in enumerate(counts):
            if count:
                gate, up = F.linear(ordered[first : first + count], self.gate_up[expert]).chunk(2, dim=-1)
                made.append(F.linear(F.silu(gate) * up, self.down[expert]))
                first += count
        return torch.cat(made)[order.argsort()].view(*chosen.shape, -1)


class Layer(nn.Module):
    """A pre-norm layer of the target's kind."""

    def __init__(self, config: DrafterConfig, mtp: Mtp) -> None:
        super().__init__()
        self.self_attn = Attention(config, mtp.has_gate)
        self.mlp = MLP(config) if mtp.experts is None else SparseMLP(config, mtp.experts)
        self.input_layernorm = OnePlusNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = OnePlusNorm(config.hidden_size, config.rms_norm_eps)


class MtpDrafter(UnrolledDrafter):
    """An MTP head of one layer."""

    UNTRAINED = ("layers.0.mlp.gate.weight",)
    """The experts' router."""

    def __init__(self, config: DrafterConfig, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        assert config.mtp is not None
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = OnePlusNorm(width, eps)
        self.pre_fc_norm_hidden = OnePlusNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([Layer(config, config.mtp)])
        self.norm = OnePlusNorm(width, eps)

    @property
    def _layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def take_experts(self, gate_up: Tensor, down: Tensor) -> None:  # [E, 2 * I, H], [E, H, I]
        """Use the target's experts."""
        assert isinstance(self._layer.mlp, SparseMLP)
        self._layer.mlp.take_experts(gate_up, down)

    def fuse(self, aux_hidden: Tensor) -> Tensor:
        """The target's last hidden state is what the head reads."""
        return aux_hidden

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Join both inputs to one of the usual width."""
        both = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1)
        joined: Tensor = self.fc(both)
        normed: Tensor = self._layer.input_layernorm(joined)
        return normed, joined

    def queries(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Compute normed and rotated queries."""
        attention = self._layer.self_attn
        return rotate(attention.q_norm(attention.queries_gate(x)[0]), tables)

    def keys_values(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute normed and rotated keys, and values."""
        attention = self._layer.self_attn
        shape = (*x.shape[:-1], attention.num_kv_heads, attention.head_dim)
        keys = rotate(attention.k_norm(attention.k_proj(x).view(shape)), tables)
        return keys, attention.v_proj(x).view(shape)

    def output(self, attended: Tensor, x: Tensor, residual: Tensor) -> Tensor:
        """Gate what was attended to, and add it and the MLP's output to the residual."""
        layer = self._layer
        _, gate = layer.self_attn.queries_gate(x)
        residual = residual + layer.self_attn.o_proj(attended if gate is None else attended * torch.sigmoid(gate))
        out: Tensor = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return out

    def normed_and_fed(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The next row gets the output after the last norm."""
        normed = self.norm(output)
        return normed, normed
