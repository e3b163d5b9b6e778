"""honed's part in vLLM's workers: `--worker-extension-cls honed.attach.worker.HonedWorkerExtension`.

vLLM mixes the class into its own worker class. It calls every method through `collective_rpc`, on the worker's main thread,
between two steps. Nothing happens before `honed_attach`.
"""

from __future__ import annotations

import functools
import logging
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from honed.adapt.steps.vllm_costs import Curve
from honed.attach.capture.capture import Capturer
from honed.attach.capture.ring_writer import RingWriter
from honed.attach.contract.model_files import content_crc, folder_of
from honed.attach.engine.engine_hook import RANK_ERROR
from honed.attach.engine.graphs import captured, padded_to_with_trees
from honed.attach.runner.fed_verification import FedVerification
from honed.attach.runner.idle_drafts import skip_idle_drafts
from honed.attach.runner.runner import Runner, runner_of
from honed.attach.runner.unfit_drafts import UnfitDrafts
from honed.attach.runner.verified_drafts import VerifiedDrafts
from honed.attach.swap.arriving_weights import take_updates
from honed.attach.swap.deep_sleep import keep_through_sleep
from honed.attach.swap.device_reserve import DeviceReserve
from honed.attach.swap.swap import Swapper
from honed.attach.trees.runner_v1 import TreesV1
from honed.attach.trees.runner_v2 import TreesV2
from honed.attach.trees.slots import block_tokens_of

logger = logging.getLogger("honed.attach")
ROW_IDS_BYTES = 36
"""Bytes of a captured row beside its features: its number, token, position and the token after it, and padding."""
P = ParamSpec("P")
R = TypeVar("R")


class _Errors:
    """Counts errors inside vLLM's steps, and logs the first one of each place."""

    def __init__(self) -> None:
        self.count = 0
        self._logged: set[str] = set()

    def note(self, where: str) -> None:
        """Count the exception that is being handled."""
        self.count += 1
        if where not in self._logged:
            self._logged.add(where)
            logger.warning("honed: %s failed; vLLM is not affected, but the result of this call is lost", where, exc_info=True)


class _WorkerSide:
    """One rank's capture and swap. Nothing in vLLM changes before `begin`."""

    def __init__(self, worker: Any, settings: dict[str, Any], errors: _Errors, reserve: DeviceReserve) -> None:
        self.runner: Runner = runner_of(worker.model_runner)
        self._worker, self._errors = worker, errors
        model = self.runner.draft_model
        self.swapper = Swapper(model, torch.device(worker.device), reserve)
        self.capturer: Capturer | None = None
        self._step_bytes = 0
        if settings["ring_path"] and worker.rank == 0:
            path, ring_bytes, kind = Path(settings["ring_path"]), settings["ring_bytes"], settings["feature_kind"]
            norm = getattr(model.model, "hidden_norm", None)
            are_drafts_drawn = worker.vllm_config.speculative_config.draft_sample_method == "probabilistic"
            self.capturer = Capturer(
                lambda size, dtype: RingWriter(path, ring_bytes, size, dtype, kind, _ring_mode(path), self._target()),
                None if norm is None else lambda: (norm.weight.data, norm.variance_epsilon),
                kind,
                bytes.fromhex(settings["secret"]),
                None if are_drafts_drawn else self.runner.top_tokens,
            )
            self.runner.looks_first = norm is None or kind == "layers"
            most_rows = worker.vllm_config.scheduler_config.max_num_batched_tokens
            self._step_bytes = most_rows * (self.swapper.row_bytes(kind) + ROW_IDS_BYTES)

    def begin(self) -> None:
        """Take part in the runner's steps from now on, on all ranks alike."""
        if hasattr(self.runner.draft_model.model, "hidden_norm"):  # of DFlash's kind; vLLM loads others in place itself
            take_updates(self._worker, self.swapper)
        keep_through_sleep(self._worker, self.runner.draft_model, self.swapper.live_parts, self._errors.note)
        self.runner.count_steps()
        skip_idle_drafts(self.runner, torch.device(self._worker.device))
        if self.capturer is not None:
            self.capturer.prepare(torch.device(self._worker.device), self._step_bytes)
            self.runner.wrap(self.capturer.on_schedule, self.capturer.on_step, self._errors.note)

    def _target(self) -> int:
        """What tells the target's weights from others: its files. An update in place is answered by the daemon's settings."""
        config = self._worker.vllm_config
        return content_crc(folder_of(config.model_config, config.load_config))


