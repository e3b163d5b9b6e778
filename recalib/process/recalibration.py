"""One operation from request to result, in units so small that serving never waits for more than one.

    collecting   until there are enough rows and enough held-out sessions of the workloads that must gain
    training     micro-steps, some blocks at a time, until max_steps, max_seconds, or half of the time left for the operation
    gating       parent and candidate on the same held-out sessions, some blocks at a time
    (writing)    the candidate goes to the registry if it passes the gate

The candidate's weights are rounded to their stored type before it is judged: what is judged is what will serve. Nothing reaches
the registry before the gate has passed, so a failed or cancelled operation leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import structlog
import torch

from honed.adapt.protocol import wire
from honed.adapt.protocol.fields import MAX_TEXT_CHARS
from honed.recalib.config.engine_gpus import EngineGpus
from honed.recalib.config.memory import MemoryBudgetError, in_words
from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.drafter.checkpoint import CheckpointError, save_drafter
from honed.recalib.drafter.drafter import Drafter
from honed.recalib.gate.evaluate import SessionFigures, evaluate_in_parts
from honed.recalib.gate.gate import GateSettings, judge
from honed.recalib.process.contexts import contexts_of
from honed.recalib.registry.manifest import WEIGHTS, Figures
from honed.recalib.registry.registry import Manifest, Registry, RegistryError
from honed.recalib.registry.tensor_file import read_tensor_entries
from honed.recalib.samples.selection import Selection
from honed.recalib.samples.stretch import Stretch
from honed.recalib.samples.traffic import Feed, JointFeed
from honed.recalib.training.progress import OperationError, Progress, Stage
from honed.recalib.training.training_run import TrainingRun

log = structlog.get_logger("honed.trainer")

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Recalibration:
    """An operation in progress; `advance` does one unit of it.

    Args:
        monotonic: for deadlines; stands still while training is paused.
        working_s: clock that stands still while a unit is held up; default: `monotonic`.
        engines: () -> the engines on this machine.
    """

    def __init__(
        self,
        request: wire.TrainRequest,
        settings: TrainerSettings,
        gate: GateSettings,
        registry: Registry,
        feed: Feed | JointFeed,
        monotonic: Callable[[], float] = time.monotonic,
        state_dir: Path | None = None,
        working_s: Callable[[], float] | None = None,
        engines: Callable[[], Sequence[EngineGpus]] = tuple,
    ) -> None:
        self.request = request
        self.progress = Progress(max_steps=request.max_steps or settings.max_steps)
        self.result: wire.TrainResult | None = None
        self._settings, self._gate, self._registry, self._feed = settings, gate, registry, feed
        self._monotonic, self._working_s, self._state_dir = monotonic, working_s or monotonic, state_dir
        self._engines, self._context_of = engines, contexts_of(registry)
        self._began_s = monotonic()
        self._run: TrainingRun | None = None
        self._units = self._work()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request came, by the given clock."""
        return self._monotonic() - self._began_s

    @property
    def _waited_s(self) -> float:
        """Seconds outside training."""
        return self.progress.carried_s + self.elapsed_s - self.progress.train_seconds

    @property
    def needs_device(self) -> bool:
        """Return whether the next unit is heavy, and so must wait until the engine is idle."""
        return self.progress.stage != "collecting" and not self.progress.is_saving

    @property
    def device(self) -> torch.device | None:
        """Return the device that the next unit needs, if any."""
        return self.held_device if self.needs_device else None

    @property
    def held_device(self) -> torch.device | None:
        """Return the device that has the training's memory, also while the state is being saved; None before the training."""
        return self._run.device if self._run is not None and self.progress.stage != "collecting" else None

    def advance(self) -> None:
        """Do one unit; after the last, `result` is set. Failures become a result and are never raised."""
        if self.result is not None:
            return
        try:
            self.check_deadline()
            self.progress.stage = next(self._units)
        except StopIteration as end:
            self._conclude(end.value)
        except (OperationError, MemoryBudgetError, RegistryError, CheckpointError) as error:
            self._end(str(error))
        except torch.OutOfMemoryError as error:
            log.error("out of memory", operation_id=self.request.operation_id, error=str(error))
            self._end(self._out_of_memory())
        except Exception as error:  # the boundary: after any failure the daemon gets an answer and the process continues
            log.exception("operation failed", operation_id=self.request.operation_id)
            self._end(f"{type(error).__name__}: {error}".splitlines()[0])

    def keep_waiting(self) -> None:
        """Do nothing, but check the deadline; called while no unit may run."""
        try:
            self.check_deadline()
        except OperationError as error:
            self._end(str(error))

    def check_deadline(self) -> None:
        """Raise OperationError when the operation takes too long."""
        trained_s, most_s = self.progress.train_seconds, self._settings.deadline_s
        if self._waited_s > most_s:
            engines = "the engines on its device (trainer.yields_to) are rarely idle at the same time"
            cure = "try again at a quieter time"
            if self.progress.stage == "gating":  # whose computing counts, too
                rows = self._settings.max_gate_rows
                cure = f"judging {rows} held-out rows of a workload may take long, so lower trainer.max_gate_rows"
            raise OperationError(
                f"not done after {self.elapsed_s:.0f} s, of which {trained_s:.0f} s were spent training: {engines}; {cure}, or "
                f"raise trainer.deadline_s ({most_s:.0f} s outside training)"
            )

    def cancel(self, reason: str) -> None:
        """Stop between two units; nothing is kept."""
        if self.result is None:
            self._units.close()
            self._end(reason)

    # --- the work -----------------------------------------------------------------------------------------------------

    def _work(self) -> Generator[Stage, None, wire.TrainResult]:
        """Each `yield` names the kind of the next unit; the caller decides when it may run."""
        parent = self._registry.verify(self.request.parent_version)
        parent_dir = self._registry.path(parent.version)
        run = self._run = TrainingRun(
            self.request,
            self._settings,
            parent_dir,
            self._feed,
            self.progress,
            self._working_s,
            self._state_dir,
            lambda: self._waited_s,
            self._engines,
        )
        request, why_unusable = self.request, self._why_unusable(parent, run.vocab_size)
        samples = Selection(self._feed.store, lambda one: not why_unusable(one), request.workloads, request.since_s)
        lost_then = self._feed.num_lost()
        run.check_features()
        run.check_memory()
        while missing := self._missing(samples):
            if self.elapsed_s > self._settings.collect_s:
                unused = self._unused(why_unusable, self._feed.num_lost() - lost_then)
                raise OperationError(f"too few samples after {self.elapsed_s:.0f} s: {missing}; {unused}{_COLLECT_CURE}")
            yield "collecting"
            run.check_features()
        yield "training"
        run.check_memory()  # memory that was free may be in use now
        run.load_head()
        yield "training"
        drafter = run.load_drafter()
        yield "training"
        before_training = run.load_drafter().requires_grad_(False)
        for _ in run.steps(drafter, before_training, samples):
            yield "training"
        held_out = [s for w in samples.workloads() for s in self._held_out(w, samples)]
        before = yield from self._evaluate(run, before_training, held_out)
        trained = [parameter.detach().clone() for parameter in drafter.parameters()]
        for blend in self._settings.blends:
            self.progress.blend = blend
            _blend(drafter, before_training, trained, blend)
            _round_weights(drafter, _stored_dtype(parent_dir))
            yield "gating"
            after = yield from self._evaluate(run, drafter, held_out)
            verdict = judge(before, after, self.request.workloads, self._gate, self.request.error_share)
            self.progress.gate = verdict.figures
            if verdict.passed or not verdict.has_gained:
                break
        if not verdict.passed:
            run.check_result(verdict.figures, self._gate.min_sessions)
            return self._result(ok=True, error="gate: " + "; ".join(verdict.reasons))
        if self.request.dry_run:
            return self._result(ok=True)
        yield "gating"
        return self._result(ok=True, version=self._write(drafter, parent, parent_dir, samples).version)

    def _evaluate(
        self, run: TrainingRun, drafter: Drafter, held_out: list[Stretch]
    ) -> Generator[Stage, None, list[SessionFigures]]:
        """Compute the figures of each stretch, in the stretches' order."""
        figures: list[SessionFigures] = []
        pace = run.pace()
        for stretch in held_out:
            yield "gating"
            # At most as many anchors at once as in a micro-step of training, which also keeps every layer's activations.
            most = 4 * self._settings.anchors_per_micro_step
            parts = evaluate_in_parts(drafter, run.sample(stretch), drafter.config.num_draft_tokens, most, pace=pace)
            while True:
                try:
                    next(parts)
                except StopIteration as end:
                    figures += [end.value] if end.value is not None else []
                    break
                yield "gating"
        return figures

    def _write(self, drafter: Drafter, parent: Manifest, parent_dir: Path, samples: Selection) -> Manifest:
        stretches = [s for w in samples.workloads() for s in samples.stretches(w, False)]
        rows: Counter[str] = Counter()
        for stretch in stretches:
            rows[stretch.workload] += stretch.num_rows
        window = {
            "rows": dict(rows),
            "sessions": len({s.session for s in stretches}),
            "digest": self._feed.store.digest(stretches),
        }
        progress = self.progress
        return self._registry.create(
            lambda folder: _save(drafter, folder, parent_dir),
            parent=parent.version,
            scope=self.request.scope,
            figures=Figures(
                gate=list(progress.gate),
                blend=progress.blend,
                steps=progress.steps,
                tokens=progress.tokens,
                loss=progress.loss,
                train_seconds=progress.train_seconds,
            ),
            data_window=window,
            target_path=self.request.target_path,
            vllm_version=self.request.vllm_version,
            note=self.request.reason,
        )

    # --- samples ------------------------------------------------------------------------------------------------------

    def _why_unusable(self, parent: Manifest, vocab_size: int) -> Callable[[Stretch], str]:
        """Return what says why a stretch can't be used, "" if it can.

        Fused features are meaningful only to drafters with the same `fc` and `hidden_norm` as the one that made them, others to
        those that read the same layers. That one may have been removed from the registry since.

        A token outside the vocabulary would end the training, and on a GPU the process. An answer of one token has no draft.
        """

        def why(stretch: Stretch) -> str:
            made_by, is_fused = stretch.drafter_version, self._feed.is_fused
            wanted = self._context_of(parent.version, is_fused)
            if made_by and wanted not in (stretch.context, self._context_of(made_by, is_fused)):
                return "answers with another drafter's features"
            if stretch.num_judged < 2:
                return "answers of one token"
            highest = max(ids.max(initial=0) for ids in (stretch.token_ids, stretch.likely) if ids is not None)
            return "answers with tokens outside the vocabulary" if highest >= vocab_size else ""

        return why

    def _unused(self, why_unusable: Callable[[Stretch], str], lost: Counter[str]) -> str:
        """List what couldn't be used and why, with the number of each; "" if there is nothing.

        Args:
            lost: what was lost or refused since the operation began.
        """
        found, store = +lost, self._feed.store
        for workload in self.request.workloads or store.workloads():
            for stretch in (*store.stretches(workload, False), *store.stretches(workload, True)):
                if why := why_unusable(stretch):
                    found[why] += 1
                elif stretch.earliest_s < self.request.since_s:
                    found["answers from before the drift"] += 1
        return f"not used: {', '.join(f'{count} {why}' for why, count in found.items())}; " if found else ""

    def _missing(self, samples: Selection) -> str:
        """List what is still needed before training can begin; "" if nothing is."""
        wanted = self.request.workloads or samples.workloads()
        lacks = []
        tokens = sum(s.num_judged for w in wanted for s in samples.stretches(w, False))
        if tokens < self._settings.min_training_tokens:
            lacks.append(f"{tokens} of {self._settings.min_training_tokens} emitted tokens")
        held = {w: {s.session for s in self._held_out(w, samples)} for w in wanted}
        if not self.request.workloads:
            held = {"": set().union(*held.values())}
        for workload, found in held.items():
            if (sessions := len(found)) < self._sessions_needed:
                named = f" of workload {workload!r}" if workload else ""
                lacks.append(f"{sessions} of {self._sessions_needed} held-out sessions{named}")
        return ", ".join(lacks)

    def _held_out(self, workload: str, samples: Selection) -> list[Stretch]:
        """Choose whole held-out sessions of a workload, in an order independent of their content.

        Their judged rows stay within the row limit, but there are always enough sessions to judge a gain.
        """
        sessions: dict[str, list[Stretch]] = {}
        for stretch in samples.stretches(workload, True):
            sessions.setdefault(stretch.session, []).append(stretch)
        chosen: list[Stretch] = []
        num_rows = 0
        in_order = sorted(sessions, key=lambda s: hashlib.blake2b(s.encode(errors="replace")).digest())
        for number, session in enumerate(in_order):
            if num_rows >= self._settings.max_gate_rows and number >= self._sessions_needed:
                break
            chosen += sessions[session]
            num_rows += sum(stretch.num_judged for stretch in sessions[session])
        return chosen

    @property
    def _sessions_needed(self) -> int:
        return self._gate.sessions_needed(self.request.error_share)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _out_of_memory(self) -> str:
        settings, where = self._settings, self._run.device if self._run is not None else "the device"
        blocks, gathered = settings.anchors_per_micro_step, settings.micro_steps_per_update
        cures = [] if settings.gradient_checkpointing else ["set trainer.gradient_checkpointing = true"]
        if blocks > 1:
            cures.append(
                f"set trainer.anchors_per_micro_step = {blocks // 2} and trainer.micro_steps_per_update = {2 * gathered}"
            )
        cures.append("train on another device (trainer.device)")
        return (
            f"{where} ran out of memory: {in_words(self.progress.memory_bytes)} were estimated, and others have taken what was "
            f"free, or the estimate is too low; {', or '.join(cures)}"
        )

    def _end(self, error: str) -> None:
        self._conclude(self._result(ok=False, error=error))

    def _conclude(self, result: wire.TrainResult) -> None:
        self._units.close()  # after a deadline it is suspended, and holds the weights
        self.result = result
        if self._run is not None:
            self._run.discard_state()
            self._run = None  # with the target's tensors

    def _result(self, *, ok: bool, version: str = "", error: str = "") -> wire.TrainResult:
        progress = self.progress
        return wire.TrainResult(
            operation_id=self.request.operation_id,
            ok=ok,
            version=version,
            error=error[:MAX_TEXT_CHARS],
            gate=progress.gate,
            steps=progress.steps,
            tokens=progress.tokens,
            train_seconds=progress.train_seconds,
            elapsed_s=self.elapsed_s,
            dropped_updates=progress.dropped_updates,
            is_cut_short=progress.is_cut_short,
        )


