"""Sharing of drafter versions between hosts: active versions made here are offered; others' versions are tried here.

    active, and made here   -> pushed to `registry.url`, again if it is gone or cut off there
    newer there than here   -> fetched -> (`registry.try_fetched`) a canary on live traffic -> promoted, or not
    a trial runs            -> (`registry.pool_evidence`) its evidence goes there, and other hosts' comes here

An unreachable registry is retried. Nothing else waits for it, not even trials of versions that were fetched.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import structlog

from honed.daemon.background import Background
from honed.daemon.errors import HonedError, StoreError
from honed.daemon.lifecycle.canaries import Canaries
from honed.daemon.lifecycle.drafters import Drafters
from honed.daemon.lifecycle.eligible_engines import EligibleEngines
from honed.daemon.lifecycle.lifecycle import Lifecycle
from honed.daemon.lifecycle.rollout import Rollout
from honed.daemon.lifecycle.trial import Trial
from honed.daemon.settings.sections import RegistrySettings
from honed.daemon.store import canary_tables
from honed.daemon.store.journal import Journal
from honed.daemon.store.operations import Operations
from honed.daemon.store.store import Store
from honed.recalib.registry.manifest import Manifest, RegistryError
from honed.recalib.registry.shared import DamagedVersionError, SharedRegistry, without_credentials

log = structlog.get_logger("honed.sharing")

EVIDENCE_S = 15.0
"""Longest interval of looks while a trial runs and evidence is pooled."""
MOST_CLOSE_S = 10.0
"""Longest wait for a running copy when the daemon ends."""


class Sharing:
    """The daemon's use of the shared registry, if any. The service's lock guards it, but for what runs in the background.

    Args:
        on_fetch: called after each version that was fetched: an old one may have to go.
    """

    def __init__(
        self,
        settings: RegistrySettings,
        shared: SharedRegistry | None,
        rollout: Rollout,
        *,
        lifecycle: Lifecycle,
        canaries: Canaries,
        drafters: Drafters,
        eligible: EligibleEngines,
        store: Store,
        operations: Operations,
        journal: Journal,
        lock: threading.RLock,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        on_fetch: Callable[[], object],
    ) -> None:
        self._settings, self._shared, self._rollout = settings, shared, rollout
        self._lifecycle, self._canaries, self._drafters, self._eligible = lifecycle, canaries, drafters, eligible
        self._store, self._operations, self._journal = store, operations, journal
        self._lock, self._clock, self._on_fetch = lock, clock, on_fetch
        self.jobs = Background("honed-sharing", most=2, monotonic=monotonic)
        self._is_exchanging = False
        self._next_s = float("-inf")
        self._seen: set[str] = set()
        """Weights fetched or pushed since the daemon started; those removed here aren't fetched again."""
        self._untried: dict[str, Manifest] = {}
        """Versions that were fetched and had no trial yet."""
        self._is_trying = False
        self._telling: Trial | None = None
        """The trial whose evidence goes there."""
        self._told: Trial | None = None
        """The one whose evidence was told for the last time, after its end."""
        self._is_loaded = False
        self.moved: Counter[str] = Counter()
        """Counts of versions "pushed" and "fetched"."""
        self.errors = 0
        self.last_error = ""
        self.last_success_unix_s = 0.0

    def tick(self, now_s: float) -> None:
        """Once a second: check the registry if due, and try a fetched version."""
        if self._shared is None:
            return
        if not self._is_loaded:
            self._is_loaded, self._untried = True, self._untried | self._left_untried()
        trial = self._canaries.latest if self._settings.pool_evidence else None
        if trial is not None and trial is not self._telling and trial is not self._told:
            self._telling, self._next_s = trial, min(self._next_s, now_s + EVIDENCE_S)
        if now_s >= self._next_s and not self._is_exchanging:
            wait_s = self._settings.poll_s if self._telling is None else min(self._settings.poll_s, EVIDENCE_S)
            self._next_s, self._is_exchanging = now_s + wait_s, True
            place = without_credentials(self._shared.url)
            self.jobs.submit(partial(self._exchange, self._shared), f"the shared registry {place}")
        if self._untried and self._settings.try_fetched and not self._is_trying and self._next_to_try():
            self._is_trying = True
            self.jobs.submit(self._try_out, "a fetched version")

    def soon(self) -> None:
        """Make a check due now, since aliases moved."""
        self._next_s = float("-inf")

    def close(self) -> None:
        """Wait for a running copy, but not for long: a version exists there once its manifest does, which comes last."""
        self.jobs.stop(MOST_CLOSE_S)

    def view(self) -> dict[str, Any] | None:
        """Document for the status; None without sharing."""
        if self._shared is None:
            return None
        return {
            "url": without_credentials(self._shared.url),
            "pushed": self.moved["pushed"],
            "fetched": self.moved["fetched"],
            "errors": self.errors,
            "last_error": self.last_error,
            "last_success_unix_s": self.last_success_unix_s,
        }

    # --- in the background ----------------------------------------------------------------------------------------------

    def _exchange(self, shared: SharedRegistry) -> None:
        try:
            errors = self._share(shared)
            with self._lock:
                self.last_error = "; ".join(errors)
                if errors:
                    self.errors += 1
                else:
                    self.last_success_unix_s = self._clock()
        except Exception as error:  # its text may have the credentials
            log.exception("versions can't be shared", error=without_credentials(str(error)))
        finally:
            self._is_exchanging = False

    def _share(self, shared: SharedRegistry) -> list[str]:
        """Push, fetch and pool once; none keeps another from being tried. Return what went wrong."""
        with self._lock:
            active = self._manifest_of_active()
            hellos = [engine.hello for engine in self._eligible.connected() if engine.hello is not None]
            named = sorted((hello.target_path, hello.method) for hello in hellos)
            paths = {(digest, method): path for path, method in named if (digest := self._drafters.digest_of(path))}
        errors = list[str]()
        if active is not None and self._settings.publish and _is_made_here(active):
            with self._noting(errors):
                self._note("pushed", active, shared.push(active.version))
        with self._noting(errors):
            self._fetch(shared, active, paths, errors)
        with self._noting(errors):
            self._pool(shared)
        return errors

    @contextmanager
    def _noting(self, errors: list[str]) -> Iterator[None]:
        """Tell of an error at once: what comes next may wait long for a mute server."""
        try:
            yield
        except RegistryError as error:
            if (text := str(error)) in errors:  # a registry out of reach has one reason
                return
            errors.append(text)
            log.warning("versions can't be shared", error=text)
            with self._lock:
                self.last_error = "; ".join(errors)

    def _fetch(
        self, shared: SharedRegistry, active: Manifest | None, paths: dict[tuple[str, str], str], errors: list[str]
    ) -> None:
        """Fetch the newest sound version for each target and method, if it is news: older ones than it never are.

        Args:
            paths: by digest of the target, and method.
        """
        done = set[tuple[str, str]]()
        for manifest in reversed(shared.missing(paths)):
            serves = manifest.target_sha256, manifest.method
            if serves in done:
                continue
            done.add(serves)
            if not _is_news(manifest, active) or manifest.sha256 in self._seen:
                continue
            with self._noting(errors):  # the other targets' versions may be sound
                try:
                    made = shared.fetch(manifest, paths[serves])
                except DamagedVersionError:  # and so may be an older one
                    done.remove(serves)
                    raise
                self._note("fetched", made, True)
                with self._lock:
                    kept = {version: one for version, one in self._untried.items() if self._drafters.is_kept(version)}
                    self._untried = kept | {made.version: made}
                self._on_fetch()

    def _pool(self, shared: SharedRegistry) -> None:
        """Tell others how the versions on trial do here, and hear how they do there."""
        with self._lock:
            trial = self._telling
            if trial is None:
                return
            is_over = trial is not self._rollout.trial
            canary = trial.canary
            try:
                old, new = (self._drafters.manifest(version).sha256 for version in (canary.old, canary.new))
            except HonedError:  # removed since
                self._told, self._telling = trial, None
                return
            pairs, evidence = canary.pairs, canary.report()
        name = hashlib.sha256(f"{socket.gethostname()} {trial.operation_id} {trial.kind}".encode()).hexdigest()[:32]
        shared.tell(old, new, name, pairs, evidence)
        others, num_others = shared.heard(old, new, name)
        with self._lock:
            if is_over:
                self._told, self._telling = trial, None
            else:
                canary.hear(others, num_others)

    def _manifest_of_active(self) -> Manifest | None:
        drafters = self._drafters
        try:
            return drafters.manifest(drafters.active) if drafters.active else None
        except HonedError:
            return None

    def _note(self, what: str, manifest: Manifest, is_new: bool) -> None:
        self._seen.add(manifest.sha256)
        if not is_new:
            return
        with self._lock:
            self.moved[what] += 1
            subject = manifest.version if what == "pushed" else f"{manifest.version} ({manifest.origin})"
            self._journal.audit("honed", f"drafter.{what}", subject)

    def _try_out(self) -> None:
        """Read the version whose turn it is, and start its trial if it still is: an engine may have gone meanwhile."""
        try:
            with self._lock:
                version = self._next_to_try()
            if not version:
                return
            self._drafters.read_ahead(version)
            with self._lock:
                if self._next_to_try() == version:
                    del self._untried[version]
                    self._begin(version)
        finally:
            self._is_trying = False

    def _begin(self, version: str) -> None:
        try:
            origin = self._drafters.manifest(version).origin
            if why := self._canaries.why_failed(version):
                log.info("a fetched version failed here before", version=version, why=why)
                return
        except HonedError as error:
            log.warning("a fetched version is gone", version=version, error=str(error))
            return
        operation = self._operations.create("adopt", "canary", f"from {origin}", "honed", None, version=version)
        try:
            self._lifecycle.try_out(operation, version)
        except HonedError as error:
            self._operations.finish(operation, "failed", error=str(error))

    # --- on both threads, with the lock -----------------------------------------------------------------------------------

    def _next_to_try(self) -> str:
        """The newest untried version that is news and that an engine can compare with the active one; "" if none may now.

        The others wait: engines come and go, and the active version changes.
        """
        if not self._rollout.is_quiet:
            return ""
        active = self._manifest_of_active()
        names = [active.version] if active is not None else []
        engines = self._eligible.swappable(*names)
        for one in sorted(self._untried.values(), key=lambda one: one.created_unix_s, reverse=True):
            if one.version in names or not _is_news(one, active):
                continue
            fits = any(self._drafters.is_made_for(one, engine.hello) for engine in engines)
            if fits and self._eligible.swappable(one.version, *names):  # which reads files, and this is asked every second
                return one.version
        return ""

    def _left_untried(self) -> dict[str, Manifest]:
        """Versions fetched before the daemon's restart that never had a trial."""
        try:
            tried = canary_tables.tried(self._store)
        except StoreError as error:
            log.warning("fetched versions can't be checked", error=str(error))
            return {}
        fetched = [one for one in self._drafters.registry.versions() if one.state == "ready" and one.origin]
        return {one.version: one for one in fetched if one.trial_key not in tried}


def _is_news(manifest: Manifest, active: Manifest | None) -> bool:
    return active is None or active.scope == "imported" or manifest.created_unix_s > active.created_unix_s


def _is_made_here(manifest: Manifest) -> bool:
    """True if trained on this host. Every host has the versions that engines loaded."""
    return manifest.scope != "imported" and not manifest.origin