def _verified_drafts(worker: Any, errors: _Errors) -> VerifiedDrafts | None:
    """Made on the rank whose output the scheduler reads. V1 tells its scheduler the drafts, unless that runs ahead."""
    parallel = worker.vllm_config.parallel_config
    told_by = parallel.world_size - parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    if not worker.vllm_config.use_v2_model_runner or worker.rank != told_by:
        return None
    try:
        made = VerifiedDrafts(worker.model_runner, worker.vllm_config.max_concurrent_batches)
    except (TypeError, AttributeError) as error:
        logger.warning("honed: verified drafts on the device are not logged: %s", error)
        return None
    made.wrap(errors.note)
    return made


def _ring_mode(path: Path) -> int:
    """Mode of the ring's file: its owner's alone, or its group's where the folder of the engines' folders is setgid.

    An administrator makes it so. The trainer may then run as another user of that group; it writes when samples are purged.
    """
    shared = path.parent.parent
    return 0o660 if shared.is_dir() and shared.stat().st_mode & stat.S_ISGID else 0o600


def _answering(method: Callable[P, R]) -> Callable[P, R | dict[str, str]]:
    """Make a method return its error instead of raising it: see `engine_hook.RANK_ERROR`."""

    @functools.wraps(method)
    def answer(*args: P.args, **kwargs: P.kwargs) -> R | dict[str, str]:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            return {RANK_ERROR: f"{type(error).__name__}: {error}"}

    return answer


