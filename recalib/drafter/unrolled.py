"""A drafter of one layer that drafts token after token: what EAGLE-3 and MTP have in common.

The layer's input at row t is the embedding of the token after row t, beside a hidden state: what the target computed at row t,
or for tokens that are drafted the layer's own output for the one before. So a row's output predicts the token two after it. Its
keys and values are those of all rows before, true ones as far as the target has been.

The block of an anchor at row p begins with row p − 1: the target's hidden state of it is there, and the token after it is the
anchor. Each later row has the token that is right there, as a server has where all drafts before were accepted: beyond a wrong
one nothing counts. This is EAGLE-3's training-time test.

Source: arXiv 2503.01840, section 3; vLLM 0.32 `v1/spec_decode/eagle.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from honed.kernels.training.anchor_attention import Visible, anchor_attention
from honed.recalib.drafter.drafter import Drafter
from honed.recalib.drafter.layers import Block

# Letters: N blocks, K tokens drafted, T context rows, H width, I width of the attention's input, G key/value heads, R query
# heads, D head width.


class UnrolledDrafter(Drafter):
    """A drafter of one layer that is run once for each token."""

    @abstractmethod
    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:  # 2 x [..., H] -> [..., I], [..., H]
        """Join a row's two inputs to the attention's, and return the residual as well."""

    @abstractmethod
    def queries(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:  # [..., I] -> [..., R, D]
        """Compute rotated queries."""

    @abstractmethod
    def keys_values(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # [..., I] -> 2 x [..., G, D]
        """Compute rotated keys, and values."""

    @abstractmethod
    def output(self, attended: Tensor, x: Tensor, residual: Tensor) -> Tensor:  # [N, R * D], [N, I], [N, H] -> [N, H]
        """Compute the layer's output, before the last norm."""

    @abstractmethod
    def normed_and_fed(self, output: Tensor) -> tuple[Tensor, Tensor]:  # [N, H] -> 2 x [N, H]
        """Norm the layer's output, and choose what the next row gets as its hidden state: before or after this last norm."""

    def embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:  # 2 x [...] -> [..., H]
        """Embed the tokens after rows at these positions."""
        return F.embedding(token_ids, self.embed_tokens)

    def draft_hidden(
        self,
        features: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        anchors: Tensor,
        segments: Tensor | None = None,
        num_draft_tokens: int | None = None,
    ) -> Tensor:
        """Compute the normed hidden states, each row with the token that is right there."""
        last = len(token_ids) - 1

        def right(k: int, _: Tensor) -> Tensor:
            return token_ids[(anchors + k).clamp(max=last)]

        k = num_draft_tokens or self.config.num_draft_tokens
        return self._unroll(features, positions, token_ids, anchors, segments, k, right)

    @torch.no_grad()
    def draft(
        self,
        features: Tensor,  # [T, H], fused
        positions: Tensor,  # [T]
        token_ids: Tensor,  # [T]
        anchors: Tensor,  # [N]
        segments: Tensor | None = None,  # [T]
        num_draft_tokens: int | None = None,
    ) -> Tensor:  # [N, K]
        """Draft greedily as a server does: each row has the token drafted before. Return token ids."""
        chosen: list[Tensor] = []

        def best(_: int, hidden: Tensor) -> Tensor:
            chosen.append(self.best_drafts(hidden[:, None], anchors)[:, 0])
            return chosen[-1]

        k = num_draft_tokens or self.config.num_draft_tokens
        hidden = self._unroll(features, positions, token_ids, anchors, segments, k, best)
        best(k, hidden[:, -1])
        return torch.stack(chosen, dim=1)

    def _unroll(
        self,
        features: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        anchors: Tensor,
        segments: Tensor | None,
        num_draft_tokens: int,
        next_tokens: Callable[[int, Tensor], Tensor],
    ) -> Tensor:  # [N, K, H]
        """Run the layer once for each token.

        Args:
            next_tokens: (k, normed hidden state [N, H] of the row before) -> [N] tokens k after the anchors.
        """
        rows = anchors - 1
        begins = torch.zeros_like(anchors) if segments is None else torch.searchsorted(segments, segments[anchors])
        following = torch.cat((token_ids[1:], token_ids[-1:]))  # a sample's last row is before none of its anchors
        x, _ = self.inputs(self.embedded(following, positions), features)
        context = self.keys_values(x, self._rotary_tables(positions))
        tokens, hidden = token_ids[anchors], features[rows]
        keys, values = list[Tensor](), list[Tensor]()
        outputs: list[Tensor] = []
        is_recomputing = self.recomputes_layers and torch.is_grad_enabled()
        for k in range(num_draft_tokens):
            if k:
                tokens = next_tokens(k, outputs[-1])
            given = (tokens, hidden, positions[rows] + k, context, Visible(begins, rows), tuple(keys), tuple(values))
            made = checkpoint(self._step, *given, use_reentrant=False) if is_recomputing else self._step(*given)
            normed, hidden, key, value = made
            keys.append(key)
            values.append(value)
            outputs.append(normed)
        return torch.stack(outputs, dim=1)

    def _step(
        self,
        tokens: Tensor,  # [N]
        hidden: Tensor,  # [N, H]
        positions: Tensor,  # [N]
        context: tuple[Tensor, Tensor],  # 2 x [T, G, D]
        visible: Visible,
        keys: tuple[Tensor, ...],  # of [N, 1, G, D], of the block's rows before
        values: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute one row of each block: the normed output, what the next row is fed, and its own key and value."""
        tables = self._rotary_tables(positions[:, None])
        x, residual = self.inputs(self.embedded(tokens, positions), hidden)
        key, value = self.keys_values(x[:, None], tables)
        own_keys, own_values = torch.cat((*keys, key), dim=1), torch.cat((*values, value), dim=1)
        attended = anchor_attention(self.queries(x[:, None], tables), own_keys, own_values, *context, visible)
        out = self.output(attended.flatten(1), x, residual)
        return *self.normed_and_fed(out), key, value


class BlockDrafter(UnrolledDrafter):
    """A drafter whose layer is a `Block`."""

    @property
    @abstractmethod
    def _layer(self) -> Block:
        """The layer."""

    def queries(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Compute rotated queries."""
        return self._layer.self_attn.queries(x, tables)

    def keys_values(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute rotated keys, and values."""
        return self._layer.self_attn.keys_values(x, tables)

    def output(self, attended: Tensor, x: Tensor, residual: Tensor) -> Tensor:
        """Add what was attended to and the MLP's output to the residual."""
        return self._layer.output(attended, residual)
