"""What every kind of drafter offers to training and gate.

A block is an anchor at row p and the K tokens after it. The drafter knows what the target computed for the rows before p, and
the anchor's token. `draft_hidden` gives the K hidden states that predict the tokens at p + 1 … p + K.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from honed.kernels.training.block_loss import top_tokens
from honed.recalib.config.drafter import DrafterConfig
from honed.recalib.drafter.layers import rotary_tables

# Letters: N blocks, K tokens drafted, m candidates of a position, P tokens that they may follow, T context rows, H width, A
# width of unfused features, V vocabulary, W words that are drafted.


class Vocabulary(NamedTuple):
    """Embedding, head and words: the target's, or the drafter's own."""

    embed_tokens: Tensor  # [V, H]
    lm_head: Tensor  # [W, H]
    words: Tensor | None = None  # [W]
    """The target's id of each of the drafter's words; None: they are the target's."""


class Candidates(NamedTuple):
    """Likeliest tokens of each position, the best first; or those after each of P tokens of the position before."""

    log_probs: Tensor  # [N, K, m] or [N, K, P, m]
    ids: Tensor  # the same
    places: Tensor | None = None  # [N, K, P, m]
    """Place of each token among its position's P; after the anchor row 0 counts."""

    def chain(self) -> Tensor:  # [N, K]
        """Take each position's best token, after the one taken before."""
        if self.places is None:
            return self.ids[:, :, 0]
        row = torch.zeros(len(self.ids), dtype=torch.int64, device=self.ids.device)
        at, taken = torch.arange(len(self.ids), device=self.ids.device), list[Tensor]()
        for k in range(self.ids.shape[1]):
            taken.append(self.ids[at, k, row, 0])
            row = self.places[at, k, row, 0]
        return torch.stack(taken, dim=1)


class Drafter(nn.Module, ABC):
    """A drafter whose parameters have the checkpoint's names.

    The vocabulary's tensors are buffers: never trained, never saved.
    """

    UNTRAINED: ClassVar[tuple[str, ...]] = ()
    """Parameters that are never trained."""
    embed_tokens: Tensor
    lm_head: Tensor
    words: Tensor | None
    recomputes_layers = False
    """Gradient checkpointing: a layer is recomputed in the backward pass instead of kept."""
    _word_of: Tensor | None

    def __init__(self, config: DrafterConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config = config
        embed_tokens, lm_head, words = vocabulary
        self.register_buffer("embed_tokens", embed_tokens, persistent=False)
        self.register_buffer("lm_head", lm_head, persistent=False)
        word_of = None
        if words is not None:
            word_of = torch.full((len(embed_tokens),), -1).scatter(0, words, torch.arange(len(words)))
        self.register_buffer("words", words, persistent=False)
        self.register_buffer("_word_of", word_of, persistent=False)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.embed_tokens.device

    def to_target(self, words: Tensor) -> Tensor:
        """Token ids of the drafter's words, of any shape."""
        return words if self.words is None else self.words[words]

    def to_words(self, token_ids: Tensor) -> Tensor:
        """The drafter's words of token ids, of any shape; −1 for a token that it can't draft."""
        return token_ids if self._word_of is None else self._word_of[token_ids]

    def _rotary_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        return rotary_tables(positions, int(config.head_dim * config.rotary_share), config.rope_theta, config.rope_scaling)

    @abstractmethod
    def fuse(self, aux_hidden: Tensor) -> Tensor:  # [T, A] -> [T, H]
        """Fuse what the target computed for each row into features of the drafter's width."""

    @abstractmethod
    def draft_hidden(
        self,
        features: Tensor,  # [T, H], fused
        positions: Tensor,  # [T]
        token_ids: Tensor,  # [T]
        anchors: Tensor,  # [N] rows of the anchors, >= 1
        segments: Tensor | None = None,  # [T] sample of each row
        num_draft_tokens: int | None = None,
    ) -> Tensor:  # [N, K, H]
        """Compute the normed hidden states that predict the `num_draft_tokens` (default: the config's) tokens after anchors."""

    def scored(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:  # [N, K, H], [N, K] -> [N, K, H'], [W, H']
        """Rows and a head whose products are the scores of every token after a known previous one."""
        return hidden, self.lm_head

    @torch.no_grad()
    def best_drafts(self, hidden: Tensor, anchor_ids: Tensor) -> Tensor:  # [N, K, H], [N] -> [N, K]
        """Draft greedily; return token ids."""
        return self.to_target(top_tokens(hidden, self.lm_head))

    @property
    def grows_trees(self) -> bool:
        """Whether engines grow draft trees from its `candidates`."""
        return False

    def candidates(self, hidden: Tensor, anchor_ids: Tensor, count: int) -> Candidates:  # [N, K, H], [N]
        """Find each position's `count` likeliest tokens, at temperature 1."""
        raise NotImplementedError("this kind of drafter grows no trees")

    def forward(
        self,
        features: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        anchors: Tensor,
        segments: Tensor | None = None,
        num_draft_tokens: int | None = None,
    ) -> Tensor:  # [N, K, V]
        """Compute the logits of `draft_hidden`, without a selector's part."""
        hidden = self.draft_hidden(features, positions, token_ids, anchors, segments, num_draft_tokens)
        logits = F.linear(hidden, self.lm_head)
        if self.words is None:
            return logits
        everything = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
        return everything.index_copy(-1, self.words, logits)
