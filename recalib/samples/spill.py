"""Samples on disk that don't fit in memory: only if the operator allows it, for a limited time, and deleted by a purge.

    FOLDER/KIND/<time>-<random>.safetensors      one stretch a file: ids, features, and labels in the header

KIND is the width, type and kind of the features, and what tells their target. Rows of different kinds can't be trained on
together, so other kinds are removed. Token ids stay in memory; features are read when a stretch is drawn. Only their owner can
read the files. During an operation no file is added or removed, so that its chosen samples remain; a purge ends the operation
first.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from honed.recalib.samples.sample import TrainingSample
from honed.recalib.samples.stretch import Stretch

log = structlog.get_logger("honed.trainer")

Key = tuple[str, bool]
"""Workload, and whether it is held out."""
_NO_FEATURES = np.zeros((0, 0), np.uint8)
_LABELS = tuple(field.name for field in fields(Stretch) if field.name not in ("token_ids", "likely", "features"))


@dataclass(frozen=True, eq=False, kw_only=True)
class SpilledStretch(Stretch):
    """A stretch whose features are in a file; `features` has no rows."""

    path: Path

    def read(self, rows: slice) -> Stretch:
        """Read these rows (start and stop given, step 1). Raises OSError, SafetensorError: the file has changed."""
        with safe_open(self.path, framework="np") as file:
            features = file.get_slice("features")[rows.start : rows.stop]
        return replace(Stretch(**_fields(self)).cut(rows), features=features)

    def cut(self, rows: slice) -> Stretch:
        """Keep only these rows, as `Stretch.cut`."""
        return self.read(rows)

    def to_training_sample(self, is_fused: bool) -> TrainingSample:
        """Convert to tensors."""
        return self.read(slice(0, self.num_rows)).to_training_sample(is_fused)


class Spill:
    """The files of one engine's samples.

    Args:
        max_bytes: limit for all files; the oldest are removed first.
        max_age_s: files older than this are removed, and at a start those that a wrong clock has dated later than now.
        clock: seconds since the epoch.
        uptime: seconds; ages of this process are counted on it, since the other clock may jump.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        max_age_s: float,
        clock: Callable[[], float] = time.time,
        uptime: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self.folder, self.max_bytes, self._max_age_s, self._clock, self._uptime = folder, max_bytes, max_age_s, clock, uptime
        self._kind = ""
        self._held: deque[tuple[float, int, Key, SpilledStretch]] = deque()
        """Time of writing by `uptime`, bytes of the file, key, stretch; oldest first."""
        self._dropped: list[tuple[int, Path]] = []
        """Bytes and files that go as soon as files may."""
        self.num_bytes = 0
        self.is_frozen = False
        """True during an operation: its chosen samples must stay."""
        self._has_failed = False

    @property
    def has_begun(self) -> bool:
        """Whether it has taken up what an earlier process left."""
        return bool(self._kind)

    def begin(self, kind: str, key_of: Callable[[Stretch], Key]) -> None:
        """Load what an earlier process left of this kind of features; remove the files of others."""
        if kind == self._kind:
            return
        self._kind = kind
        self._held.clear()
        self._dropped.clear()
        self.num_bytes = 0
        for other in self.folder.glob("*"):
            if other.name != kind:
                shutil.rmtree(other, ignore_errors=True)
        for path in sorted((self.folder / kind).glob("*")):
            try:
                age_s = self._clock() - int(path.name.split("-")[0]) / 1e9
                if age_s < 0.0:
                    raise ValueError(f"{path} is of a time to come")
                stretch = _open(path)
            except (ValueError, OSError, SafetensorError, KeyError, TypeError):  # truncated, of unknown age, or not ours
                path.unlink(missing_ok=True)
                continue
            key = key_of(stretch)
            self._add(self._uptime() - age_s, path.stat().st_size, key, replace(stretch, workload=key[0]))
        self.expire()

    def keep(self, stretch: Stretch, key: Key) -> None:
        """Write a stretch that memory is about to drop; if the disk fails it is lost, and a warning is logged once."""
        if self.is_frozen or not self._kind or stretch.num_bytes > self.max_bytes:
            return
        folder = self.folder / self._kind
        path = folder / f"{int(self._clock() * 1e9):020d}-{secrets.token_hex(4)}.safetensors"
        labels = {name: getattr(stretch, name) for name in _LABELS}
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            named = (("token_ids", stretch.token_ids), ("likely", stretch.likely), ("features", stretch.features))
            tensors = {name: np.ascontiguousarray(rows) for name, rows in named if rows is not None}
            part = path.with_suffix(".part")
            save_file(tensors, part, {"labels": json.dumps(labels)})
            part.chmod(0o600)
            os.replace(part, path)
            num_bytes = path.stat().st_size
        except (OSError, SafetensorError) as error:
            if not self._has_failed:
                log.warning("samples can't be written to disk", folder=str(folder), error=str(error))
            self._has_failed = True
            return
        self._has_failed = False
        self._add(self._uptime(), num_bytes, key, _without_features(stretch, path))
        self.expire()

    def stretches(self, key: Key) -> Iterator[Stretch]:
        """Yield the stretches of a workload on one side of the hold-out, oldest first."""
        return (stretch for _, _, found, stretch in self._held if found == key)

    def workloads(self) -> set[str]:
        """Workloads with any stretch here."""
        return {key[0] for _, _, key, _ in self._held}

    def drop(self, workload: str) -> None:
        """Drop all stretches of a workload. During an operation, which may have chosen some, their files go after it."""
        self._dropped += [(num_bytes, stretch.path) for _, num_bytes, key, stretch in self._held if key[0] == workload]
        self._held = deque(one for one in self._held if one[2][0] != workload)
        self.expire()

    def expire(self) -> None:
        """Remove files that were dropped or are too old, and the oldest beyond the size limit."""
        if self.is_frozen:
            return
        while self._dropped:
            num_bytes, path = self._dropped.pop()
            self.num_bytes -= num_bytes
            path.unlink(missing_ok=True)
        oldest_s = self._uptime() - self._max_age_s
        while self._held and (self._held[0][0] < oldest_s or self.num_bytes > self.max_bytes):
            _, num_bytes, _, stretch = self._held.popleft()
            self.num_bytes -= num_bytes
            stretch.path.unlink(missing_ok=True)

    def purge(self) -> None:
        """Remove everything, even files of an earlier process and during an operation."""
        self._held.clear()
        self._dropped.clear()
        self.num_bytes = 0
        remove(self.folder)

    def _add(self, written_s: float, num_bytes: int, key: Key, stretch: SpilledStretch) -> None:
        self._held.append((written_s, num_bytes, key, stretch))
        self.num_bytes += num_bytes


