"""Follows every engine's sample ring from the start, whether or not anything is being trained.

So when a workload drifts, samples of the other workloads are already in memory, and training can avoid forgetting them.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from honed.adapt.protocol.sample_ring import FEATURE_KINDS, RingHeader
from honed.recalib.config.trainer import SampleSettings
from honed.recalib.samples.hold_out import HoldOut
from honed.recalib.samples.left_files import LeftFiles
from honed.recalib.samples.ring_reader import MOST_PROBLEMS, RingReader
from honed.recalib.samples.sessions import SessionAssembler
from honed.recalib.samples.spill import Spill, remove
from honed.recalib.samples.store import SampleStore
from honed.recalib.samples.stretch import Stretch

POLL_S = 0.025
"""Time after which a poll ends, though there are more records."""
GONE_S = 3600.0
"""Time after which the samples of an engine whose folder is gone are dropped. An engine that restarts comes back before."""


Features = tuple[int, int, int, int]
"""Width, type and kind of rows, and what tells the target that they come from."""


def is_fused(features: Features | None) -> bool:
    """Tell whether rows are fused; those that nobody knows yet count as fused."""
    return features is None or FEATURE_KINDS[features[2]] == "fused"


class Feed:
    """One engine's ring and the samples kept from it."""

    def __init__(
        self,
        path: Path,
        settings: SampleSettings,
        hold_out: HoldOut,
        spill: Spill | None = None,
        context_of: Callable[[str, bool], str] = lambda version, is_fused: version,
    ) -> None:
        self.reader = RingReader(path)
        self.store = SampleStore(settings, hold_out, spill=spill)
        self._is_old = True
        """The record came before the ring was followed, so its time isn't known well."""
        self._was_made_s = self._was_opened_s = 0.0
        self._assembler = SessionAssembler(
            settings.max_rows,
            came_s=self._came_s,
            context_of=lambda version: context_of(version, self.is_fused),
        )
        self.hold_to(settings.sample_bytes)
        self.features: Features | None = None
        """What its rows are, once there are any."""

    @property
    def is_fused(self) -> bool:
        """Tell whether rows are fused features, rather than the target's concatenated hidden states."""
        return is_fused(self.features)

    @property
    def num_bytes(self) -> int:
        """Memory held, including unfinished requests."""
        return self.store.num_bytes + self._assembler.open_bytes

    def num_lost(self) -> Counter[str]:
        """Count what never became a sample, by reason, so far."""
        lost = self.reader.lost_records + self.reader.bad_records
        return Counter({"answers too short or repetitive": self.store.num_refused, "records lost in the ring": lost})

    def hold_to(self, cap_bytes: int) -> None:
        """Hold no more than this from now on, and an eighth of it of unfinished requests."""
        self.store.hold_to(cap_bytes)
        self._assembler.max_open_bytes = max(cap_bytes // 8, 1 << 20)

    def poll(self, max_records: int) -> int:
        """Take in new records; returns their number."""
        news = self.reader.poll(max_records)
        if news.is_new_ring and self.reader.header is not None:
            for stretch in self._assembler.finish():
                self.store.add(stretch)
            self._note_features(self.reader.header)
            self._was_made_s, self._was_opened_s = self.reader.header.created_unix_ns / 1e9, time.time()
        if news.is_purged:
            self.forget()
        for record in news.records:
            self._is_old = record.is_old
            for stretch in self._assembler.add(record):
                self.store.add(stretch)
        return len(news.records)

    def _came_s(self) -> tuple[float, float]:
        now_s = time.time()
        return (self._was_made_s, self._was_opened_s) if self._is_old else (now_s, now_s)

    def forget(self) -> None:
        """Drop all samples."""
        self._assembler.forget()
        self.store.forget()

    def _note_features(self, header: RingHeader) -> None:
        """Drop earlier rows of another width, type or target: they can't be trained on together."""
        features = (header.feature_size, header.feature_dtype, header.feature_kind, header.target)
        if self.features not in (None, features):
            self.forget()
        self.features = features
        if self.store.spill is not None:
            kind = f"{header.feature_size}-{header.feature_dtype}-{FEATURE_KINDS[header.feature_kind]}-{header.target:08x}"
            self.store.spill.begin(kind, self.store.key_of)


def _missing(feed: Feed) -> Counter[str]:
    reader = feed.reader
    return Counter({"records": reader.lost_records + reader.bad_records, "nonfinite_rows": reader.nonfinite_rows})


class JointStore:
    """The samples of several engines' stores."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = feeds
        self._features: Features | None = None

    def workloads(self) -> list[str]:
        """Workloads with any stretch, by name."""
        return sorted({workload for feed in self._alike for workload in feed.store.workloads()})

    def stretches(self, workload: str, is_held_out: bool) -> list[Stretch]:
        """Return the stretches of one workload on one side of the hold-out."""
        return [one for feed in self._alike for one in feed.store.stretches(workload, is_held_out)]

    def digest(self, stretches: Iterable[Stretch]) -> str:
        """Identify these rows without revealing their content (`HoldOut.digest`)."""
        return self._feeds[0].store.digest(stretches)

    @property
    def features(self) -> Features | None:
        """Width, type, kind and target of the rows of the first feed that has any; they stay the same."""
        self._features = self._features or next((feed.features for feed in self._feeds if feed.features), None)
        return self._features

    @property
    def _alike(self) -> list[Feed]:
        """Feeds with such rows: others can't be trained on together with them."""
        return [feed for feed in self._feeds if feed.features is not None and feed.features == self.features]


class JointFeed:
    """The feeds that one operation learns from."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = feeds
        self.store = JointStore(feeds)

    def num_lost(self) -> Counter[str]:
        """As `Feed.num_lost`, of all."""
        return sum((feed.num_lost() for feed in self._feeds), Counter())

    @property
    def features(self) -> Features | None:
        """As `Feed.features`."""
        return self.store.features

    @property
    def is_fused(self) -> bool:
        """As `Feed.is_fused`."""
        return is_fused(self.features)


class Traffic:
    """The feeds of all engines under the runtime folder, and of any other ring that a request names."""

    def __init__(
        self,
        runtime_dir: Path,
        settings: SampleSettings,
        hold_out: HoldOut,
        spill_dir: Path | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        context_of: Callable[[str, bool], str] = lambda version, is_fused: version,
    ) -> None:
        """Follow the rings of a folder.

        Args:
            spill_dir: folder for samples on disk, if `spill_bytes` allows it; otherwise its content is removed.
            context_of: (drafter version, whether its rows are fused) -> what is equal for versions whose rows mean the same.
        """
        self._context_of = context_of
        self.engines_dir, self._settings, self._hold_out = runtime_dir / "engines", settings, hold_out
        self._spill_dir = spill_dir if settings.spill_bytes else None
        if spill_dir is not None and self._spill_dir is None:
            remove(spill_dir)
        self._left = LeftFiles(self._spill_dir, settings.spill_max_age_s) if self._spill_dir is not None else None
        self._feeds: dict[Path, Feed] = {}
        self._dropped = Counter[str]()
        """Records that the dropped feeds had lost."""
        self._monotonic, self._gone_since_s = monotonic, dict[Path, float]()
        self.expire()

    def feed(self, path: Path) -> Feed:
        """Return the feed of a ring; a new one starts now."""
        if path not in self._feeds:
            self._feeds[path] = Feed(path, self._settings, self._hold_out, self._spill(path), self._context_of)
            self._share()
        return self._feeds[path]

    def joint(self, paths: Sequence[Path]) -> JointFeed:
        """Return the feeds of several rings as one."""
        return JointFeed([self.feed(path) for path in paths])

    def _share(self) -> None:
        """Give each feed the same part of memory and disk."""
        for feed in self._feeds.values():
            feed.hold_to(self._settings.sample_bytes // len(self._feeds))
            if feed.store.spill is not None:
                feed.store.spill.max_bytes = self._settings.spill_bytes // len(self._feeds)

    def freeze(self, is_frozen: bool) -> None:
        """During an operation no file is added or removed on disk."""
        for spill in self._spills:
            spill.is_frozen = is_frozen

    def expire(self) -> None:
        """Remove files that have been on disk for too long, or are too many, whichever engine's they are."""
        for spill in self._spills:
            spill.expire()
        if self._left is not None:
            taken_up = {spill.folder for spill in self._spills if spill.has_begun}
            self._left.expire(taken_up, self._settings.spill_bytes - sum(spill.num_bytes for spill in self._spills))

    def discover(self) -> None:
        """Begin to follow rings that have appeared, and forget those of engines that have been gone for an hour."""
        for path in self.engines_dir.glob("*/ring"):
            self.feed(path)
        now_s = self._monotonic()
        for path in list(self._feeds):
            if path.parent.exists():
                self._gone_since_s.pop(path, None)
            elif now_s - self._gone_since_s.setdefault(path, now_s) > GONE_S:
                dropped = self._feeds.pop(path)
                self._dropped.update(_missing(dropped))
                dropped.forget()
                del self._gone_since_s[path]
                self._share()

    def poll(self, max_records: int = 64) -> int:
        """Take in new records of all rings in turns, until there are no more or `POLL_S` has passed; returns their number."""
        until_s, total = self._monotonic() + POLL_S, 0
        while found := sum(feed.poll(max_records) for feed in self._feeds.values()):
            total += found
            if self._monotonic() >= until_s:
                break
        return total

    def purge(self) -> list[str]:
        """Forget everything, empty the rings and delete all samples on disk, including those of engines that are gone.

        Returns the reasons why something is left.
        """
        self.discover()
        problems = []
        for feed in self._feeds.values():
            problems.append(feed.reader.erase())
            feed.forget()
        if self._spill_dir is not None:
            problems.append(remove(self._spill_dir))
        if self._left is not None:
            self._left.forget()
        return [problem for problem in problems if problem][:MOST_PROBLEMS]

    def num_missing(self) -> Counter[str]:
        """Count what never became a sample since the start, also of engines that are gone: "records" and "nonfinite_rows"."""
        return sum((_missing(feed) for feed in self._feeds.values()), self._dropped)

    @property
    def spilled_bytes(self) -> int:
        """Bytes on disk."""
        return sum(spill.num_bytes for spill in self._spills) + (self._left.num_bytes if self._left is not None else 0)

    @property
    def _spills(self) -> list[Spill]:
        return [feed.store.spill for feed in self._feeds.values() if feed.store.spill is not None]

    def _spill(self, path: Path) -> Spill | None:
        if self._spill_dir is None:
            return None
        name = hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()
        return Spill(self._spill_dir / name, self._settings.spill_bytes, self._settings.spill_max_age_s)

    @property
    def feeds(self) -> list[Feed]:
        """All feeds."""
        return list(self._feeds.values())
