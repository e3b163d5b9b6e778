"""The daemon as one object: its parts, their calls, and the order of start and stop.

Threads: the router's reads frames and calls `Ingest`; the store's commits and calls `on_commit`; the ticking one steers,
checks deadlines and learns; the HTTP server's answer requests. One lock guards all live state but the controllers' estimates,
which have locks of their own. Its holder never waits for the writer, so the writer may take it, and seldom for a controller.
It never waits for a sync of the disk either.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version as installed_version

import structlog

from honed.adapt.control.controller import MOST_REASONS, OTHER_REASON
from honed.adapt.monitor.drift import Alarm
from honed.adapt.protocol import wire
from honed.daemon.background import Background, Job
from honed.daemon.control.live_rounds import LiveRounds
from honed.daemon.control.load_history import LoadHistory
from honed.daemon.control.overrides import Overrides
from honed.daemon.control.steering import Steering
from honed.daemon.control.warm_start import WarmStart
from honed.daemon.ingest.engines import Engine, Engines
from honed.daemon.ingest.greeting import Greeting
from honed.daemon.ingest.ingest import Ingest
from honed.daemon.ingest.router import Router
from honed.daemon.ingest.trainer import Trainer
from honed.daemon.lifecycle.canaries import Canaries
from honed.daemon.lifecycle.checksums import Checksums
from honed.daemon.lifecycle.drafters import Drafters
from honed.daemon.lifecycle.eligible_engines import EligibleEngines
from honed.daemon.lifecycle.lifecycle import Lifecycle
from honed.daemon.lifecycle.old_versions import OldVersions
from honed.daemon.lifecycle.purges import Purges
from honed.daemon.lifecycle.recalibrations import Recalibrations
from honed.daemon.lifecycle.rollout import Rollout
from honed.daemon.lifecycle.sharing import Sharing
from honed.daemon.lifecycle.swaps import Swaps
from honed.daemon.lifecycle.trial import Trial
from honed.daemon.log_stream import LogStream
from honed.daemon.settings.filesystem import filesystem_of
from honed.daemon.settings.settings import Settings
from honed.daemon.settings.web_config import WebConfigFile
from honed.daemon.store.batch_tables import StoredBatch
from honed.daemon.store.journal import Journal
from honed.daemon.store.operations import Operations
from honed.daemon.store.store import Store
from honed.recalib.registry.registry import Registry
from honed.recalib.registry.shared import SharedRegistry

log = structlog.get_logger("honed.service")

DRAIN_S = 30.0
"""On a disk under heavy load one fsync may take many seconds; the unit allows 60 for a stop."""
LEAVE_S = 10.0
"""Most time of a stop for jobs in the background. What they leave unfinished, the next start removes or repeats."""
MOST_READERS = 8
"""Checkpoints and targets that are read at the same time."""
TICK_S = 1.0
LEARN_S = 0.05
REST_PER_WORK = 0.5
"""Time that the controllers leave to others after each batch, relative to what it took: they get two thirds at most."""
_PAUSED = "training_paused"
"""Key in the table `meta`."""


class Service:
    """All parts except the HTTP server and the process itself."""

    def __init__(
        self,
        settings: Settings,
        *,
        daemon_id: str,
        log_stream: LogStream | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.daemon_id, self.clock, self.monotonic = settings, daemon_id, clock, monotonic
        self.log_stream = log_stream or LogStream(sys.stderr)
        self.lock = threading.RLock()
        self.started_unix_s = clock()
        self.started_s = monotonic()
        self.store = Store(settings.paths.database, settings.store, clock=clock, monotonic=monotonic, on_commit=self.on_commit)
        registry = Registry(settings.paths.registry)
        # Before the router: a URL that can't be read ends the start, and a socket that nobody closes would hang it.
        shared = SharedRegistry(settings.registry.url, registry) if settings.registry.url else None
        self.drafters = Drafters(registry, on_move=self._on_move)
        self.journal = Journal(self.store, clock)
        self.router = Router(
            settings.paths.engine_socket,
            self.on_frame,
            on_odd_frame=self.on_odd_frame,
            on_close=self.on_close,
        )
        self.engines = Engines(self.store, settings.events.engine_lost_s, self._forget)
        self.operations = Operations(self.store, clock)
        self.rollout = Rollout(self.operations)
        controller_settings = settings.controller_settings()
        self.overrides = Overrides(self.store, self.journal, controller_settings, clock, monotonic)
        self.trainer = Trainer(self.router.send, daemon_id, settings.recalibration.trainer_lost_s, monotonic)
        tells_steps = settings.trainer_settings().when == "spare"
        self.steering = Steering(controller_settings, self.router.send, self.on_alarm, lock=self.lock, tells_steps=tells_steps)
        self.swaps = Swaps(self.engines, self.drafters, self.rollout, self.router.send, monotonic, self._on_refusal)
        self.live = LiveRounds()
        """Rounds since the daemon started."""
        self._background = Background("honed-registry", monotonic=monotonic)
        self._reading = Background("honed-reading", MOST_READERS, monotonic)
        """Reading of engines' checkpoints and targets: a mount that hangs holds up only engines that read from it."""
        self._learning = Background("honed-learning", monotonic=monotonic)
        """Replays of the log, which take long: no engine waits for its version behind another's."""
        self.eligible = EligibleEngines(self.engines, self.swaps, self.store, self.live.workloads, monotonic)
        self._make_lifecycle(shared)
        self._make_ingest()
        self.load = LoadHistory()
        self.decisions: Counter[tuple[str, str]] = Counter()
        """(engine, reason) -> steps since the daemon started."""
        self.requests: Counter[tuple[str, str, str]] = Counter()
        """(method, route, status) -> HTTP requests."""
        self.version = installed_version("honed")
        self.runtime_filesystem = filesystem_of(settings.paths.runtime_dir)
        self._stop = threading.Event()
        self.web_config: WebConfigFile | None = None
        """`http.metrics_web_config`, once it is read."""
        self.is_ending = threading.Event()
        """Set before the HTTP listeners stop: endless answers end."""
        self._next_tick_s, self._steers_soon = 0.0, False
        self._ticker = threading.Thread(target=self._run, name="honed-ticker", daemon=True)
        self.last_tick_s = monotonic()

    def _make_lifecycle(self, shared: SharedRegistry | None) -> None:
        settings = self.settings
        self.canaries = Canaries(
            settings.canary_settings(),
            self.rollout,
            engines=self.engines,
            drafters=self.drafters,
            swaps=self.swaps,
            controller_of=self.steering.controller,
            store=self.store,
            journal=self.journal,
            clock=self.clock,
            monotonic=self.monotonic,
            on_end=self._on_trial_end,
            hears_others=bool(settings.registry.url and settings.registry.pool_evidence),
        )
        self.lifecycle = Lifecycle(
            self.rollout,
            canaries=self.canaries,
            swaps=self.swaps,
            drafters=self.drafters,
            eligible=self.eligible,
            operations=self.operations,
            journal=self.journal,
            challenge_pause_s=settings.recalibration.min_interval_s,
            monotonic=self.monotonic,
        )
        self.recalibrations = Recalibrations(
            settings.recalibration,
            self.rollout,
            lifecycle=self.lifecycle,
            canaries=self.canaries,
            trainer=self.trainer,
            drafters=self.drafters,
            swaps=self.swaps,
            eligible=self.eligible,
            store=self.store,
            operations=self.operations,
            journal=self.journal,
            lock=self.lock,
            in_background=self.in_background,
            clock=self.clock,
            monotonic=self.monotonic,
            max_loss=settings.gate_settings().max_loss,
        )
        self.checksums = Checksums(
            self.rollout,
            engines=self.engines,
            drafters=self.drafters,
            swaps=self.swaps,
            operations=self.operations,
            journal=self.journal,
            send=self.router.send,
            lock=self.lock,
            in_background=self.in_background,
            monotonic=self.monotonic,
        )
        self.purges = Purges(
            self.trainer,
            operations=self.operations,
            journal=self.journal,
            engines_dir=settings.paths.runtime_dir / "engines",
            spill_dir=settings.paths.state_dir / "samples",
            lock=self.lock,
            in_background=self.in_background,
        )
        self.sharing = Sharing(
            settings.registry,
            shared,
            self.rollout,
            lifecycle=self.lifecycle,
            canaries=self.canaries,
            drafters=self.drafters,
            eligible=self.eligible,
            store=self.store,
            operations=self.operations,
            journal=self.journal,
            lock=self.lock,
            clock=self.clock,
            monotonic=self.monotonic,
            on_fetch=lambda: self.in_background(self.old_versions.remove),
        )
        self.old_versions = OldVersions(
            settings.registry.keep_versions,
            self.rollout,
            drafters=self.drafters,
            engines=self.engines,
            swaps=self.swaps,
            store=self.store,
            lock=self.lock,
            clock=self.clock,
        )

    def _make_ingest(self) -> None:
        settings = self.settings
        self.warm_start = WarmStart(
            self.steering,
            settings.paths.database,
            lock=self.lock,
            in_background=self.in_learning,
            tell_of_trial=self.canaries.tell_of_trial,
            on_ready=self.steer_soon,
        )
        self.greeting = Greeting(
            self.store,
            self.router.send,
            daemon_id=self.daemon_id,
            log_token_ids=settings.events.log_token_ids,
            clock=self.clock,
            lock=self.lock,
            in_background=self._reading.submit,
            user_of=self.router.user_of,
            identify=self.drafters.identify,
            is_kept=self.drafters.is_kept,
            learn_target=self.drafters.learn_target,
            on_hello=self.warm_start.prepare,
            on_welcome=self._on_welcome,
            keep=self.engines.keep,
        )
        self.ingest = Ingest(
            self.engines,
            self.store,
            self.router.send,
            hang_up=self.router.hang_up,
            on_hello=self.greeting.greet,
            on_batch=self._on_batch,
            on_target_update=self._on_target_update,
            on_command_result=self._on_command_result,
            on_trainer=self._on_trainer,
            clock=self.clock,
            monotonic=self.monotonic,
        )

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start writing, then listening. Raises StartError."""
        self.store.start()
        self.old_versions.load()
        self.lifecycle.load()
        self.recalibrations.load()
        self.overrides.load()
        self.trainer.is_paused = bool(self.store.read(f"SELECT 1 FROM meta WHERE key = '{_PAUSED}' AND value"))
        self.router.start()
        self._ticker.start()
        self.in_background(self.old_versions.remove)

    def stop(self) -> None:
        """Stop in the order of the data flow: no new frames, no new decisions, then commit the rest."""
        self._stop.set()
        if self._ticker.is_alive():
            self._ticker.join()
        # Commit first, so that the last acknowledgements are sent before the socket closes.
        self.store.drain(DRAIN_S)
        self.router.stop()
        until_s = time.monotonic() + LEAVE_S
        for jobs in (self._background, self._reading, self._learning):
            jobs.stop(max(until_s - time.monotonic(), 0.0))
        self.sharing.close()
        self.store.close()

    @property
    def problems(self) -> list[str]:
        """Reasons why the daemon can't work now; empty if it can."""
        found = []
        for name, part in (("writer", self.store), ("router", self.router)):
            if not part.is_alive:
                found.append(f"the {name} thread has ended")
        if self.monotonic() - self.last_tick_s > 10 * TICK_S:
            found.append("the ticking thread is stuck")
        return found

    def pause_training(self, is_paused: bool) -> None:
        """Pause or resume training between two micro-steps. The state survives restarts of daemon and trainer."""
        self.trainer.pause(is_paused)
        self.journal.insert("meta", {"key": _PAUSED, "value": int(is_paused)}, key="key")

    def in_background(self, job: Job) -> None:
        """Run a long job, which takes the lock only when needed. What it raises is logged."""
        self._background.submit(job, "the registry and the samples")

    def in_learning(self, job: Job) -> None:
        """Run a replay of the log likewise."""
        self._learning.submit(job, "the stored log")

    def oldest_job(self) -> tuple[float, str] | None:
        """Return the age in seconds of the oldest job in the background, and what it touches; None without one."""
        every = self._background, self._reading, self._learning, self.sharing.jobs
        found = [oldest for jobs in every if (oldest := jobs.oldest())]
        if not found:
            return None
        submitted_s, touches = min(found)
        return self.monotonic() - submitted_s, touches

    def _on_refusal(self, version: str) -> None:
        self.in_background(lambda: self.drafters.read_ahead(version))

    def _on_move(self) -> None:
        """Have the aliases on the disk before what the writer commits next, such as a verdict on them; prune then."""
        self.store.submit(lambda _: self.drafters.registry.sync_aliases())
        self.in_background(self.old_versions.remove)
        self.sharing.soon()

    def _run(self) -> None:
        wait_s = LEARN_S
        while not self._stop.wait(wait_s):
            try:
                wait_s = self._turn()
            except Exception as error:
                wait_s = LEARN_S
                log.exception("a tick failed", error=str(error))
            self.last_tick_s = self.monotonic()

    def _turn(self) -> float:
        """Learn from one batch; tick, and send policies, if it is time.

        Returns how long the interpreter is then left to frames and requests, which mustn't wait for many batches to be learned.
        """
        began_s = self.monotonic()
        is_left = self.steering.observe(1)
        learned_s = (now_s := self.monotonic()) - began_s
        if is_due := now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            with self.lock:
                self.tick(now_s)
        if is_due or self._steers_soon:
            self._steers_soon = False
            self.steer(now_s)
        return learned_s * REST_PER_WORK if is_left else LEARN_S

    def tick(self, now_s: float) -> None:
        """Once a second: handle deadlines and lost peers. Where a part fails, as on a bad disk, the others go on."""
        for part in (
            lambda _: self.overrides.expire(),
            lambda now_s: self.greeting.tick(self.engines.connected(now_s), now_s),
            self.swaps.tick,
            self.canaries.tick,
            self.lifecycle.tick,
            self.checksums.tick,
            self.recalibrations.tick,
            self.purges.tick,
            self.sharing.tick,
            self.engines.tick,
        ):
            try:
                part(now_s)
            except Exception as error:
                log.exception("a part of the tick failed", error=str(error))

    def steer(self, now_s: float) -> None:
        """Send changed and due policies. Call it without the lock."""
        with self.lock:
            wanted = [
                (engine, self.overrides.active(self.recalibrations.capture_override(engine.engine_id, now_s)))
                for engine in self.engines.connected(now_s)
            ]
        self.steering.steer(wanted, now_s)

    def steer_soon(self) -> None:
        """Let the ticker steer at its next turn: a controller may be learning, and frames and requests mustn't wait for it."""
        self._steers_soon = True

    # --- messages of engines and trainers (router's thread) -------------------------------------------------------------

    def on_frame(self, peer: bytes, frame: bytes) -> None:
        with self.lock:
            self.ingest.handle(peer, frame)

    def on_odd_frame(self, why: str) -> None:
        with self.lock:
            self.ingest.reject(why)

    def on_close(self, peer: bytes) -> None:
        with self.lock:
            self.engines.release(peer)

    def _forget(self, engine_id: str) -> None:
        self.load.forget(engine_id)
        self.steering.forget(engine_id)
        self.swaps.forget(engine_id)
        for key in [key for key in self.decisions if key[0] == engine_id]:
            del self.decisions[key]

    def _on_target_update(self, engine: Engine) -> None:
        """Mark the moment; delete samples of the old weights if the settings say so."""
        self.journal.mark("target", "vLLM was given other weights of the target", engine.engine_id)
        log.info("the target's weights were updated", engine_id=engine.engine_id)
        boot, num_updates = engine.boot, engine.boot.target_updates

        def note() -> None:
            boot.acted_updates = num_updates  # there may be more by then, which have a purge of their own
            self.engines.keep(boot)

        if self.settings.recalibration.on_target_update == "purge":
            self.purges.purge_after_update(engine.engine_id, note)
        else:
            note()

    def _on_welcome(self, engine: Engine) -> None:
        self.swaps.on_engine(engine, self.monotonic())
        self.steer_soon()
        # Engines that name ever new checkpoints mustn't fill the disk.
        self.in_background(self.old_versions.remove)

    def _on_batch(self, engine: Engine, batch: wire.EventBatch, item: StoredBatch) -> None:
        for (_, workload), counts in item.counts.cells.items():
            self.live.add((engine.engine_id, workload, batch.drafter_version), counts, self.monotonic())
        if item.counts.total.rounds:
            engine.latest_rounds = item.counts.total
        self.load.add(engine.engine_id, batch.steps, engine.budget_nodes, item.received_unix_ns / 1e9)
        known = {reason for engine_id, reason in self.decisions if engine_id == engine.engine_id}
        for reason, steps in Counter(batch.steps.decision).items():
            is_kept = reason in known or len(known) < MOST_REASONS
            known.add(reason)
            self.decisions[engine.engine_id, reason if is_kept else OTHER_REASON] += steps
        if not item.counts.malformed:
            self.steering.put(engine, batch, len(item.frame))
            self.canaries.on_batch(engine, batch)

    def _on_command_result(self, result: wire.CommandResult) -> None:
        self.swaps.on_result(result)
        self.checksums.on_result(result)

    def _on_trainer(self, peer: bytes, message: wire.FromTrainer) -> None:
        self.trainer.hear(peer, message)
        if not isinstance(message, wire.Purged):
            self.recalibrations.on_trainer(message)
        if isinstance(message, wire.TrainerHello | wire.Purged):
            self.purges.on_trainer(message)

    def on_alarm(self, engine: Engine, alarm: Alarm) -> None:
        self.recalibrations.on_alarm(engine, alarm)

    def _on_trial_end(self, trial: Trial, decision: str, text: str) -> bool:
        is_done = self.lifecycle.on_trial_end(trial, decision, text)
        self.recalibrations.on_trial_end(trial, decision)
        return is_done

    # --- calls of the store (writer's thread) ---------------------------------------------------------------------------

    def on_commit(self, group: list[StoredBatch]) -> None:
        with self.lock:
            self.ingest.on_commit(group)
