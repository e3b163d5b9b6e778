"""The EAGLE-3 drafter in plain PyTorch: the same function as vLLM's, and trainable. `UnrolledDrafter` says how it drafts.

The hidden state that it reads is the target's fused features. Its attention reads both inputs side by side.

A row in vLLM's cache depends on `fc`, the norms of both inputs, `k_proj` and `v_proj` (`makes_context`).

Source: arXiv 2503.01840, section 3; vLLM 0.32 `models/llama_eagle3.py`, `models/qwen3_eagle3.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from honed.recalib.config.drafter import DrafterConfig, Eagle3
from honed.recalib.drafter.drafter import Vocabulary
from honed.recalib.drafter.layers import Block, RMSNorm
from honed.recalib.drafter.unrolled import BlockDrafter

# Letters: N blocks, T context rows, H width, A width of unfused features, G key/value heads, R query heads, D head width.


class Layer(Block):
    """The one layer, with the norms of its two inputs. Its attention's input is twice as wide as its output."""

    def __init__(self, config: DrafterConfig, eagle3: Eagle3) -> None:
        # vLLM's Qwen3 class has no bias after its attention.
        has_output_bias = config.attention_bias and not eagle3.has_head_norms
        width = 2 * config.hidden_size
        super().__init__(config, width, has_head_norms=eagle3.has_head_norms, has_output_bias=has_output_bias)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._norms_residual = eagle3.norm_before_residual

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:  # 2 x [..., H] -> [..., 2H], [..., H]
        """Norm both inputs and join them; return the residual as well."""
        normed = self.hidden_norm(hidden)
        return torch.cat((self.input_layernorm(embedded), normed), dim=-1), normed if self._norms_residual else hidden


class Eagle3Drafter(BlockDrafter):
    """An EAGLE-3 drafter of one layer."""

    def __init__(self, config: DrafterConfig, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        assert config.eagle3 is not None
        self._eagle3 = config.eagle3
        width, eps = config.target_hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(config.feature_size, eps) if self._eagle3.norm_before_fc else None
        norms = [RMSNorm(width, eps) for _ in range(self._eagle3.num_features)] if self._eagle3.norms_features else []
        self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config, self._eagle3)])
        self.norm = RMSNorm(config.hidden_size, eps)

    @property
    def _layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def fuse(self, aux_hidden: Tensor) -> Tensor:
        """Fuse the target's layers, concatenated from the lowest on."""
        if self.input_norm is not None:
            aux_hidden = self.input_norm(aux_hidden)
        if self.fc_norm:
            chunks = aux_hidden.chunk(len(self.fc_norm), dim=-1)
            aux_hidden = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        fused: Tensor = self.fc(aux_hidden)
        return fused

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Norm both inputs and lay them side by side."""
        return self._layer.inputs(embedded, hidden)

    def normed_and_fed(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The next row gets the output before the last norm, unless the config says otherwise."""
        normed = self.norm(output)
        return normed, normed if self._eagle3.feeds_normed else output
