"""Drafter versions on disk: immutable folders, and four names (aliases) that point at them.

    versions/v0007-1a2b3c4d/{model.safetensors,config.json,manifest.json}
    aliases/active                 -> "v0007-1a2b3c4d 12", a link to nowhere: the version, and the generation of this change
    .reserve                       room for a change of aliases when the disk is full: a bad version must still be left

These guarantees hold even if a process is killed between any two instructions, and with several processes. A version exists
completely or not at all and never changes. An alias is one symbolic link, replaced atomically, so there is always exactly one
`active` (none before the first). `generation` grows with every alias change. A damaged version or alias never makes the others
unreadable. Readers take no lock. Writers of versions take one, writers of aliases another, under which nothing is synced: who
changes aliases may hold a lock that others wait for. `sync_aliases` makes the changes durable.

Imports neither torch nor numpy: the daemon uses it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from honed.recalib.registry.access import User, check_readable
from honed.recalib.registry.durable import (
    fsync_path,
    is_missing,
    locked,
    make_folder,
    open_regular,
    replace_file,
    replace_link,
    sha256_file,
)
from honed.recalib.registry.head_of_target import extract_head, is_head_alone
from honed.recalib.registry.manifest import (
    CHECKPOINT,
    CONFIG,
    INDEX,
    MANIFEST,
    NO_FIGURES,
    WEIGHTS,
    Figures,
    Manifest,
    RegistryError,
    describe_checkpoint,
    is_for_target,
    read_drafter,
    read_manifest,
    verify_files,
)
from honed.recalib.registry.one_file import gather_drafter
from honed.recalib.registry.target_digest import digest_of_target

__all__ = ["ALIASES", "Manifest", "Registry", "RegistryError"]

ALIASES = ("active", "candidate", "previous", "floor")
_VERSION = re.compile(r"v(\d{4,9})-[0-9a-f]{8}")
_ALIAS = re.compile(r"(-|v\d{4,9}-[0-9a-f]{8}) (\d+)")
_TEMPORARY = ".tmp-"
MAX_WEIGHTS_BYTES = 16 << 30
"""Longest checkpoint that an engine may have imported: reading it takes the time of all others' imports."""
RESERVE_BYTES = 1 << 16
"""Room kept for changes of aliases: some for each link, and for the folder."""
_CURE = "check the folder's owner and the disk's free space"
_SET_AGAIN = dict.fromkeys(ALIASES, "it is set again: `honed promote` does that") | {
    "floor": "it is set again: remove it, and the next start of vLLM does that"
}