class HonedWorkerExtension:
    """Methods added to vLLM's worker; all are prefixed `honed_`, and none raises."""

    _honed_side: _WorkerSide | None = None
    _honed_drafts: VerifiedDrafts | None = None
    _honed_fed: FedVerification | None = None
    _honed_trees: TreesV1 | TreesV2 | None = None
    _honed_reserve: DeviceReserve | None = None

    @_answering
    def honed_attach(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Inspect the model runner.

        Returns:
            graphs: `Captured`'s fields; dropped: (capabilities, reason) for each wanted capability that isn't possible here;
            gpu, reserve: see `DeviceReserve`.
        """
        dropped: list[tuple[tuple[str, ...], str]] = []
        runner = self.model_runner  # type: ignore[attr-defined]
        self._honed_errors = _Errors()
        self._honed_reserve = DeviceReserve(self)
        self._honed_drafts = _verified_drafts(self, self._honed_errors)
        if not runner.vllm_config.use_v2_model_runner:
            UnfitDrafts(runner).wrap(self._honed_errors.note)
        if "estimates" in settings["wanted"]:
            try:
                self._honed_fed = FedVerification(runner)
                self._honed_fed.wrap(self._honed_errors.note)
            except (TypeError, AttributeError) as error:
                dropped.append((("estimates",), f"estimates are off: {error}"))
        try:
            if "swap" in settings["wanted"]:
                self._honed_side = _WorkerSide(self, settings, self._honed_errors, self._honed_reserve)
        except Exception as error:
            dropped.append((("capture", "swap"), f"capture and swap are off: {error}"))
        reserve = self._honed_reserve
        return {"graphs": tuple(captured(runner)), "dropped": dropped, "gpu": reserve.gpu, "reserve": reserve.num_bytes()}

    @_answering
    def honed_begin(self) -> None:
        """Begin, once every rank is ready for capture and swap.

        Ranks wait for each other in the draft pass: if only some of them left it out, the engine would hang.
        """
        self._honed_required().begin()

    @_answering
    def honed_trees(self, may_have_graphs: bool) -> tuple[str, list[int]]:
        """Verify draft trees from the next step on.

        Returns:
            "" or the reason why this engine can't, and the token counts of `padded_to_with_trees`.

        Called last: the trees' part of a draft pass lies around the capture's, which sees the rows of chains.
        """
        runner = self.model_runner  # type: ignore[attr-defined]
        note, side = self._honed_errors.note, self._honed_side
        tell = side.runner.top_tokens.reorder if side is not None else lambda order: None
        try:
            if runner.vllm_config.use_v2_model_runner:
                self._honed_trees = TreesV2(runner, note, tell, may_have_graphs)
            else:
                self._honed_trees = TreesV1(runner, block_tokens_of(runner.speculative_config), note, tell)
            self._honed_trees.wrap()
            return "", padded_to_with_trees(runner)
        except (TypeError, AttributeError) as error:
            return str(error), []
        except Exception as error:  # it must not take capture and swap away
            note("attaching trees")
            return f"{type(error).__name__}: {error}", []

    @_answering
    def honed_capture(self, share: float, drafter_version: str) -> dict[str, float]:
        """Set the share of requests to capture.

        Returns:
            what was captured so far, what is reserved on the device, and the errors that were caught.
        """
        side = self._honed_side
        staged = side.swapper.most_staged_bytes if side is not None else 0
        reserve = self._honed_reserve.num_bytes(staged) if self._honed_reserve is not None else 0
        figures: dict[str, float] = {"reserve": reserve, "errors": self._honed_errors.count}
        if side is None or side.capturer is None:
            return figures
        side.capturer.set_share(share, drafter_version)
        writer = side.capturer.writer
        return figures | {
            "rows": writer.num_rows,
            "skipped": writer.num_skipped,
            "nonfinite": writer.num_nonfinite,
            "media": side.capturer.num_media,
        }

    @_answering
    def honed_new_target(self) -> None:
        """Note that the target's weights were updated in place."""
        side = self._honed_side
        if side is not None and side.capturer is not None:
            side.capturer.begin_anew()

    @_answering
    def honed_draft_ids(self, is_wanted: bool) -> bool:
        """Copy the ids of verified drafts to the host where the scheduler doesn't know them; return whether that is on."""
        if self._honed_drafts is None:
            return False
        self._honed_drafts.are_ids_wanted = is_wanted
        return is_wanted

    @_answering
    def honed_feed(self, is_on: bool, draft: Curve, verify: Curve) -> None:
        """Switch the feeding of vLLM's adaptive verification on or off; set these costs, if there are any."""
        if self._honed_fed is not None:
            self._honed_fed.turn(is_on)
            if draft and verify:
                self._honed_fed.set_costs(draft, verify)

    @_answering
    def honed_stage(self, wanted: list[tuple[str, str, str]]) -> str:
        """Begin to stage versions, each (version, path, sha256); return "" when all are staged already, else "staging"."""
        return self._honed_required().swapper.stage(wanted)

    @_answering
    def honed_staged(self, version: str) -> str:
        """Return "" when staged, "staging", or the error."""
        return self._honed_required().swapper.staged(version)

    @_answering
    def honed_apply(self, version: str, is_held_on: bool) -> dict[str, float]:
        """Copy the staged version in place; `is_held_on` keeps it staged.

        Returns:
            copy_ms, and `step`: the number of steps this rank has begun; it must be equal on all ranks.
        """
        side = self._honed_required()
        figures = side.swapper.apply(version, is_held_on) | {"step": float(side.runner.num_steps)}
        if side.capturer is not None:
            side.capturer.label(version)
        return figures

    @_answering
    def honed_rest(self, is_asleep: bool) -> None:
        """Note that vLLM falls asleep, or that all of its memory is back: see `Swapper.rest`."""
        if self._honed_side is not None:
            self._honed_side.swapper.rest(is_asleep)

    @_answering
    def honed_begin_checksum(self) -> None:
        """Begin a checksum of the live drafter weights; see `Swapper.begin_checksum`."""
        self._honed_required().swapper.begin_checksum()

    @_answering
    def honed_checksum(self, part: int) -> tuple[str, bool, int]:
        """SHA-256 of the live drafter weights, joined from all ranks' parts, one tensor a call; see `Swapper.checksum`."""
        return self._honed_required().swapper.checksum(part)

    def _honed_required(self) -> _WorkerSide:
        if self._honed_side is None:
            raise RuntimeError("honed is not attached to this worker")
        return self._honed_side
