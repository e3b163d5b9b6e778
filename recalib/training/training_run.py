"""The training stage of one operation: from the parent's checkpoint to trained weights, some blocks at a time.

The state is saved from time to time, so that a killed trainer resumes with the same weights, optimizer, random choices and
figures. Samples aren't saved: the engine's ring still has the latest.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
import structlog
import torch

from honed.adapt.protocol import wire
from honed.adapt.protocol.wire import GateFigures
from honed.recalib.config.engine_gpus import EngineGpus, reserve_on
from honed.recalib.config.memory import MemoryBudgetError, check_fits, estimate_and_cures, in_words
from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.drafter.checkpoint import (
    TargetHead,
    load_drafter,
    load_target_head,
    read_drafter_config,
    target_head_names,
)
from honed.recalib.drafter.drafter import Drafter
from honed.recalib.registry.target_digest import digest_of_target
from honed.recalib.registry.vocabulary import vocabulary_tensors
from honed.recalib.samples.sample import TrainingSample
from honed.recalib.samples.selection import Selection
from honed.recalib.samples.stretch import Stretch
from honed.recalib.samples.traffic import Feed, JointFeed
from honed.recalib.training.device_memory import available_bytes, check_gpu, devices_of, hold_to, use, uuid_of
from honed.recalib.training.micro_step import MicroTrainer, StepFigures
from honed.recalib.training.mixture import MUST_GAIN_SHARE, WorkloadMix
from honed.recalib.training.pace import Pace
from honed.recalib.training.precision import compute_dtype
from honed.recalib.training.progress import OperationError, Progress
from honed.recalib.training.training_state import TrainingState

log = structlog.get_logger("honed.trainer")

MOST_DROPPED = 5
"""Updates dropped in a row after which a training ends."""
ALLOWED = 1.25
"""Memory that our process may take on a GPU, of its estimate: others allocate there, too."""
TRAINING_SHARE = 0.5
"""Part of the time left to the deadline within which a training ends."""
_WAITING = "waiting for idle engines; try again at a quieter time, or raise trainer.deadline_s and max_seconds"
_UNFUSED = "start vLLM with HONED_FEATURES=layers in its environment"
SAVING_SHARE = 0.1
"""Most time that saving the state takes, of the training's."""
LEAST_LOST = 0.1
"""Accepted drafts a round whose loss is called a divergence, at least."""
_SAVED = ("steps", "tokens", "loss", "dropped_updates", "train_seconds")


