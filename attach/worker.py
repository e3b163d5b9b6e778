"""What honed does in vLLM's workers: `--worker-extension-cls honed.attach.worker.HonedWorkerExtension`.

vLLM mixes the class into its own worker class; every method is called through `collective_rpc`, on the worker's main thread,
between two steps. Nothing happens before `honed_attach`.
"""

from __future__ import annotations

import logging
import stat
from pathlib import Path
from typing import Any

import torch

from honed.attach.capture import Capturer
from honed.attach.context_backlog import skip_idle_drafts
from honed.attach.draft_ids import DraftIds
from honed.attach.ring import RingWriter
from honed.attach.runner import Runner, runner_of
from honed.attach.swap import Swapper

logger = logging.getLogger("honed.attach")


class _WorkerSide:
    """One rank's capture, swap and draft token ids."""

    def __init__(self, worker: Any, settings: dict[str, Any]) -> None:
        self.runner: Runner = runner_of(worker.model_runner)
        model = self.runner.draft_model
        self.swapper = Swapper(model, torch.device(worker.device))
        self.capturer: Capturer | None = None
        self.num_errors = 0
        self.runner.count_steps()
        skip_idle_drafts(self.runner, torch.device(worker.device))
        self.draft_ids = self._draft_ids(worker)
        if settings["ring_path"] and worker.rank == 0:
            path, ring_bytes, kind = Path(settings["ring_path"]), settings["ring_bytes"], settings["feature_kind"]
            norm = model.model.hidden_norm
            self.capturer = Capturer(
                lambda size, dtype: RingWriter(path, ring_bytes, size, dtype, kind, _ring_mode(path)),
                lambda: (norm.weight.data, norm.variance_epsilon),
                kind,
                bytes.fromhex(settings["secret"]),
            )
            self.runner.wrap(self.capturer.on_schedule, self.capturer.on_step, self._on_error)

    def _draft_ids(self, worker: Any) -> DraftIds | None:
        """For the rank whose output the scheduler reads. V1 tells its scheduler, unless that runs ahead: unknown then."""
        if self.runner.name != "v2" or worker.rank != 0:
            return None
        try:
            made = DraftIds(worker.model_runner, worker.vllm_config.max_concurrent_batches)
        except (TypeError, AttributeError) as error:
            logger.warning("honed: draft token ids are not logged: %s", error)
            return None
        made.wrap(self._on_error)
        return made

    def _on_error(self, where: str) -> None:
        self.num_errors += 1
        if self.num_errors == 1:
            logger.warning("honed: %s failed; vLLM is not affected, what it would have brought is lost", where, exc_info=True)


def _ring_mode(path: Path) -> int:
    """The ring is its owner's alone, unless an administrator made the folder of the engines' folders belong to a group.

    A setgid folder says so: then the trainer may run as another user of that group (it writes when samples are purged).
    """
    shared = path.parent.parent
    return 0o660 if shared.is_dir() and shared.stat().st_mode & stat.S_ISGID else 0o600


class HonedWorkerExtension:
    """Methods added to vLLM's worker; all are prefixed `honed_`."""

    _honed_side: _WorkerSide | None = None

    def honed_attach(self, settings: dict[str, Any]) -> dict[str, str]:
        """Look at the model runner; {"limit": why} when capture and swap can't be had here."""
        try:
            self._honed_side = _WorkerSide(self, settings)
        except Exception as error:
            return {"limit": f"capture and swap are off: {error}"}
        return {"runner": self._honed_side.runner.name}

    def honed_capture(self, share: float, drafter_version: str) -> dict[str, float]:
        """Set the share of requests to capture; returns what was captured so far."""
        side = self._honed_side
        if side is None or side.capturer is None:
            return {}
        side.capturer.set_share(share, drafter_version)
        return {"rows": side.capturer.num_rows, "bytes": side.capturer.num_bytes, "errors": side.num_errors}

    def honed_draft_ids(self, is_wanted: bool) -> bool:
        """Bring the ids of verified drafts to the host, where the scheduler isn't told them; whether that is done."""
        side = self._honed_side
        if side is None or side.draft_ids is None:
            return False
        side.draft_ids.is_on = is_wanted
        return is_wanted

    def honed_stage(self, wanted: list[tuple[str, str, str]]) -> str:
        """Begin to stage versions, each (version, path, sha256); "" when they are there already, else "staging"."""
        return self._honed_required().swapper.stage(wanted)

    def honed_staged(self, version: str) -> str:
        """ "" ready, "staging", or what went wrong."""
        return self._honed_required().swapper.staged(version)

    def honed_apply(self, version: str, is_held_on: bool) -> dict[str, float]:
        """Copy the staged version in place; `is_held_on`: what is staged stays so.

        Returns:
            copy_ms, and `step`: how many steps this rank has begun, which must be the same on all ranks.
        """
        side = self._honed_required()
        figures = side.swapper.apply(version, is_held_on) | {"step": float(side.runner.num_steps)}
        if side.capturer is not None:
            side.capturer.set_share(side.capturer.share, version)
        return figures

    def honed_checksum(self) -> str:
        """SHA-256 of the live drafter weights, put together from all ranks' parts."""
        return self._honed_required().swapper.checksum()

    def _honed_required(self) -> _WorkerSide:
        if self._honed_side is None:
            raise RuntimeError("honed is not attached to this worker")
        return self._honed_side
