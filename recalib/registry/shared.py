"""A registry shared by several hosts: versions that passed the gate on one can be tried on the others.

    URL/versions/<sha256 of the weights>/{model.safetensors,config.json,manifest.json}
    URL/evidence/<sha256 of the old weights>/<sha256 of the new>/<trial>.json

The URL is fsspec's (`file:///mnt/nfs/honed`, `s3://bucket/honed`, …). Versions are named by their content, since each host's
registry has its own numbers. honed removes nothing there. A version exists once its manifest does, which is written last. Its
owner writes it again where its manifest or a file is missing or cut off. Fetched files are compared with the manifest before
they enter the registry. What isn't as its manifest says is downloaded again only once it was written anew, or after an hour.
Each host keeps its own aliases: it decides itself which version is active.

Evidence is what a trial's bets have made so far (`adapt.monitor.evidence`). Only its own host writes a trial's file, again and
again. Trials are kept: a product over all is a test, over chosen ones it isn't. The first `MOST_TRIALS` by name are read: names
are random.
"""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from honed.adapt.monitor.evidence import BETS_SHAPE
from honed.adapt.protocol.arrays import Floats
from honed.adapt.protocol.workloads import MAX_WORKLOADS
from honed.recalib.registry.durable import MAX_DOCUMENT_BYTES, sha256_file
from honed.recalib.registry.manifest import CONFIG, MANIFEST, WEIGHTS, Manifest, RegistryError
from honed.recalib.registry.registry import Registry

T = TypeVar("T")
_BY_DATE = attrgetter("created_unix_s")
_CREDENTIALS = re.compile(r"//\S*@")
"""A secret may have a slash in it."""
_SAME_USER = "the user honed must have the same uid and gid on every host, and own the place (docs/operate.md)"
_STAMPS = frozenset(("size", "mtime", "created", "ETag", "LastModified", "etag", "md5Hash", "updated"))
"""What file systems say of a file that was written anew."""

