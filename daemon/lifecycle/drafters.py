"""The daemon's access to the registry of drafter versions: versions of engines, and aliases."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from honed.adapt.protocol.wire import EngineHello
from honed.daemon.errors import ConflictError, PreconditionError, StoreError, UnknownError, there_are
from honed.recalib.registry.access import User
from honed.recalib.registry.manifest import is_for_target
from honed.recalib.registry.registry import ALIASES, Manifest, Registry, RegistryError
from honed.recalib.registry.target_digest import digest_of_target, stamp_of_target

log = structlog.get_logger("honed.drafters")

LISTED = "`honed drafters` lists the versions"
MOST_IDENTIFIED = 64
READ_S = 600.0
"""A version read within this time, with unchanged files, isn't read again."""


class Drafters:
    """Versions and aliases; failures are the daemon's own errors.

    Args:
        on_move: called after aliases moved.
    """

    def __init__(self, registry: Registry, *, on_move: Callable[[], None]) -> None:
        self.registry, self._on_move = registry, on_move
        self._first = threading.Lock()
        """Held while it is decided which checkpoint is the first."""
        self._read: dict[str, tuple[float, object]] = {}
        """Versions with intact files -> time of reading, and state of the files then."""
        self._identified: dict[tuple[Path, str], tuple[str, object]] = {}
        """Folders and targets that engines named -> version, and state of both's files when they were read."""
        self._targets: dict[str, tuple[object, str]] = {}
        """Targets that engines named -> state of their files when they were read, and their digest."""
        self._damaged: dict[str, tuple[object, str]] = {}
        """Versions with damaged files -> state of the files when that was found, and the damage."""

    def identify(self, hello: EngineHello, user: User | None) -> str:
        """The registry version of an engine's checkpoint of one of honed's methods, imported if needed.

        Reads the whole checkpoint, and learns its target, unless their files are those of last time, so don't call it on the
        router's thread. Several threads may call it, one at a time for a folder. The first checkpoint ever becomes `active` and
        `floor`, the version that is never pruned and always available for a roll-back. An alias that was set stays, even if it
        is damaged.

        Args:
            user: the engine's; None, unknown, may read nothing.

        Raises:
            RegistryError: it can't be read here, isn't a drafter's or can't be registered.
        """
        if user is None:
            raise RegistryError("the user of its process is unknown")
        folder = Path(hello.drafter_path)
        place = folder, hello.target_path
        stamps = stamp_of_target(str(folder)), stamp_of_target(hello.target_path)  # a drafter's folder has the same files
        known, stamps_then = self._identified.get(place, ("", None))
        if stamps[0] is not None and stamps == stamps_then and not self.fault(known):
            self._set_first(known)
            return known
        self.learn_target(hello.target_path)
        take = self.registry.import_head if hello.method == "mtp" else self.registry.import_checkpoint
        digest = self.digest_of(hello.target_path) or None
        note = f"loaded by engine {hello.engine_id}"
        manifest = take(folder, target_path=hello.target_path, target_sha256=digest, note=note, user=user)
        if len(self._identified) >= MOST_IDENTIFIED:
            self._identified.clear()
        self._identified[place] = manifest.version, stamps
        self._set_first(manifest.version)
        return manifest.version

    def is_kept(self, version: str) -> bool:
        """True if a version is in the registry, whole or not."""
        try:
            self.registry.path(version)
        except RegistryError:
            return False
        return True

    def _set_first(self, version: str) -> None:
        """Point `floor` and `active` at a version if they were never set."""
        with self._first:
            try:
                changes = {name: version for name in ("floor", "active") if self.registry.alias(name) is None}
            except RegistryError as error:  # it may have been set to another version
                log.error("an alias of a drafter version can't be read", error=str(error))
                return
            if changes:
                self.registry.set_aliases(changes)

    def learn_target(self, target_path: str) -> bool:
        """Read a target's digest for `is_for`, unless its files are those of last time. Don't call it with the lock held.

        Returns whether the digest is known now.
        """
        stamp = stamp_of_target(target_path)
        known = self._targets.get(target_path)
        if stamp is None or (known is not None and known[0] == stamp):
            return known is not None
        self._targets.pop(target_path, None)
        if not (digest := digest_of_target(target_path)):
            return False
        if len(self._targets) >= MOST_IDENTIFIED:
            self._targets.clear()
        self._targets[target_path] = stamp, digest
        return True

    def digest_of(self, target_path: str) -> str:
        """A target's digest as it was learned; "": unknown."""
        return self._targets.get(target_path, (None, ""))[1]

    @property
    def active(self) -> str:
        return self.alias("active")

    @property
    def generation(self) -> int:
        return self.registry.generation

    def alias(self, name: str) -> str:
        # Lenient: one damaged alias must not block the others.
        return self.registry.aliases().get(name) or ""

    def aliases(self) -> dict[str, str | None]:
        known = self.registry.aliases()
        return {name: known.get(name) for name in ALIASES}

    def manifest(self, version: str) -> Manifest:
        """Manifest of a version. Raises UnknownError if it is missing or damaged."""
        self.path(version)
        try:
            return self.registry.get(version)
        except RegistryError as error:
            raise UnknownError(str(error), cure=f"{LISTED}; `honed promote` takes any that is whole.") from error

    def verified(self, version: str) -> Manifest:
        """The manifest of a version after reading and checking its files. Raises ConflictError if they are damaged.

        Reads them unless `read_ahead` has just done so. Call that first if the caller must not block.
        """
        manifest = self.manifest(version)
        if not (why := self.fault(version)):
            try:
                self._verify(version)
            except RegistryError as error:
                why = str(error)
        if why:
            raise ConflictError(why, cure=f"{LISTED}; `honed promote` takes any that is whole.")
        return manifest

    def is_for(self, version: str, hello: EngineHello | None) -> bool:
        """True if a version is a drafter of an engine's method, for its target as far as that is known; reads no target."""
        try:
            manifest = self.registry.get(version)
        except RegistryError:
            return False
        return self.is_made_for(manifest, hello)

    def is_made_for(self, manifest: Manifest, hello: EngineHello | None) -> bool:
        """As `is_for`; reads nothing, so the version may be gone."""
        if hello is None or manifest.method != hello.method:
            return False
        return is_for_target(manifest, hello.target_path, self.digest_of(hello.target_path))

    def hint(self, own: str, live: str, hello: EngineHello | None, *, is_active_served: bool) -> str:
        """What an operator should know if the checkpoint that an engine came with isn't the active version; else "".

        The active version may be for another target, or be live although the engine's own checkpoint is newer.

        Args:
            own, live: versions of that checkpoint, and of what the engine runs.
            is_active_served: whether another engine is there that the active version is for.
        """
        active = self.active
        if not own or own == active:
            return ""
        if active and self.is_for(own, hello) and not self.is_for(active, hello):
            what = f"the active version {active} is for another target or method, so honed leaves this engine's drafter alone"
            if is_active_served:  # whose turn it is to be left alone is no question of promoting
                return f"{what}: a second model needs a daemon and a trainer of its own (docs/install.md, several models)"
            return f"{what}: `honed promote {own}` makes the one that it came with active"
        if live != active:
            return ""
        try:
            brought, served = self.registry.get(own), self.registry.get(active)
        except RegistryError:
            return ""
        if brought.scope != "imported" or brought.created_unix_s <= served.created_unix_s:
            return ""
        what = f"vLLM was started with a newer drafter, {own}, but {active} is active and serves"
        return f"{what}: `honed promote {own}` changes that"

    def read_ahead(self, version: str) -> None:
        """Read a version's files for `verified` and `fault`, which report faults. Thread-safe; don't hold the lock."""
        with contextlib.suppress(RegistryError):
            self._verify(version)

    def fault(self, version: str) -> str:
        """Reason why a version can't be used, as far as that is known without reading its weights; "" if none is."""
        try:
            self.registry.get(version)
            stamp, why = self._damaged.get(version, (None, ""))
            return why if why and stamp == self.registry.stamp(version) else ""
        except RegistryError as error:
            return str(error)

    def faults(self) -> dict[str, str]:
        """Aliases that can't be read or whose version can't be used, and why."""
        return {name: why for name in ALIASES if (why := self._fault_of_alias(name))}

    def _fault_of_alias(self, name: str) -> str:
        try:
            version = self.registry.alias(name)
        except RegistryError as error:
            return str(error)
        return self.fault(version) if version else ""

    def _verify(self, version: str) -> None:
        """Compare a version's files with its manifest, unless that has just been done. Raises RegistryError."""
        stamp = self.registry.stamp(version)
        read_s, stamp_then = self._read.get(version, (float("-inf"), None))
        if time.monotonic() - read_s <= READ_S and stamp == stamp_then:
            return
        try:
            self.registry.verify(version)
        except RegistryError as error:
            self._damaged[version] = stamp, str(error)
            log.error("a drafter version is damaged", version=version, error=str(error))
            raise
        self._read[version] = time.monotonic(), stamp

    def path(self, version: str) -> Path:
        try:
            return self.registry.path(version)
        except RegistryError as error:
            known = there_are(manifest.version for manifest in self.registry.versions())
            raise UnknownError(f"no drafter version {version!r}; {known}", cure=f"{LISTED}.") from error

    def shares_cache(self, one: str, other: str) -> bool:
        """True if context keys and values cached by one version are right for the other, which may be the same.

        Versions of unknown digest (the engine didn't say what it runs) go by their scope.
        """
        if one == other:
            return True
        try:
            manifests = [self.manifest(version) for version in (one, other) if version]
        except UnknownError:
            return False
        if len(manifests) == 2 and all(manifest.kv_sha256 for manifest in manifests):
            return manifests[0].kv_sha256 == manifests[1].kv_sha256
        return all(manifest.scope != "full" for manifest in manifests)

    def check_generation(self, expected: int | None) -> None:
        """Raise PreconditionError if an alias changed since `expected` was read."""
        if expected is not None and expected != self.generation:
            raise PreconditionError(
                f"the registry is at generation {self.generation}, not {expected}",
                cure=f"{LISTED} with the generation; look again, then repeat.",
            )

    def move(self, changes: dict[str, str | None]) -> None:
        """Move aliases, in order, and sync nothing: the lock may be held. Raises StoreError if the disk refuses."""
        try:
            self.registry.set_aliases(changes)
        except RegistryError as error:
            raise StoreError(str(error)) from error
        self._on_move()

    def listing(self) -> dict[str, Any]:
        """Versions and aliases for the API."""
        versions = [msgspec.to_builtins(manifest) for manifest in self.registry.versions()]
        return {"generation": self.generation, "aliases": self.aliases(), "versions": versions}