class TrainingRun:
    """One training. Each advance of `steps` does a part of a micro-step, or saves the state.

    Args:
        working_s: clock that training is timed with.
        waited_s: () -> seconds that the operation has spent outside training.
        state_dir: folder of the saved state; None: a killed training restarts from the beginning.
        engines: () -> the engines on this machine.
    """

    def __init__(
        self,
        request: wire.TrainRequest,
        settings: TrainerSettings,
        parent_dir: Path,
        feed: Feed | JointFeed,
        progress: Progress,
        working_s: Callable[[], float],
        state_dir: Path | None,
        waited_s: Callable[[], float] = lambda: 0.0,
        engines: Callable[[], Sequence[EngineGpus]] = tuple,
    ) -> None:
        self._request, self._settings, self._parent_dir, self._feed = request, settings, parent_dir, feed
        self._progress, self._working_s, self._waited_s = progress, working_s, waited_s
        self._engines = engines
        self._waited_then_s = 0.0
        """What it had spent so when the training began."""
        self._device = devices_of(settings.device, engines())[0]
        self._config = read_drafter_config(parent_dir, request.num_draft_tokens)
        target_head_names(request.target_path)  # not only when all samples are in
        self._vocabulary = vocabulary_tensors(parent_dir, Path(request.target_path))
        if request.scope not in ("kv-frozen", "full"):
            raise OperationError(f"unknown scope {request.scope!r}: kv-frozen and full are known")
        block_size, width = self._config.block_size, self._config.hidden_size
        self._training = settings.training("full" if request.scope == "full" else "kv-frozen", block_size, width)
        about = {"request": msgspec.to_builtins(request), "training": asdict(self._training)}
        self._state = TrainingState(state_dir, request.operation_id, about) if state_dir and settings.save_state_s else None
        self._head: TargetHead | None = None
        self._dropped_in_a_row = 0
        self._has_warned = False
        """Whether the log says that the state can't be saved."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the drafter's vocabulary."""
        return self._config.vocab_size

    @property
    def device(self) -> torch.device:
        """The device that `check_memory` chose last."""
        return self._device

    def check_features(self) -> None:
        """Raise OperationError if the training can't use the captured features. While nobody knows what they are, it may."""
        if self._feed.features is None or not self._feed.is_fused or self._config.mtp is not None:
            return
        if self._training.scope == "full":
            raise OperationError(f"scope 'full' trains fc and needs unfused features: {_UNFUSED}, or use scope kv-frozen")

    def check_memory(self) -> None:
        """Estimate the training's memory, and choose the first device that it fits on.

        Raises:
            MemoryBudgetError: it fits on none; the last one's reason.
        """
        engines = self._engines()
        *gpus, last = devices_of(self._settings.device, engines)
        self._progress.device_reason = ""
        for device in gpus:
            try:
                check_gpu(device, engines)
                self._check_memory(device)
            except (MemoryBudgetError, RuntimeError) as error:  # PyTorch's too, where not even a context fits
                self._progress.device_reason = str(error)
                log.warning("trains on the next device", why=str(error), device=str(device))
            else:
                return
        try:
            self._check_memory(last)
        except MemoryBudgetError as error:
            why = self._progress.device_reason
            raise MemoryBudgetError(f"{error}; no GPU was taken: {why}" if why else str(error)) from error

    def _check_memory(self, device: torch.device) -> None:
        self._device = use(device)
        dtype = compute_dtype(self._device, self._training.precision)
        needed, cures = estimate_and_cures(
            self._config,
            self._training,
            self._settings.rows_per_micro_step,
            is_fused=self._feed.is_fused,
            is_head_tied=self._vocabulary.is_head_tied,
            own_values=self._vocabulary.own_values,
            shared_bytes=self._shared_dtype.itemsize,
            compute_bytes=dtype.itemsize,
        )
        reserve = reserve_on(uuid_of(self._device), self._engines()) if self._device.type == "cuda" else 0
        available = available_bytes(self._device, self._settings.memory_bytes, reserve)
        self._progress.memory_bytes = needed.total_bytes
        log.info("training takes", memory=str(needed), available=in_words(available), device=str(self._device))
        where = f"{self._device}, where engines will still want {in_words(reserve)}," if reserve else str(self._device)
        check_fits(needed, available, where, cures)
        hold_to(self._device, min(available, int(ALLOWED * needed.total_bytes)))

    def load_head(self) -> None:
        """Load the target's embedding and head, and an MTP head's experts, one tensor each for all drafters.

        Raises:
            OperationError: another target has taken the place of the one that the samples are of.
        """
        path, wanted = self._request.target_path, self._request.target_sha256
        if wanted and digest_of_target(path) not in ("", wanted):
            raise OperationError(
                f"{path} isn't what it was when vLLM loaded it: the samples are of the old target; restart vLLM, then try again"
            )
        self._head = load_target_head(path, self._config, self._device, self._shared_dtype)

    def load_drafter(self) -> Drafter:
        """Load the parent, with the loaded head: once to train it, once to compare with it."""
        assert self._head is not None, "load_head comes first"
        return load_drafter(self._parent_dir, self._request.target_path, self._head, self._request.num_draft_tokens).to(
            self._device
        )

    def sample(self, stretch: Stretch) -> TrainingSample:
        """Convert to tensors. An MTP head's rows are the same in either form."""
        return stretch.to_training_sample(self._feed.is_fused and self._config.mtp is None)

    def pace(self) -> Pace:
        """Make the pace of units on the training's device. On a CPU units are whole, and the trainer yields within them.

        Each part of a micro-step would recompute the context, which on a slow CPU took three quarters of the training.
        """
        return Pace(0.0 if self._device.type == "cpu" else self._settings.unit_s)

    def steps(self, drafter: Drafter, parent: Drafter, samples: Selection) -> Iterator[None]:
        """Do micro-steps until max_steps or max_seconds; then the drafter holds the result.

        Where the engines leave little time, what was trained within half of the time to the deadline is the result: the gate
        needs time, too.

        Raises:
            OperationError: there was no time at all.
        """
        request, settings, progress = self._request, self._settings, self._progress
        trainer = MicroTrainer(drafter, self._training, parent)
        mix = WorkloadMix(samples, request.workloads, MUST_GAIN_SHARE, settings.rows_per_micro_step, settings.seed)
        pace = self.pace()
        self._waited_then_s = self._waited_s()
        self._take_up(trainer, mix)
        saved_s, pause_s = progress.train_seconds, settings.save_state_s
        while self._done < 1.0:
            yield
            yield from self._micro_step(trainer, mix, pace)
            if trainer.is_between_updates and progress.train_seconds - saved_s >= pause_s:
                took_s = yield from self._save(trainer, mix)
                saved_s, pause_s = progress.train_seconds, max(settings.save_state_s, took_s / SAVING_SHARE)
        if trainer.is_between_updates and progress.train_seconds > saved_s:
            yield from self._save(trainer, mix)  # the gate may be interrupted as well
            yield
        progress.is_cut_short = self._done_by_limits < 1.0
        if not trainer.num_updates:
            raise OperationError(f"no time was left for an update: {self._waited_s():.0f} s went by {_WAITING}")

    @property
    def _done(self) -> float:
        """Share of the training that is over."""
        waited_s = self._waited_s() - self._waited_then_s
        most_s = TRAINING_SHARE * max(self._settings.deadline_s - self._waited_then_s, 1.0)
        return max(self._done_by_limits, waited_s / most_s)

    @property
    def _done_by_limits(self) -> float:
        progress = self._progress
        return max(progress.steps / progress.max_steps, progress.train_seconds / self._request.max_seconds)

    def _micro_step(self, trainer: MicroTrainer, mix: WorkloadMix, pace: Pace) -> Iterator[None]:
        """Do one micro-step in parts; time between them isn't training time."""
        request, progress = self._request, self._progress
        began_s = self._working_s()
        samples = [self.sample(stretch) for stretch in mix.draw()]
        if not samples:
            raise OperationError("the samples are gone: they were purged, or another model was loaded")
        # Workloads that needn't gain must not lose: there the drafter is held to its parent.
        kept = [bool(request.workloads) and sample.workload not in request.workloads for sample in samples]
        remaining = max(1.0 - self._done, 0.0)
        spent_s, parts = 0.0, trainer.parts(samples, kept=kept, remaining=remaining, pace=pace)
        while True:
            try:
                next(parts)
            except StopIteration as end:
                figures: StepFigures = end.value
                break
            spent_s += self._working_s() - began_s
            yield
            began_s = self._working_s()
        progress.steps += 1
        progress.tokens += figures.num_tokens
        if math.isfinite(figures.loss):
            progress.loss += (figures.loss - progress.loss) * max(0.05, 1.0 / progress.steps)
        if figures.grad_norm is not None:
            self._note_update(figures.is_update, trainer.num_updates)
        progress.train_seconds += spent_s + self._working_s() - began_s

    def _note_update(self, is_update: bool, num_updates: int) -> None:
        if is_update:
            self._dropped_in_a_row = 0
            return
        self._dropped_in_a_row += 1
        self._progress.dropped_updates += 1
        if self._dropped_in_a_row < MOST_DROPPED:
            return
        if num_updates:
            why = f"training diverged: neither loss nor gradient was finite in {MOST_DROPPED} updates in a row"
            raise OperationError(f"{why}; {self._lower_rate}")
        raise OperationError(
            f"no loss was finite in {MOST_DROPPED} updates from the start: the parent's weights or the captured features "
            "are broken; promote another version, or look for NaN in what the target computes"
        )

    def check_result(self, figures: Iterable[GateFigures], min_sessions: int) -> None:
        """Raise OperationError if half of the accepted drafts are lost on a workload: not a small gain, but a ruined drafter.

        Fewer sessions than `min_sessions` show nothing. Losses can't tell: each micro-step has samples of its own, and those of
        one workload may have several times the loss of another's.
        """
        for one in figures:
            is_shown = one.is_judged and one.sessions >= min_sessions
            if is_shown and one.parent - one.candidate > max(0.5 * (one.parent - 1.0), LEAST_LOST):
                where = f"on workload {one.workload!r}" if one.workload else "on all workloads"
                fell = f"the acceptance length fell from {one.parent:.2f} to {one.candidate:.2f} {where}"
                raise OperationError(f"training diverged: {fell}; {self._lower_rate}")

    @property
    def _lower_rate(self) -> str:
        return f"lower trainer.learning_rate ({self._training.learning_rate:g})"

    def discard_state(self) -> None:
        """Delete the saved state: the operation has ended and must not be resumed."""
        if self._state is not None:
            self._state.discard()

    @property
    def _shared_dtype(self) -> torch.dtype:
        """Type of embedding and head. Nothing rounds them: checkpoints and servers have them in bfloat16.

        On a GPU it is that of matrix products, which can't mix two types; on a CPU autocast converts.
        """
        return compute_dtype(self._device, self._training.precision) if self._device.type == "cuda" else torch.float32

    def _save(self, trainer: MicroTrainer, mix: WorkloadMix) -> Generator[None, None, float]:
        """Save the state in parts; return the seconds that it took. A disk that is full or fails does not stop training."""
        if self._state is None:
            return 0.0
        progress, began_s = self._progress, self._working_s()
        figures = {name: getattr(progress, name) for name in _SAVED}
        figures |= {"carried_s": self._waited_s() + progress.train_seconds}
        facts = {"progress": figures, "mix": mix.state(), "waited_then_s": self._waited_then_s}
        progress.is_saving = True
        try:
            yield
            yield from self._state.save(trainer.state(), facts)
        except OSError as error:
            log.log(logging.DEBUG if self._has_warned else logging.WARNING, "the state can't be saved", error=str(error))
            self._has_warned = True
        finally:
            progress.is_saving = False
        return self._working_s() - began_s

    def _take_up(self, trainer: MicroTrainer, mix: WorkloadMix) -> None:
        found = self._state.load() if self._state is not None else None
        if found is None:
            return
        tensors, facts = found
        trainer.load_state(tensors)
        mix.load_state(facts["mix"])
        for name, value in facts["progress"].items():
            setattr(self._progress, name, value)
        self._waited_then_s = facts["waited_then_s"]
        log.info("training goes on", operation_id=self._request.operation_id, steps=self._progress.steps)
