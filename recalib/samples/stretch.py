"""A contiguous stretch of one captured request, in numpy until it is trained on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from honed.recalib.samples.sample import TrainingSample


@dataclass(frozen=True, eq=False)
class Stretch:
    """Rows at `first_position`, `first_position + 1`, …; the first `num_prompt_tokens` of them are prompt."""

    session: str
    workload: str
    drafter_version: str
    first_position: int
    token_ids: NDArray[np.int32]  # [T]
    features: NDArray[Any]  # [T, F]; bfloat16 as uint16
    num_prompt_tokens: int = 0
    breaks: tuple[int, ...] = ()
    """Positions of tokens that the target emitted in place of a draft, ascending."""
    taken_s: float = 0.0
    """Unix time by which the first row had come; 0: unknown."""
    earliest_s: float = 0.0
    """Unix time before which it hadn't. The two are equal unless it was in the ring before the trainer was."""
    context: str = ""
    """What made its features (`contexts_of`); the version's name if that was unknown when it came."""
    likely: NDArray[np.int32] | None = None  # [T]
    """The target's most likely token after each row; −1 where that isn't known, or is the emitted one; None: everywhere."""

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_judged(self) -> int:
        """Number of rows that the target emitted."""
        return max(self.num_rows - self.num_prompt_tokens, 0)

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        return int(self.token_ids.nbytes + self.features.nbytes) + (0 if self.likely is None else self.likely.nbytes)

    def cut(self, rows: slice) -> Stretch:
        """Copy only these rows (step 1), so that the rest of the memory is freed."""
        first = self.first_position + rows.start
        end = self.first_position + rows.stop
        return replace(
            self,
            first_position=first,
            token_ids=self.token_ids[rows].copy(),
            features=self.features[rows].copy(),
            num_prompt_tokens=min(max(self.num_prompt_tokens - rows.start, 0), rows.stop - rows.start),
            breaks=tuple(p for p in self.breaks if first <= p < end),
            likely=None if self.likely is None else self.likely[rows].copy(),
        )

    def to_training_sample(self, is_fused: bool) -> TrainingSample:
        """Convert to tensors, without copying the features."""
        features = torch.from_numpy(_writable(self.features).view(np.int16 if _is_bfloat16(self) else self.features.dtype))
        return TrainingSample(
            features=features.view(torch.bfloat16) if _is_bfloat16(self) else features,
            token_ids=torch.from_numpy(self.token_ids.astype(np.int64)),
            positions=torch.arange(self.first_position, self.first_position + self.num_rows),
            session=self.session,
            workload=self.workload,
            break_positions=self.breaks,
            num_prompt_tokens=self.num_prompt_tokens,
            is_fused=is_fused,
            likely=None if self.likely is None else torch.from_numpy(self.likely.astype(np.int64)),
        )


def _is_bfloat16(stretch: Stretch) -> bool:
    return bool(stretch.features.dtype == np.uint16)


def _writable(features: NDArray[Any]) -> NDArray[Any]:
    """Make features writable: torch warns of read-only arrays."""
    return features if features.flags.writeable else features.copy()