def remove(folder: Path) -> str:
    """Remove a folder with samples. On failure, log and return the error, because people must learn of it; else ""."""
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        return ""
    log.error("samples on disk can't be removed: remove the folder yourself", folder=str(folder))
    return f"samples on disk can't be removed; remove {folder} yourself"


def _without_features(stretch: Stretch, path: Path) -> SpilledStretch:
    return SpilledStretch(**(_fields(stretch) | {"features": _NO_FEATURES}), path=path)


def _fields(stretch: Stretch) -> dict[str, Any]:
    """Return the fields of a plain stretch."""
    return {field.name: getattr(stretch, field.name) for field in fields(Stretch)}


def _open(path: Path) -> SpilledStretch:
    with safe_open(path, framework="np") as file:
        labels = json.loads((file.metadata() or {})["labels"])
        labels["breaks"] = tuple(labels["breaks"])
        token_ids = file.get_tensor("token_ids")
        likely = file.get_tensor("likely") if "likely" in file.keys() else None  # noqa: SIM118
        num_rows = {len(token_ids if likely is None else likely), file.get_slice("features").get_shape()[0]}
        if num_rows != {len(token_ids)}:
            raise ValueError(f"{path} has rows for other tokens")
    given = {name: labels[name] for name in _LABELS}
    return SpilledStretch(token_ids=token_ids, likely=likely, features=_NO_FEATURES, path=path, **given)
