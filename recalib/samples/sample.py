"""Training samples: one request's text with the target's features of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Letters: T tokens of the request, H width of the drafter, A auxiliary layers x width of the target.


@dataclass(frozen=True, eq=False)
class TrainingSample:
    """A stretch of one request, prompt and emitted text, with the context features that the drafter had for it.

    Row i of every tensor is the same token. `features[i]` is what the target computed *at* `token_ids[i]`, `positions[i]` is
    its absolute position (positions rise by one; the stretch need not begin at 0). `features` are the fused ones (after `fc`
    and `hidden_norm`) or, with `is_fused = False`, the target's concatenated auxiliary hidden states. `break_positions` are
    absolute positions of tokens that the target emitted in place of a rejected draft token. `likely[i]` is the target's most
    likely token after row i. It is learned in place of the emitted one, which was drawn at random; −1: it isn't known.
    """

    features: Tensor  # [T, H] or [T, A]
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    session: str
    workload: str
    break_positions: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    is_fused: bool = True
    likely: Tensor | None = None  # [T] int64

    def __post_init__(self) -> None:
        """Check the row counts: mismatched rows would train the drafter on nonsense."""
        num_tokens = self.token_ids.shape[0]
        rows = {"features": self.features, "positions": self.positions, "likely": self.likely}
        for name, tensor in rows.items():
            if tensor is not None and tensor.shape[0] != num_tokens:
                raise ValueError(f"sample of session {self.session}: {name} has {tensor.shape[0]} rows, not {num_tokens}")
        if num_tokens and not torch.equal(self.positions, self.positions[0] + torch.arange(num_tokens)):
            raise ValueError(f"sample of session {self.session}: positions do not rise by one")

    @property
    def num_tokens(self) -> int:
        """Rows of the sample."""
        return int(self.token_ids.shape[0])


@dataclass(frozen=True, eq=False)
class PackedSamples:
    """Several samples end to end; `segments` keeps their attention apart."""

    features: Tensor  # [T, H] or [T, A]
    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    segments: Tensor  # [T] int64, sample of each row
    is_emitted: Tensor  # [T] bool, whether the target emitted the token: the others are a prompt's
    is_fused: bool
    goals: Tensor  # [T] int64, what a drafter learns to draft after each row

    @property
    def starts(self) -> Tensor:  # [S] row at which each sample begins
        """First row of each sample."""
        return torch.searchsorted(self.segments, torch.arange(int(self.segments[-1]) + 1))

    def to(self, device: torch.device) -> PackedSamples:
        """Copy to a device, but for what anchors are chosen by."""
        moved = [t.to(device, non_blocking=True) for t in (self.features, self.token_ids, self.positions, self.segments)]
        return PackedSamples(moved[0], moved[1], moved[2], moved[3], self.is_emitted, self.is_fused, self.goals)


def pack(samples: list[TrainingSample]) -> PackedSamples:
    """Concatenate samples of the same kind.

    Raises:
        ValueError: there is none, or fused and unfused features are mixed.
    """
    if not samples:
        raise ValueError("nothing to pack: give at least one sample")
    if len({sample.is_fused for sample in samples}) > 1:
        raise ValueError("samples with fused and unfused features cannot be packed together")
    return PackedSamples(
        features=torch.cat([sample.features for sample in samples]),
        token_ids=torch.cat([sample.token_ids for sample in samples]),
        positions=torch.cat([sample.positions for sample in samples]),
        segments=torch.cat([torch.full((sample.num_tokens,), i) for i, sample in enumerate(samples)]),
        is_emitted=torch.cat([torch.arange(sample.num_tokens) >= sample.num_prompt_tokens for sample in samples]),
        is_fused=samples[0].is_fused,
        goals=torch.cat([_goals(sample) for sample in samples]),
    )


def _goals(sample: TrainingSample) -> Tensor:  # [T]
    """The target's most likely token after each row, or else the emitted one; the last one after itself."""
    emitted = torch.cat((sample.token_ids[1:], sample.token_ids[-1:]))
    return emitted if sample.likely is None else torch.where(sample.likely < 0, emitted, sample.likely)
