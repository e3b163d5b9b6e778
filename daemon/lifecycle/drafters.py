"""The daemon's dealings with the registry of drafter versions: which is whose, and which name points where."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from honed.adapt.protocol.wire import EngineHello
from honed.daemon.errors import ConflictError, PreconditionError, StoreError, UnknownError, there_are
from honed.recalib.registry.registry import ALIASES, Manifest, Registry, RegistryConflictError, RegistryError

LISTED = "`honed drafters` lists the versions"
READ_S = 600.0
"""A version that was read so lately, and whose files haven't changed since, needn't be read again."""


class Drafters:
    """Versions and aliases, with failures named in the daemon's own terms.

    Args:
        on_move: called after aliases were moved.
    """

    def __init__(self, registry: Registry, *, on_move: Callable[[], None]) -> None:
        self.registry, self._on_move = registry, on_move
        self._read: dict[str, tuple[float, object]] = {}
        """Versions whose files were whole: when they were read, and what the file system said of them."""

    def identify(self, hello: EngineHello) -> str:
        """The registry version of the checkpoint that an engine has loaded, imported if need be; "" when it has none.

        Reads the whole checkpoint: not for the router's thread. The first checkpoint ever seen becomes `active` and the
        `floor`, the version that is never pruned and to which one can always go back.

        Raises:
            RegistryError: when it can't be read from here, or can't be registered.
        """
        if not hello.drafter_path:
            return ""
        manifest = self.registry.import_checkpoint(
            Path(hello.drafter_path), target_path=hello.target_path, note=f"loaded by engine {hello.engine_id}"
        )
        if not self.alias("active"):
            self.registry.set_aliases({"floor": manifest.version, "active": manifest.version})
        return manifest.version

    @property
    def active(self) -> str:
        return self.alias("active")

    @property
    def generation(self) -> int:
        return self.registry.generation

    def alias(self, name: str) -> str:
        # Leniently: one damaged alias file must not stop the others from being read.
        return self.registry.aliases().get(name) or ""

    def aliases(self) -> dict[str, str | None]:
        known = self.registry.aliases()
        return {name: known.get(name) for name in ALIASES}

    def manifest(self, version: str) -> Manifest:
        """Raises UnknownError for a version that doesn't exist or is damaged."""
        self.path(version)
        try:
            return self.registry.get(version)
        except RegistryError as error:
            raise UnknownError(str(error), cure=f"{LISTED}; `honed promote` takes any that is whole.") from error

    def verified(self, version: str) -> Manifest:
        """The manifest of a version whose files were read and compared. Raises ConflictError when they are damaged.

        Reads them unless `read_ahead` has just done so: call that first where nobody should be kept waiting.
        """
        manifest = self.manifest(version)
        read_s, stamp = self._read.get(version, (float("-inf"), None))
        try:
            if time.monotonic() - read_s > READ_S or stamp != self.registry.stamp(version):
                self._verify(version)
        except RegistryError as error:
            raise ConflictError(str(error), cure=f"{LISTED}; `honed promote` takes any that is whole.") from error
        return manifest

    def read_ahead(self, version: str) -> None:
        """Any thread, without the service's lock: read a version's files for `verified`, which says what is wrong with them."""
        with contextlib.suppress(RegistryError):
            self._verify(version)

    def _verify(self, version: str) -> None:
        stamp = self.registry.stamp(version)
        self.registry.verify(version)
        self._read[version] = time.monotonic(), stamp

    def path(self, version: str) -> Path:
        try:
            return self.registry.path(version)
        except RegistryError as error:
            known = there_are(manifest.version for manifest in self.registry.versions())
            raise UnknownError(f"no drafter version {version!r}; {known}", cure=f"{LISTED}.") from error

    def shares_cache(self, one: str, other: str) -> bool:
        """Whether context keys and values that were cached by one version are right for the other.

        Versions of unknown digest (the engine didn't say what it runs) go by their scope.
        """
        try:
            manifests = [self.manifest(version) for version in (one, other) if version]
        except UnknownError:
            return False
        if len(manifests) == 2 and all(manifest.kv_sha256 for manifest in manifests):
            return manifests[0].kv_sha256 == manifests[1].kv_sha256
        return all(manifest.scope != "full" for manifest in manifests)

    def check_generation(self, expected: int | None) -> None:
        """Raises PreconditionError when somebody changed an alias since `expected` was read."""
        if expected is not None and expected != self.generation:
            raise PreconditionError(
                f"the registry is at generation {self.generation}, not {expected}",
                cure=f"{LISTED} with the generation; look again, then repeat.",
            )

    def move(self, changes: dict[str, str | None]) -> None:
        """Move aliases, in order. Raises StoreError when the disk refuses."""
        try:
            self.registry.set_aliases(changes)
        except RegistryConflictError as error:
            raise PreconditionError(str(error)) from error
        except RegistryError as error:
            raise StoreError(str(error)) from error
        self._on_move()

    def listing(self) -> dict[str, Any]:
        """Everything, as the API shows it."""
        versions = [msgspec.to_builtins(manifest) for manifest in self.registry.versions()]
        return {"generation": self.generation, "aliases": self.aliases(), "versions": versions}