_COLLECT_CURE = "every request is captured meanwhile: send more such traffic, or wait for it longer (trainer.collect_s)"


def _stored_dtype(folder: Path) -> torch.dtype:
    """Return the type of most values of a checkpoint."""
    sizes: Counter[str] = Counter()
    for entry in read_tensor_entries(folder / WEIGHTS):
        sizes[entry.dtype] += entry.end - entry.begin
    name = sizes.most_common(1)[0][0]
    if name not in _DTYPES:
        raise OperationError(f"{folder / WEIGHTS} is stored as {name}: train from a {', '.join(_DTYPES)} checkpoint")
    return _DTYPES[name]


@torch.no_grad()
def _blend(drafter: Drafter, parent: Drafter, trained: list[torch.Tensor], share: float) -> None:
    """drafter = parent + share * (trained - parent): along it forgetting falls faster than the gain. arXiv 2109.01903."""
    for parameter, old, new in zip(drafter.parameters(), parent.parameters(), trained, strict=True):
        parameter.copy_(old.lerp(new, share))


@torch.no_grad()
def _round_weights(drafter: Drafter, dtype: torch.dtype) -> None:
    for parameter in drafter.parameters():
        parameter.copy_(parameter.to(dtype).to(parameter.dtype))


def _save(drafter: Drafter, folder: Path, parent_dir: Path) -> None:
    save_drafter(drafter, folder, parent_dir, _stored_dtype(parent_dir))
