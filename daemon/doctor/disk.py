"""Check that the disk of the state directory holds what honed may still write there: events, drafter versions, a training."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from honed.daemon.doctor.check import Check
from honed.daemon.doctor.memory import TYPICAL
from honed.daemon.settings.settings import Settings
from honed.recalib.config.drafter import DrafterConfig
from honed.recalib.config.memory import in_words, state_bytes, version_bytes

FREE_BYTES = 1 << 30
"""Free space beside all else: the write-ahead log. A training's state leaves it too."""
OTHERS = 3
"""Versions kept beside the newest: active, previous and floor."""
CURE = "Free disk space, or lower store.max_raw_bytes, store.max_rollup_bytes or registry.keep_versions."


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes that honed may still write, by purpose."""

    events: int
    """Raw batches and sums."""
    versions: int = 0
    training: int = 0
    """A training's saved state, and the one that replaces it; samples on disk."""

    @property
    def total_bytes(self) -> int:
        """Sum."""
        return self.events + self.versions + self.training

    def __str__(self) -> str:
        parts = (("events", self.events), ("drafter versions", self.versions), ("a training", self.training))
        named = ", ".join(f"{in_words(size)} for {name}" for name, size in parts if size)
        return f"honed may still write {in_words(self.total_bytes)}" + (f" ({named})" if named else "")


def growth(settings: Settings, config: DrafterConfig | None, *, has_trainer: bool) -> Growth:
    """What may still be written, beyond what is there.

    Args:
        config: the drafter's; None: a typical one's.
        has_trainer: whether a training may run. Without one, versions come only from a shared registry.
    """
    paths, trainer = settings.paths, settings.trainer_settings()
    events = max(0, settings.store.max_raw_bytes + settings.store.max_rollup_bytes - _size(paths.database))
    if not has_trainer and not settings.registry.url:
        return Growth(events)
    config = config or TYPICAL
    training = trainer.training(settings.recalibration.scope, config.block_size, config.hidden_size)
    there = _sizes(paths.registry / "versions", "*/model.safetensors")
    num_versions = settings.registry.keep_versions + OTHERS if settings.registry.keep_versions else len(there) + 1
    versions = max(0, num_versions * (max(there, default=0) or version_bytes(config, training)) - sum(there))
    if not has_trainer:
        return Growth(events, versions)
    states = 2 * state_bytes(config, training) if trainer.save_state_s else 0
    written = sum(_sizes(paths.state_dir / "training", "*"))
    samples = max(0, trainer.spill_bytes - sum(_sizes(paths.state_dir / "samples", "**")))
    return Growth(events, versions, max(0, states - written) + samples)


def check_room(state_dir: Path, wanted: Growth, guess: str = "") -> Iterator[Check]:
    """Check that what may still be written finds space.

    Args:
        guess: why the drafter was guessed; empty if it is known.
    """
    try:
        free = shutil.disk_usage(state_dir).free
    except OSError:
        return
    text = f"{in_words(free)} are free on the disk of {state_dir}"
    if free < FREE_BYTES:
        cure = "Free disk space; until then nothing is stored and engines keep events in memory."
        yield Check("disk", "error", text, cure)
    elif free < wanted.total_bytes + FREE_BYTES:
        is_guess = bool(guess) and free >= wanted.events + FREE_BYTES
        guessed = f"; guessed as for the drafter of an 8B target: {guess}" if guess else ""
        yield Check("disk", "unknown" if is_guess else "warning", f"{text}, {wanted}{guessed}", CURE)
    else:
        yield Check("disk", "ok", f"{text}, {wanted}")


def _sizes(folder: Path, pattern: str) -> list[int]:
    """Sizes of the files below a folder that match; none if it may not be entered."""
    return [_size(folder / name) for name in glob(pattern, root_dir=folder, recursive=True, include_hidden=True)]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
