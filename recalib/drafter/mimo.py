"""MiMo-7B's MTP head in plain PyTorch: the same function as vLLM's, and trainable. `UnrolledDrafter` says how it drafts.

The hidden state that it reads is the target's last one, before its final norm: rows need no fusing. `input_proj` joins it with
the embedding, and a layer of Qwen2's kind follows. What the next row is fed is the output after the head's own last norm. The
row at position 0 has zeros in the place of an embedding.

A row in vLLM's cache depends on `input_proj`, the norms of both its inputs, `input_layernorm`, `k_proj` and `v_proj`
(`makes_context`).

Source: vLLM 0.32 `models/mimo_mtp.py`, `models/mimo.py`, `models/qwen2.py`; arXiv 2505.07608, section 2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from honed.recalib.config.drafter import DrafterConfig
from honed.recalib.drafter.drafter import Vocabulary
from honed.recalib.drafter.layers import Block, RMSNorm
from honed.recalib.drafter.unrolled import BlockDrafter

# Letters: N blocks, H width.


class Layer(Block):
    """The layer, with what joins its two inputs and the norm after it."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config, config.hidden_size, has_head_norms=False, has_output_bias=False)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = RMSNorm(width, eps)
        self.hidden_layernorm = RMSNorm(width, eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.final_layernorm = RMSNorm(width, eps)


class MimoDrafter(BlockDrafter):
    """An MTP head of one layer."""

    def __init__(self, config: DrafterConfig, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        self.mtp_layers = nn.ModuleList([Layer(config)])

    @property
    def _layer(self) -> Layer:
        layer = self.mtp_layers[0]
        assert isinstance(layer, Layer)
        return layer

    def fuse(self, aux_hidden: Tensor) -> Tensor:
        """The target's last hidden state is what the head reads."""
        return aux_hidden

    def embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Embed the tokens after rows at these positions; after position 0 it is zeros."""
        return torch.where(positions.unsqueeze(-1) == 0, 0.0, super().embedded(token_ids, positions))

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Join both inputs to one of the usual width: the hidden state comes first."""
        layer = self._layer
        joined: Tensor = layer.input_proj(torch.cat((layer.hidden_layernorm(hidden), layer.token_layernorm(embedded)), dim=-1))
        normed: Tensor = layer.input_layernorm(joined)
        return normed, joined

    def normed_and_fed(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The next row gets the output after the last norm."""
        normed = self._layer.final_layernorm(output)
        return normed, normed
