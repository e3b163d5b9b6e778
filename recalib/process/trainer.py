"""The trainer process: always reads the rings, and trains on request while no engine needs the device, or little (`SpareTime`).

It has one thread. Each turn of the loop polls the socket, takes in a bounded number of new samples and does at most one unit of
the current operation. A unit is some blocks of a micro-step or of the judging of a stretch. The busy flags are read before each
unit (`yielding`), so new requests wait for at most one unit, as do a pause, a cancellation and SIGTERM.

The daemon may be away: work continues, and the last result is sent again at each welcome of the daemon until it requests
something else. So the daemon must take results idempotently, by operation id.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec
import structlog
import torch

from honed.adapt.protocol import wire
from honed.adapt.protocol.fields import MAX_TEXT_CHARS
from honed.recalib.config.engine_gpus import AwaitedEngines
from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.gate.gate import GateSettings
from honed.recalib.process.busy_flags import Preemptions
from honed.recalib.process.contexts import contexts_of
from honed.recalib.process.cores import usable_cores
from honed.recalib.process.recalibration import Recalibration
from honed.recalib.process.spare_time import SpareTime
from honed.recalib.process.trainer_link import TrainerLink
from honed.recalib.process.yielding import Yielding
from honed.recalib.registry.registry import Registry, RegistryError
from honed.recalib.samples.hold_out import HoldOut, load_salt
from honed.recalib.samples.traffic import Traffic
from honed.recalib.training.device_memory import AUTO, devices_of, give_back
from honed.recalib.training.progress import OperationError

log = structlog.get_logger("honed.trainer")

_STOPPED = "the trainer was stopped"


class Trainer:
    """State of the process; `turn` is one turn of its loop."""

    def __init__(
        self,
        settings: TrainerSettings,
        gate: GateSettings,
        registry: Registry,
        traffic: Traffic,
        endpoint: str,
        monotonic: Callable[[], float] = time.monotonic,
        state_dir: Path | None = None,
        on_tick: Callable[[str], None] | None = None,
    ) -> None:
        self._settings, self._gate, self._registry, self._traffic = settings, gate, registry, traffic
        self._monotonic, self._state_dir, self._on_tick = monotonic, state_dir, on_tick
        self._paused_s = self._paused_at_s = 0.0
        self._put_off: list[wire.ToTrainer] = []
        self.is_stopping = False
        self._operation: Recalibration | None = None
        self._yielding = Yielding(settings, traffic.engines_dir, self._meanwhile, monotonic)
        self._last_result: wire.TrainResult | None = None
        self._state = ""
        self._next_status_s = self._next_discovery_s = self._next_samples_s = 0.0
        self._beside: set[str] = set()
        """Engines that shared the device when the operation began."""
        self._down: set[tuple[str, tuple[int, int]]] = set()
        """Those that were down then."""
        others = settings.other_engines_dirs(traffic.engines_dir)
        self._engines = AwaitedEngines(traffic.engines_dir, settings.yields_to, monotonic, others)
        self._link = TrainerLink(endpoint, self._hello)

    def turn(self) -> None:
        """Receive messages, take in samples, do one unit of work, report."""
        put_off, self._put_off = self._put_off, []
        for message in (*put_off, *self._link.receive(self._wait_s())):
            self._take(message)
        self._take_samples()
        is_busy = self._yielding.look()
        self._work(is_busy)
        self._report(is_busy)
        if self._on_tick is not None:
            self._on_tick(self._state)

    def close(self) -> None:
        """Stop the current operation, report that, and disconnect."""
        if self._operation is not None:
            self._operation.cancel(_STOPPED)
            self._finish()
        self._link.close()

    # --- messages -----------------------------------------------------------------------------------------------------

    def _take(self, message: wire.ToTrainer) -> None:
        if self._operation is not None and (why := _ends(message, self._operation)) is not None:
            self._operation.cancel(why)
        if isinstance(message, wire.TrainRequest):
            self._begin(message)
        elif isinstance(message, wire.TrainPause):
            self._pause(message.paused)
        elif isinstance(message, wire.Purge):
            problems = self._traffic.purge()
            self._link.send(wire.Purged(operation_id=message.operation_id, problems=problems))
        elif isinstance(message, wire.Welcome):
            log.info("connected to the daemon", daemon_id=message.daemon_id)
            if self._last_result is not None:
                self._link.send(self._last_result)

    def _pause(self, is_paused: bool) -> None:
        now_s = self._monotonic()
        if self._yielding.is_paused:
            self._paused_s += now_s - self._paused_at_s
        self._yielding.is_paused, self._paused_at_s = is_paused, now_s

    def _unpaused_s(self) -> float:
        """Clock that stands still while training is paused."""
        return (self._paused_at_s if self._yielding.is_paused else self._monotonic()) - self._paused_s

    def _begin(self, request: wire.TrainRequest) -> None:
        """Start an operation; a repeated request (from a restarted daemon) is the same operation."""
        if self._operation is not None and self._operation.result is not None:  # just cancelled
            self._finish()
        if self._operation is not None:
            current = self._operation.request.operation_id
            if current != request.operation_id:
                error = f"busy with operation {current}: wait for it or cancel it"
                self._link.send(wire.TrainResult(operation_id=request.operation_id, ok=False, error=error))
            return
        if self._last_result is not None and self._last_result.operation_id == request.operation_id:
            self._link.send(self._last_result)
            return
        self._last_result = None
        self._yielding.preemptions = Preemptions()
        feed = self._traffic.joint([Path(path) for path in request.capture_paths])
        self._traffic.freeze(True)
        self._yielding.busy.discover()
        self._beside, self._down = self._yielding.busy.living(), self._yielding.busy.down()
        self._operation = Recalibration(
            request,
            self._settings,
            self._gate,
            self._registry,
            feed,
            self._unpaused_s,
            self._state_dir,
            self._yielding.working_s,
            self._engines,
        )
        log.info("operation begins", operation_id=request.operation_id, workloads=request.workloads)

    # --- work ---------------------------------------------------------------------------------------------------------

    def _take_samples(self) -> None:
        """Runs every `tick_s`. While an engine has requests, the flags are read much more often, which must cost nothing."""
        now_s = self._monotonic()
        if now_s < self._next_samples_s:
            return
        self._next_samples_s = now_s + self._settings.tick_s
        is_due = now_s >= self._next_discovery_s
        if is_due or self._operation is not None:  # an engine that starts wants the training's memory at once
            self._yielding.busy.discover()
        if is_due:
            self._next_discovery_s = now_s + 1.0
            self._traffic.discover()
            self._traffic.expire()
            self._engines()
        self._traffic.poll()

    def _work(self, is_busy: bool) -> None:
        operation = self._operation
        if operation is None:
            return
        if operation.held_device is not None and operation.held_device.type != "cpu":
            self._make_room_for_engines(operation)
        if operation.needs_device and not self._yielding.may_begin(is_busy):
            operation.keep_waiting()
        else:
            with self._yielding.unit(operation.device):
                operation.advance()
        if operation.result is not None:
            self._finish()

    def _make_room_for_engines(self, operation: Recalibration) -> None:
        """End the operation if an engine beside it has ended, or another starts: at its start it wants the memory."""
        busy = self._yielding.busy
        ended = self._beside - busy.living()
        if names := ended or {engine_id for engine_id, _ in busy.down() - self._down}:
            what = "ended" if ended else "is starting or has ended"
            operation.cancel(
                f"{', '.join(sorted(names))} {what}, and the training's memory on {operation.held_device} may be in the way of "
                "its start: ask again when the engine is up"
            )

    def _meanwhile(self, wait_s: float) -> None:
        """Hear the daemon, take in samples and report while a unit waits; a pause begins and ends at once.

        Other messages are put off until the unit's end, unless they end the operation.

        Raises:
            OperationError: the operation must end.
        """
        operation = self._operation
        assert operation is not None
        if self.is_stopping:
            raise OperationError(_STOPPED)
        operation.check_deadline()
        for message in self._link.receive(wait_s):
            if isinstance(message, wire.TrainPause):
                self._pause(message.paused)
                continue
            self._put_off.append(message)
            if (why := _ends(message, operation)) is not None:
                raise OperationError(why)
        self._take_samples()
        self._report(is_busy=True)
        if self._on_tick is not None:
            self._on_tick(self._state)

    def _finish(self) -> None:
        assert self._operation is not None
        assert self._operation.result is not None
        result = self._last_result = self._operation.result
        self._operation = None
        self._traffic.freeze(False)
        self._link.send(result)
        log.info(
            "operation ends",
            operation_id=result.operation_id,
            ok=result.ok,
            version=result.version,
            error=result.error,
            steps=result.steps,
            train_seconds=round(result.train_seconds, 3),
        )
        give_back()  # last: where CUDA has failed this fails, too, and ends the process

    def _wait_s(self) -> float:
        if self._operation is None:
            return self._settings.tick_s
        if not self._operation.needs_device or self._yielding.is_paused:
            return self._settings.tick_s
        return self._yielding.wait_s(self._settings.tick_s)

    # --- reports ------------------------------------------------------------------------------------------------------

    def _hello(self) -> wire.TrainerHello:
        return wire.TrainerHello(
            trainer_id=self._settings.trainer_id,
            device=str(devices_of(self._settings.device, self._engines())[0]),
            operation_id=self._operation.request.operation_id if self._operation else "",
            yields_to=list(self._settings.yields_to),
        )

    def _report(self, is_busy: bool) -> None:
        state = self._state_now(is_busy)
        now_s = self._monotonic()
        if state == self._state and now_s < self._next_status_s:
            return
        self._state, self._next_status_s = state, now_s + self._settings.status_interval_s
        feeds, missing, operation = self._traffic.feeds, self._traffic.num_missing(), self._operation
        delays_s, computing_s = self._yielding.preemptions.take()
        status = wire.TrainerStatus(
            trainer_id=self._settings.trainer_id,
            state=state,
            samples=sum(feed.store.num_stretches for feed in feeds),
            samples_bytes=sum(feed.num_bytes for feed in feeds),
            spilled_bytes=self._traffic.spilled_bytes,
            sessions=sum(feed.store.num_sessions for feed in feeds),
            preemptions=self._yielding.preemptions.count,
            preemption_delays_s=delays_s,
            preemption_computing_s=computing_s,
            idle_ratio=self._yielding.idleness.ratio,
            ring_lost_records=min(missing["records"], 1 << 53),
            defective_rings=sum(bool(feed.reader.error) for feed in feeds),
            nonfinite_rows=min(missing["nonfinite_rows"], 1 << 53),
        )
        if (spare := self._yielding.spare) is not None:
            status = self._with_spare(status, spare, now_s)
        self._link.send(_with_progress(status, operation) if operation else status)

    def _with_spare(self, status: wire.TrainerStatus, spare: SpareTime, now_s: float) -> wire.TrainerStatus:
        return msgspec.structs.replace(
            status,
            beside_seconds=spare.seconds,
            beside_duty=spare.duty,
            beside_harm=spare.harm,
            beside_harm_error=spare.harm_error,
            beside_slow_share=spare.meter.slow_share,
            beside_limit=spare.limit,
            beside_pause=spare.why_not(now_s, self._yielding.busy.busy_engines),
        )

    def _state_now(self, is_busy: bool) -> str:
        if self._yielding.is_paused:
            return "paused"
        if self._operation is None:
            return "idle"
        is_waiting = is_busy and self._operation.needs_device and not self._yielding.worked_lately()
        return "waiting" if is_waiting else self._operation.progress.stage


def _ends(message: wire.ToTrainer, operation: Recalibration) -> str | None:
    """Return why the operation must end after this message; None: it continues."""
    if isinstance(message, wire.TrainCancel) and message.operation_id == operation.request.operation_id:
        return f"cancelled: {message.reason}" if message.reason else "cancelled"
    return "the samples were purged" if isinstance(message, wire.Purge) else None


def _with_progress(status: wire.TrainerStatus, operation: Recalibration) -> wire.TrainerStatus:
    progress = operation.progress
    return wire.TrainerStatus(
        **{name: getattr(status, name) for name in status.__struct_fields__}
        | {
            "operation_id": operation.request.operation_id,
            "steps": progress.steps,
            "max_steps": progress.max_steps,
            "tokens": progress.tokens,
            "loss": progress.loss,
            "train_seconds": progress.train_seconds,
            "dropped_updates": progress.dropped_updates,
            "elapsed_s": operation.elapsed_s,
            "gate": progress.gate,
            "memory_bytes": progress.memory_bytes,
            "device": str(operation.held_device or ""),
            "device_reason": progress.device_reason[:MAX_TEXT_CHARS],
        }
    )


def check_device(device: str) -> None:
    """Check that torch can use the device.

    Raises:
        ValueError: it never can: the setting or the installation is wrong.
        RuntimeError: it can't now, as before the driver is loaded.
    """
    if device == AUTO or torch.device(device).type != "cuda":
        return
    wanted = f"trainer.device = {device!r}"
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            raise ValueError(f"{wanted}, but this PyTorch is built for the CPU: use cpu, or install its CUDA build")
        raise RuntimeError(f"{wanted}, but PyTorch sees no GPU: see that its driver is loaded (`nvidia-smi`), or use cpu")
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{wanted}, but PyTorch sees cuda:0 … cuda:{torch.cuda.device_count() - 1} only")


def stand_back(settings: TrainerSettings) -> None:
    """Lower this process's priority on the processors and, if NVIDIA's MPS shares the GPU, of its kernels.

    A CUDA stream's priority would only rank streams within one process. Must be called before CUDA is.
    """
    os.environ.setdefault("CUDA_MPS_CLIENT_PRIORITY", "1")
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # GPUs have the numbers that nvidia-smi shows
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else a process on each core, beside vLLM
    if settings.nice:
        os.nice(settings.nice)
    torch.set_num_threads(settings.torch_threads or max(1, usable_cores() // 2))


def import_late_parts() -> None:
    """Import what torch would load during its first work: that takes a second or two without yielding."""
    importlib.import_module("torch._dynamo")


def run(
    settings: TrainerSettings,
    endpoint: str,
    *,
    state_dir: Path,
    gate: GateSettings | None = None,
    on_tick: Callable[[str], None] | None = None,
) -> None:
    """Run until SIGTERM or SIGINT.

    Args:
        endpoint: the daemon's socket, `ipc://…/engine.sock`.
        state_dir: folder with the registry. The engines' rings are in the endpoint's folder.
        on_tick: called after every turn with the current activity, at most one micro-step or `tick_s` apart; for the watchdog.

    Raises:
        RegistryError: the registry, or another part of the state folder, can't be opened.
        ValueError, RuntimeError: the device can't be used.
    """
    stand_back(settings)
    check_device(settings.device)
    import_late_parts()
    runtime_dir = Path(endpoint.removeprefix("ipc://")).parent
    try:
        hold_out = HoldOut(load_salt(state_dir), settings.held_out_share)
        registry = Registry(state_dir / "registry")
        trainer = Trainer(
            settings,
            gate or GateSettings(),
            registry,
            Traffic(runtime_dir, settings, hold_out, state_dir / "samples", context_of=contexts_of(registry)),
            endpoint,
            state_dir=state_dir / "training",
            on_tick=on_tick,
        )
    except OSError as error:
        raise RegistryError(f"the folder {state_dir} can't be used: {error}") from error
    log.info("trainer started, waiting for the daemon", device=settings.device, daemon=endpoint)

    def stop(signum: int, frame: FrameType | None) -> None:
        trainer.is_stopping = True

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while not trainer.is_stopping:
            trainer.turn()
    finally:
        trainer.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