_ONE_ATTEMPT = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}
_OPTIONS: dict[str, dict[str, Any]] = {"s3": _ONE_ATTEMPT, "s3a": _ONE_ATTEMPT}
"""By protocol. s3fs repeats a request by itself: botocore's own repetitions would make it 25 times 15 s."""
MOST_PAIRS, LEAST_LOG = 10_000_000, 1e9
"""Bounds of what a trial may tell: pairs, and how far below 0 a bet's ln is."""
MOST_TRIALS = 256
"""Trials of two versions that are read."""
DAMAGED_S = 3600.0
"""Time after which a damaged version is downloaded again though nobody wrote it anew: the damage may be the network's."""
_TRIAL = re.compile(r"[0-9a-f]{8,64}\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class DamagedVersionError(RegistryError):
    """The files there aren't the drafter that their manifest describes. Other versions there may be sound."""


class TrialReport(msgspec.Struct, frozen=True):
    """A trial's evidence, as its host tells it."""

    pairs: int
    """Pairs of windows so far."""
    log_bets: dict[str, list[list[float]]]
    """By workload ("": all traffic), each bet's ln, [2 + M, B]."""

    def arrays(self) -> dict[str, Floats]:
        """The bets by workload. Raises ValueError for what no trial can have: a pair at most doubles a bet."""
        if not 0 <= self.pairs <= MOST_PAIRS or len(self.log_bets) > MAX_WORKLOADS + 2:
            raise ValueError(f"{self.pairs} pairs, {len(self.log_bets)} workloads")
        found = {name: np.array(bets, dtype=np.float64) for name, bets in self.log_bets.items()}
        for name, bets in found.items():
            if (
                bets.shape != BETS_SHAPE
                or not (bets <= self.pairs * math.log(2.0) + 1e-6).all()
                or not (bets > -LEAST_LOG).all()
            ):
                raise ValueError(f"workload {name[:64]!r}: no bets of {self.pairs} pairs")
        return found


def _size(about: Mapping[str, Any]) -> int | None:
    """Bytes of a file; None if unknown, or for what is no file: a pipe would block for ever."""
    return about.get("size") if about.get("type") == "file" else None


def _stamp(about: Mapping[str, Any]) -> str:
    """What tells a file's content apart from what was there before."""
    return repr(sorted((key, str(value)) for key, value in about.items() if key in _STAMPS))


def without_credentials(text: str) -> str:
    """A URL, or a text with one, without its credentials."""
    return _CREDENTIALS.sub("//", text)


class UrlError(RegistryError):
    """A URL that is wrong, or needs what isn't installed. It stays so until somebody corrects that."""


def open_url(url: str) -> tuple[Any, str]:
    """The file system for a URL's protocol, and the path in it. Most reach nothing yet.

    Raises:
        UrlError: there is none, or it isn't installed.
        RegistryError: it can't be reached, where that shows already.
    """
    try:
        import fsspec
    except ImportError as error:
        shown = without_credentials(url)
        raise UrlError(f"registry.url = {shown!r} needs fsspec: pip install '/path/to/honed[shared]'") from error
    try:
        made: tuple[Any, str] = fsspec.core.url_to_fs(url, **_OPTIONS.get(url.partition(":")[0], {}))
    except Exception as error:  # what its file system raises, such as "Install s3fs to access S3" and "Protocol not known: …"
        is_lasting = isinstance(error, ImportError | TypeError | ValueError) and not isinstance(error, OSError)
        kind = UrlError if is_lasting else RegistryError
        raise kind(without_credentials(f"registry.url = {url!r} can't be used: {error}")) from error
    return made


class SharedRegistry:
    """Versions under one URL, and transfers between there and this host's registry."""

    def __init__(
        self,
        url: str,
        registry: Registry,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Find the file system for the URL's protocol; nothing is read yet.

        Raises:
            RegistryError: as `open_url`.
        """
        self.url, self._registry, self._monotonic, self._clock = url, registry, monotonic, clock
        self._fs, self._root = open_url(url)
        from fsspec.implementations.local import LocalFileSystem

        self._is_mounted = isinstance(self._fs, LocalFileSystem)
        self._versions = f"{self._root.rstrip('/')}/versions"
        self._evidence = f"{self._root.rstrip('/')}/evidence"
        self._known: dict[str, Manifest] = {}
        self._first_seen_unix_s: dict[str, float] = {}
        self._damaged: dict[str, tuple[str, float, str]] = {}
        """By digest of the weights: what tells the files' content apart, time of the next download, and the error."""
        self._heard: dict[str, tuple[str, dict[str, Floats]]] = {}
        """By file: what tells its content apart, and its evidence."""

    def push(self, version: str) -> bool:
        """Copy a version there, after comparing its bytes with its manifest. False: it was already there, of full length.

        Raises:
            RegistryError: it is damaged here, or can't be written there.
        """
        manifest = self._registry.get(version)
        folder, place = self._registry.path(version), f"{self._versions}/{manifest.sha256}"
        origin = manifest.origin or f"{socket.gethostname()}:{version}"
        text = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(manifest, origin=origin)))

        def copy() -> bool:
            if self._is_complete(manifest, (folder / CONFIG).stat().st_size):
                return False
            self._registry.verify(version)
            self._fs.makedirs(place, exist_ok=True)
            for name in (WEIGHTS, CONFIG):
                self._fs.put_file(str(folder / name), f"{place}/{name}")
            self._fs.pipe_file(f"{place}/{MANIFEST}", text)
            return True

        return self._reaching(copy)

    def _is_complete(self, manifest: Manifest, config_bytes: int) -> bool:
        """Look afresh whether a version is there, as far as can be told without reading its weights."""
        self._fs.invalidate_cache()
        there, place = self._read_manifest(manifest.sha256), f"{self._versions}/{manifest.sha256}"
        if there is None or (there.bytes, there.config_sha256) != (manifest.bytes, manifest.config_sha256):
            return False
        lengths = {WEIGHTS: manifest.bytes, CONFIG: config_bytes}
        return all(_size(self._about(f"{place}/{name}")) == num_bytes for name, num_bytes in lengths.items())

    def listing(self) -> list[Manifest]:
        """List what is there, oldest first; an unreadable manifest means an unfinished upload. Raises RegistryError.

        None is dated later than it was first seen here: the clock of its host may be ahead.
        """

        def read() -> list[Manifest]:
            names = {path.rstrip("/").rsplit("/", 1)[-1] for path in self._entries(self._versions, detail=False)}
            found = [self._manifest(name) for name in sorted(names) if _SHA256.fullmatch(name)]
            return sorted((manifest for manifest in found if manifest is not None), key=_BY_DATE)

        found, now_s = self._reaching(read), self._clock()
        latest = [self._first_seen_unix_s.setdefault(one.sha256, now_s) for one in found]
        dated = [
            msgspec.structs.replace(one, created_unix_s=min(one.created_unix_s, most))
            for one, most in zip(found, latest, strict=True)
        ]
        return sorted(dated, key=_BY_DATE)  # of equal dates, in the order of those that they were given

    def missing(self, wanted: Collection[tuple[str, str]]) -> list[Manifest]:
        """List versions that are there and not here, and newer than any that is in both places; oldest first.

        Args:
            wanted: targets' digests, and methods: each pair has versions of its own.
        """
        here = {(manifest.sha256, manifest.target_sha256) for manifest in self._registry.versions()}
        done, found = set[tuple[str, str]](), list[Manifest]()
        for one in reversed(self.listing()):
            serves = one.target_sha256, one.method
            if (one.sha256, one.target_sha256) in here:
                done.add(serves)
            elif serves in wanted and serves not in done:
                found.append(one)
        return found[::-1]

    def fetch(self, manifest: Manifest, target_path: str) -> Manifest:
        """Add a version from there to the registry.

        Raises:
            DamagedVersionError: it isn't what its manifest says, or no drafter that this honed knows.
            RegistryError: it can't be read, or the disk fails.
        """
        return self._reaching(lambda: self._fetch(manifest, target_path))

    def _fetch(self, manifest: Manifest, target_path: str) -> Manifest:
        place = f"{self._versions}/{manifest.sha256}"
        cure = f"remove {place}; the host that made it writes it again, while it is active there"
        found = {name: self._about(f"{place}/{name}") for name in (WEIGHTS, CONFIG)}
        stamp, now_s = " ".join(map(_stamp, found.values())), self._monotonic()
        known = self._damaged.get(manifest.sha256)
        if known is not None and known[0] == stamp and now_s < known[1]:
            raise DamagedVersionError(known[2])

        def write(folder: Path) -> None:
            for name, told, least_bytes, most_bytes in (
                (WEIGHTS, manifest.sha256, manifest.bytes, manifest.bytes),
                (CONFIG, manifest.config_sha256, 0, MAX_DOCUMENT_BYTES),
            ):
                if (num_bytes := _size(found[name])) is None:
                    raise RegistryError(f"{place}/{name} is missing, or no file: {cure}")
                if not least_bytes <= num_bytes <= most_bytes:
                    wanted = f"{most_bytes}" if least_bytes == most_bytes else f"at most {most_bytes}"
                    raise RegistryError(f"{place}/{name} has {num_bytes} bytes, {wanted} are expected: {cure}")
                self._fs.get_file(f"{place}/{name}", str(folder / name))
                if (num_came := (folder / name).stat().st_size) != num_bytes:
                    raise RegistryError(f"{place}/{name} was cut off after {num_came} bytes") from ConnectionError()
                if (sha256 := sha256_file(folder / name)) != told:
                    raise RegistryError(f"{place}/{name} has sha256 {sha256[:16]}…, its manifest says {told[:16]}…: {cure}")

        about: dict[str, Any] = {
            name: getattr(manifest, name)
            for name in ("created_unix_s", "parent", "scope", "figures", "data_window", "vllm_version", "note", "origin")
        }
        try:
            return self._registry.create(write, target_path=target_path, **about)
        except RegistryError as error:
            if isinstance(error.__cause__, OSError):  # the disk and the network may be well again soon
                raise
            self._damaged[manifest.sha256] = stamp, now_s + DAMAGED_S, str(error)
            self._known.pop(manifest.sha256, None)  # the damage may be the manifest's
            raise DamagedVersionError(str(error)) from error

    def tell(self, old: str, new: str, trial: str, pairs: int, evidence: Mapping[str, Floats]) -> None:
        """Write a trial's evidence, in place of what it told before. Raises RegistryError.

        Args:
            old, new: digests of the weights that take turns.
            trial: its name, hexadecimal and random.
        """
        report = TrialReport(pairs, {name: bets.tolist() for name, bets in evidence.items()})
        folder = f"{self._evidence}/{old}/{new}"

        def write() -> None:
            self._fs.makedirs(folder, exist_ok=True)
            self._fs.pipe_file(f"{folder}/{trial}.json", msgspec.json.encode(report))

        self._reaching(write)

    def heard(self, old: str, new: str, trial: str) -> tuple[dict[str, Floats], int]:
        """Sums of the evidence of all other trials of these two, by workload, and their number. Raises RegistryError."""
        folder = f"{self._evidence}/{old}/{new}"

        def read() -> list[dict[str, Floats]]:
            files = {str(about["name"]).rsplit("/", 1)[-1]: about for about in self._entries(folder, detail=True)}
            names = sorted(name for name in files if _TRIAL.fullmatch(name) and name != f"{trial}.json")[:MOST_TRIALS]
            return [found for name in names if (found := self._evidence_in(f"{folder}/{name}", files[name])) is not None]

        self._heard = {place: known for place, known in self._heard.items() if place.startswith(f"{folder}/")}
        all_found = self._reaching(read)
        sums: dict[str, Floats] = {}
        for found in all_found:
            for name, bets in found.items():
                sums[name] = sums.get(name, 0.0) + bets
        return sums, len(all_found)

    def _evidence_in(self, place: str, about: dict[str, Any]) -> dict[str, Floats] | None:
        """A file's evidence, read again only if it has changed; None for what isn't evidence."""
        if about.get("type") != "file" or not 0 < (about.get("size") or 0) <= MAX_DOCUMENT_BYTES:
            return None
        stamp = _stamp(about)
        known = self._heard.get(place)
        if known is None or known[0] != stamp:
            try:
                text = self._fs.cat_file(place, start=0, end=MAX_DOCUMENT_BYTES)
                known = stamp, msgspec.json.decode(text, type=TrialReport).arrays()
            except (FileNotFoundError, msgspec.DecodeError, ValueError, TypeError):
                return None
            self._heard[place] = known
        return known[1]

    def _entries(self, folder: str, *, detail: bool) -> list[Any]:
        """List a folder afresh. A missing folder is empty; one that may not be entered raises PermissionError."""
        self._fs.invalidate_cache()
        try:
            found: list[Any] = self._fs.ls(folder, detail=detail)
        except FileNotFoundError:
            return []
        return found

    def _about(self, place: str) -> dict[str, Any]:
        """Ask the file system for a file's facts; a missing file has none."""
        try:
            found: dict[str, Any] = self._fs.info(place)
        except FileNotFoundError:
            return {}
        return found

    def _manifest(self, name: str) -> Manifest | None:
        """A version's manifest, which is read once: only that of a damaged version ever changes."""
        if name not in self._known and (manifest := self._read_manifest(name)) is not None:
            self._known[name] = manifest
        return self._known.get(name)

    def _read_manifest(self, name: str) -> Manifest | None:
        """Read the manifest of the weights with this digest; None if there is none that can be read."""
        place = f"{self._versions}/{name}/{MANIFEST}"
        if _size(self._about(place)) is None:
            return None
        try:
            # A longer one is cut, and so isn't JSON. By name: s3fs has another parameter before these.
            text = self._fs.cat_file(place, start=0, end=MAX_DOCUMENT_BYTES)
            manifest = msgspec.json.decode(text, type=Manifest)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return manifest if manifest.sha256 == name else None

    def _reaching(self, work: Callable[[], T]) -> T:
        """Turn any file system's exceptions into RegistryError, so that callers needn't know them."""
        try:
            return work()
        except RegistryError:
            raise
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            if isinstance(error, PermissionError) and self._is_mounted:
                text += f"; this is user {os.geteuid()}, group {os.getegid()}: {_SAME_USER}"
            raise RegistryError(without_credentials(f"shared registry {self.url}: {type(error).__name__}: {text}")) from error