class Registry:
    """The versions and aliases under one folder."""

    def __init__(self, root: Path) -> None:
        """Open the registry, make what is missing and remove what dead writers left unfinished.

        Raises:
            RegistryError: the folder can't be used.
        """
        self.root = Path(root)
        self._versions, self._aliases, self._lock = self.root / "versions", self.root / "aliases", self.root / ".lock"
        self._alias_lock, self._reserve = self.root / ".aliases.lock", self.root / ".reserve"
        self._synced_generation = -1
        try:
            for folder in (self.root, self._versions, self._aliases):
                make_folder(folder)
            self._remove_leftovers()
            self._keep_reserve()
        except OSError as error:
            raise RegistryError(f"registry {self.root} can't be opened ({error}); {_CURE}") from error

    # --- versions -----------------------------------------------------------------------------------------------------

    def create(
        self,
        write: Callable[[Path], None],
        *,
        parent: str = "",
        scope: str = "",
        figures: Figures = NO_FIGURES,
        data_window: Mapping[str, Any] | None = None,
        target_path: str = "",
        target_sha256: str | None = None,
        vllm_version: str = "",
        note: str = "",
        origin: str = "",
        created_unix_s: float = 0.0,
        is_unique: bool = False,
    ) -> Manifest:
        """Add a version: `write` puts model.safetensors and config.json into the given empty folder.

        Args:
            target_sha256: the target's digest; None: it is read.
            created_unix_s: when it was trained, elsewhere; 0: now.
            is_unique: return the version with the same files for the same target, if another writer has added it meanwhile.

        Raises:
            RegistryError: the result isn't a checkpoint, or the disk fails; nothing is left behind then.
        """
        about = {"parent": parent, "scope": scope, "target_path": target_path, "vllm_version": vllm_version}
        digest = digest_of_target(target_path) if target_sha256 is None else target_sha256
        about |= {"note": note, "origin": origin, "target_sha256": digest}
        window = dict(data_window or {})
        with self._temporary_folder() as folder:
            write(folder)
            draft = describe_checkpoint(folder, "", created_unix_s, figures=figures, data_window=window, **about)
            for name in (WEIGHTS, CONFIG):
                (folder / name).chmod(0o440)
                fsync_path(folder / name)
            return self._publish(folder, draft, is_unique)

    def import_checkpoint(
        self, path: Path, *, target_path: str = "", target_sha256: str | None = None, note: str = "", user: User | None = None
    ) -> Manifest:
        """Return the version with a checkpoint folder's weights and configuration; add it if there is none. Reads all bytes.

        Weights in several files are one in the version.

        Args:
            target_path: the target that it drafts for; the same drafter of another target is another version.
            target_sha256: the target's digest; None: it is read.
            user: who named the folder, if somebody else; the user must be able to read it too.

        Raises:
            RegistryError: the folder isn't a drafter's checkpoint.
        """
        path = Path(path)
        digest = digest_of_target(target_path) if target_sha256 is None else target_sha256
        if not is_missing(path / CONFIG) and is_missing(path / WEIGHTS):
            return self._import_parts(path, target_path, digest, note, user)
        with ExitStack() as stack:
            try:
                files = {name: stack.enter_context(open_regular(path / name)) for name in (CONFIG, WEIGHTS)}
                for file in files.values():
                    if user is not None:
                        check_readable(file, user)
                if (num_bytes := os.fstat(files[WEIGHTS].fileno()).st_size) > MAX_WEIGHTS_BYTES:
                    raise RegistryError(f"{path / WEIGHTS} has {num_bytes} bytes, a drafter at most {MAX_WEIGHTS_BYTES}")
                read_drafter(path / WEIGHTS)  # before all of it is read: a target can be large
                config_sha256, sha256 = (hashlib.file_digest(file, "sha256").hexdigest() for file in files.values())
            except OSError as error:
                raise RegistryError(f"{error.filename or path} can't be read ({error.strerror}); {CHECKPOINT}") from error
            if (known := self._known(sha256, config_sha256, target_path, digest)) is not None:
                return known

            def copy(folder: Path) -> None:
                for name, file in files.items():
                    file.seek(0)
                    with (folder / name).open("wb") as out:
                        shutil.copyfileobj(file, out, 1 << 20)

            return self._import(copy, target_path, digest, note or f"imported from {path}")

    def _import_parts(self, path: Path, target_path: str, digest: str, note: str, user: User | None) -> Manifest:
        """As `import_checkpoint`, of weights in shards, or in a file of another name."""
        with self._temporary_folder() as folder:
            try:
                gather_drafter(path, folder, MAX_WEIGHTS_BYTES, user)
            except RegistryError:
                raise
            except ValueError as error:
                raise RegistryError(f"{path}: {error}") from error
            except OSError as error:
                raise RegistryError(f"{error.filename or path} can't be read ({error.strerror}); {CHECKPOINT}") from error
            return self._add(folder, target_path, digest, note or f"imported from {path}")

    def import_head(
        self, target: Path, *, target_path: str = "", target_sha256: str | None = None, note: str = "", user: User | None = None
    ) -> Manifest:
        """Return the version with the MTP head of a target's checkpoint; add it if there is none. Reads all of the head.

        Args:
            target_path, target_sha256: as for `import_checkpoint`.
            user: who named the folder, if somebody else; the user must be able to read it too.

        Raises:
            RegistryError: the checkpoint has no such head, or can't be read.
        """
        digest = digest_of_target(target_path) if target_sha256 is None else target_sha256
        with self._temporary_folder() as folder:
            try:
                extract_head(Path(target), folder, user)
                if (known := self._version_in(Path(target), target_path, digest)) is not None:
                    return known
            except ValueError as error:
                raise RegistryError(f"{error}; name the folder of a target with an MTP head") from error
            except OSError as error:
                raise RegistryError(f"{error.filename or target} can't be read ({error.strerror})") from error
            return self._add(folder, target_path, digest, note or f"imported from {target}")

    def _add(self, folder: Path, target_path: str, digest: str, note: str) -> Manifest:
        """Return the version with the files of a temporary folder; move them into a new one if there is none."""
        if (known := self._known(sha256_file(folder / WEIGHTS), sha256_file(folder / CONFIG), target_path, digest)) is not None:
            return known

        def move(into: Path) -> None:
            for name in (WEIGHTS, CONFIG):
                (folder / name).rename(into / name)

        return self._import(move, target_path, digest, note)

    def _import(self, write: Callable[[Path], None], target_path: str, digest: str, note: str) -> Manifest:
        return self.create(write, scope="imported", target_path=target_path, target_sha256=digest, note=note, is_unique=True)

    def _version_in(self, folder: Path, target_path: str, digest: str) -> Manifest | None:
        """Find the version whose files these are, of a head that vLLM serves as a draft model."""
        if (folder / INDEX).exists() or not (folder / WEIGHTS).exists() or not is_head_alone(folder / WEIGHTS):
            return None
        return self._known(sha256_file(folder / WEIGHTS), sha256_file(folder / CONFIG), target_path, digest)

    def _known(self, sha256: str, config_sha256: str, target_path: str, digest: str) -> Manifest | None:
        """Find the version of these files for a target with this digest; of several, the latest of its path."""
        wanted = (sha256, config_sha256, "ready")
        found = [one for one in self.versions() if (one.sha256, one.config_sha256, one.state) == wanted]
        named = [one for one in found if is_for_target(one, target_path, digest)]
        exact = [one for one in named if one.target_path == target_path]
        return exact[-1] if exact else next(iter(named), None)

    def get(self, version: str) -> Manifest:
        """Return a version's manifest. Raises RegistryError if there is no such version or it is damaged."""
        return read_manifest(self.path(version))

    def path(self, version: str) -> Path:
        """Return a version's folder. Raises RegistryError if there is none, or the name can't be a version's."""
        folder = self._versions / version
        if not _VERSION.fullmatch(version) or not folder.is_dir():
            raise RegistryError(f"no version {version!r} in registry {self.root}; `honed drafters` lists them")
        return folder

    def versions(self) -> list[Manifest]:
        """List all versions, oldest first; a damaged one has state "corrupt" and the reason in `error`."""
        found = []
        for folder in self._folders():
            try:
                found.append(read_manifest(folder))
            except RegistryError as error:
                if folder.is_dir():  # else it was pruned meanwhile
                    found.append(_corrupt(folder, str(error)))
        return found

    def verify(self, version: str) -> Manifest:
        """Return a version's manifest after comparing every byte. Raises RegistryError at any difference."""
        return verify_files(self.path(version))

    def stamp(self, version: str) -> object:
        """Return the file system's data on a version's files: equal as long as nobody changes them. Raises RegistryError."""
        try:
            found = [(self.path(version) / name).stat() for name in (WEIGHTS, CONFIG, MANIFEST)]
        except OSError as error:
            raise RegistryError(f"version {version} can't be inspected ({error}); {_CURE}") from error
        return [(one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found]

    def prune(self, keep: int, spared: Collection[str] = ()) -> list[str]:
        """Remove all but the `keep` newest versions, those with an alias and those `spared`; `sweep` deletes their files.

        The newest version always stays, so that its number isn't used again. Nothing goes while the latest change of aliases
        isn't synced: if it is lost, an alias points at an older version. Returns the removed versions.

        Raises:
            RegistryError: an alias is damaged, so its version isn't known; nothing is removed then.
        """
        with self._writing(self._alias_lock):
            if self.generation != self._synced_generation:
                return []
            stays = {*map(self.alias, ALIASES), *spared}
            doomed = [f for f in self._folders()[: -max(keep, 1)] if f.name not in stays]
            for folder in doomed:
                # Renamed, not emptied: an incomplete version must never be visible under a version's name.
                os.rename(folder, self._versions / f"{_TEMPORARY}{secrets.token_hex(6)}")
        return [folder.name for folder in doomed]

    def sweep(self) -> None:
        """Delete the files of pruned versions, and what dead writers left unfinished. Raises RegistryError."""
        try:
            self._remove_leftovers()
        except OSError as error:
            raise RegistryError(f"registry {self.root} can't be tidied ({error}); {_CURE}") from error

    # --- aliases ------------------------------------------------------------------------------------------------------

    def alias(self, name: str) -> str | None:
        """Return the version that an alias points at, None if there is none. Raises RegistryError for a damaged alias."""
        return self._read_alias(name)[0]

    def aliases(self) -> dict[str, str | None]:
        """Return all aliases; a damaged one counts as pointing nowhere."""
        return {name: self._read_alias_leniently(name)[0] for name in ALIASES}

    @property
    def generation(self) -> int:
        """Number of the latest alias change, 0 before the first."""
        return max(self._read_alias_leniently(name)[1] for name in ALIASES)

    def set_aliases(self, changes: Mapping[str, str | None]) -> int:
        """Change several aliases under one lock, in the mapping's order; returns the new generation.

        All processes see the change at once. A crash may leave only the first of them done. In the order
        {"previous": old, "active": new, "candidate": None} the state is sound after each. Until `sync_aliases`, a crash of
        the whole machine may undo the change.

        Args:
            changes: alias -> the version that it is to point at; None: at nothing.

        Raises:
            RegistryError: for an unknown alias, or a version that isn't there or is damaged.
        """
        for wanted in filter(None, changes.values()):
            self.get(wanted)
        with self._writing(self._alias_lock):
            generation = self.generation
            for name, version in changes.items():
                if version is not None:
                    self.path(version)  # not pruned meanwhile
                generation += 1
                self._replace(self._alias_path(name), f"{version or '-'} {generation}")
            self._keep_reserve()
        return generation

    def sync_aliases(self) -> None:
        """Force the aliases to the disk if they changed since the last call. Raises RegistryError.

        It may take many seconds, so don't call it with a lock that others wait for.
        """
        generation = self.generation
        if generation != self._synced_generation:
            try:
                fsync_path(self._aliases)
            except OSError as error:
                raise RegistryError(f"registry {self.root} can't be written ({error}); {_CURE}") from error
            self._synced_generation = generation

    def _replace(self, path: Path, text: str) -> None:
        """Replace an alias, on a full disk too."""
        try:
            replace_link(path, text)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._reserve.unlink(missing_ok=True)
            replace_link(path, text)

    def _keep_reserve(self) -> None:
        """Take the reserve, unless it is there or the disk is full."""
        with contextlib.suppress(OSError), open(self._reserve, "ab") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)

    def _alias_path(self, name: str) -> Path:
        if name not in ALIASES:
            raise RegistryError(f"unknown alias {name!r}: the aliases are {', '.join(ALIASES)}")
        return self._aliases / name

    def _read_alias(self, name: str) -> tuple[str | None, int]:
        path = self._alias_path(name)
        try:
            text = os.readlink(path)
        except FileNotFoundError:
            return None, 0
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise RegistryError(f"{path} can't be read ({error.strerror}); {_CURE}") from error
            text = ""  # something else has taken its place
        if (found := _ALIAS.fullmatch(text)) is None:
            raise RegistryError(f"{path} is damaged, and no old version is removed until {_SET_AGAIN[name]}")
        return (None if found[1] == "-" else found[1]), int(found[2])

    def _read_alias_leniently(self, name: str) -> tuple[str | None, int]:
        try:
            return self._read_alias(name)
        except RegistryError:
            return None, 0

    # --- how writing works --------------------------------------------------------------------------------------------

    def _folders(self) -> list[Path]:
        """List folders with a version's name, by number."""
        found = [(int(match[1]), p) for p in self._versions.iterdir() if (match := _VERSION.fullmatch(p.name))]
        return [path for _, path in sorted(found)]

    def _publish(self, folder: Path, draft: Manifest, is_unique: bool) -> Manifest:
        """Number a finished folder, add its manifest and rename it to its place, unless it must be unique and isn't."""
        with self._writing(self._lock):
            files = draft.sha256, draft.config_sha256
            if is_unique and (known := self._known(*files, draft.target_path, draft.target_sha256)) is not None:
                return known
            folders = self._folders()
            number = 1 + (int(_VERSION.fullmatch(folders[-1].name)[1]) if folders else 0)  # type: ignore[index]
            manifest = msgspec.structs.replace(draft, version=f"v{number:04d}-{draft.sha256[:8]}")
            replace_file(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)), 0o440)
            os.rename(folder, self._versions / manifest.version)
            fsync_path(self._versions)
        return manifest

    @contextmanager
    def _writing(self, lock: Path) -> Iterator[None]:
        """Hold one of the registry's locks; a failing disk becomes a RegistryError."""
        try:
            with locked(lock):
                yield
        except OSError as error:
            raise RegistryError(f"registry {self.root} can't be written ({error}); {_CURE}") from error

    @contextmanager
    def _temporary_folder(self) -> Iterator[Path]:
        """Make a folder to write a version into; our lock on it shows others that it is in use."""
        folder, fd = self._versions / f"{_TEMPORARY}{secrets.token_hex(6)}", -1
        try:
            with self._writing(self._lock):  # the search for leftovers takes the same lock: a new folder is never unlocked
                folder.mkdir()
                folder.chmod(0o750 | folder.stat().st_mode & 0o2000)
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield folder
        except OSError as error:
            raise RegistryError(f"registry {self.root} can't be written ({error}); {_CURE}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # already gone if it was published
            if fd >= 0:
                os.close(fd)

    def _remove_leftovers(self) -> None:
        """Remove unfinished folders whose writer is dead, and aliases that were never renamed."""
        with locked(self._lock):
            if folders := list(self._versions.glob(f"{_TEMPORARY}*")):
                fsync_path(self._versions)  # no version of this name may come back without its files
            for folder in folders:
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                else:
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(fd)
        with locked(self._alias_lock):
            for path in self._aliases.glob(".*"):
                path.unlink(missing_ok=True)


def _corrupt(folder: Path, error: str) -> Manifest:
    """Make a listing's entry for a version whose manifest or files are damaged."""
    return Manifest(version=folder.name, created_unix_s=0.0, sha256="", bytes=0, config_sha256="", state="corrupt", error=error)
