"""Follows every engine's sample ring, from the start and whether or not anything is being trained.

So when a workload drifts, what the other workloads looked like is in memory already, and the candidate can be kept from
forgetting them.
"""

from __future__ import annotations

from pathlib import Path

from honed.adapt.sample_ring import FEATURE_KINDS, RingHeader
from honed.recalib.hold_out import HoldOut
from honed.recalib.ring_reader import RingReader
from honed.recalib.samples import SampleStore
from honed.recalib.sessions import SessionAssembler
from honed.recalib.trainer_settings import SampleSettings


class Feed:
    """One engine's ring and all that is remembered of it."""

    def __init__(self, path: Path, settings: SampleSettings, hold_out: HoldOut) -> None:
        self.reader = RingReader(path)
        self.store = SampleStore(settings, hold_out)
        self._assembler = SessionAssembler(settings.max_rows, max_open_bytes=max(settings.sample_bytes // 8, 1 << 20))
        self._features: tuple[int, int, int] | None = None

    @property
    def is_fused(self) -> bool:
        """Whether rows are fused features, rather than the target's hidden states side by side."""
        return self._features is None or FEATURE_KINDS[self._features[2]] == "fused"

    @property
    def num_bytes(self) -> int:
        """Memory held, requests that go on included."""
        return self.store.num_bytes + self._assembler.open_bytes

    def poll(self, max_records: int) -> int:
        """Take in what is new; returns the number of records."""
        news = self.reader.poll(max_records)
        if news.is_new_ring and self.reader.header is not None:
            for stretch in self._assembler.finish():
                self.store.add(stretch)
            self._note_features(self.reader.header)
        if news.is_purged:
            self.forget()
        for record in news.records:
            for stretch in self._assembler.add(record):
                self.store.add(stretch)
        return len(news.records)

    def forget(self) -> None:
        """Drop everything remembered."""
        self._assembler.forget()
        self.store.forget()

    def _note_features(self, header: RingHeader) -> None:
        """Rows of another width or type can't be trained on together: the earlier ones go."""
        features = (header.feature_size, header.feature_dtype, header.feature_kind)
        if self._features not in (None, features):
            self.forget()
        self._features = features


class Traffic:
    """The feeds of all engines under the runtime folder, and of any other ring that a request names."""

    def __init__(self, runtime_dir: Path, settings: SampleSettings, hold_out: HoldOut) -> None:
        self._engines, self._settings, self._hold_out = runtime_dir / "engines", settings, hold_out
        self._feeds: dict[Path, Feed] = {}

    def feed(self, path: Path) -> Feed:
        """The feed of a ring, begun now when it is new."""
        if path not in self._feeds:
            self._feeds[path] = Feed(path, self._settings, self._hold_out)
            for feed in self._feeds.values():
                feed.store.cap_bytes = self._settings.sample_bytes // len(self._feeds)
        return self._feeds[path]

    def discover(self) -> None:
        """Begin to follow rings that have appeared."""
        for path in self._engines.glob("*/ring"):
            self.feed(path)

    def poll(self, max_records: int = 256) -> int:
        """Take in what is new on all rings; returns the number of records."""
        return sum(feed.poll(max_records) for feed in self._feeds.values())

    def busy_paths(self) -> list[Path]:
        """Where the engines say whether they have work."""
        return [path.parent / "busy" for path in self._feeds]

    def purge(self) -> None:
        """Forget everything, and empty the rings."""
        for feed in self._feeds.values():
            feed.reader.erase()
            feed.forget()

    @property
    def feeds(self) -> list[Feed]:
        """All feeds."""
        return list(self._feeds.values())
