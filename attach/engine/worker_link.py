"""Calls from the engine's thread to the worker extension on every rank: attach, set the capture share, run commands."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from honed.adapt.steps.vllm_costs import Curve, are_alike
from honed.attach.contract.compatibility import Findings
from honed.attach.engine import engine_hook
from honed.attach.engine.environment import AttachSettings
from honed.attach.engine.graphs import Captured
from honed.attach.engine.guard import NoAnswer

logger = logging.getLogger("honed.attach")

EXTENSION = "honed.attach.worker.HonedWorkerExtension"
MOST_AGE_S = 60.0
"""The workers are asked anew when what they told last is older."""


class WorkerLink:
    """Requests to the workers; all methods but `wake` run on the engine's thread.

    Args:
        secret: key of this boot's request keys.
        are_drafts_on_device: vLLM's scheduler doesn't get the drafts (V2).
        has_extension: the workers have honed's methods.
        has_drafts: the engine speculates. Its workers tell which drafts nobody drafted, and may know their ids.
    """

    def __init__(
        self,
        settings: AttachSettings,
        findings: Findings,
        secret: bytes,
        are_drafts_on_device: bool = False,
        has_extension: bool = True,
        has_drafts: bool = True,
    ) -> None:
        self.findings = findings
        self._settings = settings
        self._secret = secret
        self._are_drafts_on_device = are_drafts_on_device and findings.is_known
        self._has_drafts = has_drafts and findings.is_known
        self._engine = engine_hook.current()
        self._has_extension = has_extension
        self._is_attached = False
        self._has_answered = False
        """Whether the workers were attached to."""
        self._told_s = 0.0
        """Time of their last figures."""
        self._is_wake_pending = False
        self._share = -1.0
        self._are_ids_wanted = False
        self._counted_step = 0
        self._is_feeding = False
        self._fed_curves: tuple[Curve, Curve] | None = None
        self.graphs = self._graphs_of_chains = Captured([], [], [])
        self.captured: dict[str, float] = {}
        """Rows, skipped and non-finite rows, and requests with media, as of the last call."""
        self.num_errors = 0
        """Errors that honed caught in all workers, as of the last call."""
        self._gpus: list[str] = []
        """Each rank's GPU; "": unknown, or it has none."""
        self.reserves: dict[str, int] | None = None
        """Bytes that vLLM will still want of each GPU, as of the last call; None: not all of the GPUs are known."""

    @property
    def can_capture(self) -> bool:
        """Whether this engine can deliver samples."""
        return "capture" in self.findings.capabilities and self._settings.is_capture_on

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Run a method of the worker extension between two steps; one result a rank.

        Raises:
            RuntimeError: it can't be run.
            NoAnswer: see `EngineHook.rpc`.
        """
        if self._engine is None or not self._can_ask:
            raise RuntimeError(f"{self._why_mute}: capture and swap are off")
        return self._engine.rpc(method, *args)

    def skip_draft_fetch(self, is_needed: Callable[[], bool]) -> None:
        """Don't fetch drafts after steps without any."""
        if self._engine is not None:
            self._engine.skip_draft_fetch(is_needed)

    def watch_sleep(self, on_sleep: Callable[[], None], on_wake: Callable[[bool], None]) -> None:
        """See `engine_hook.EngineHook.watch_sleep`; does nothing on an unsupported release."""
        if self._engine is not None and self.findings.is_known:
            self._engine.watch_sleep(on_sleep, on_wake)

    def watch_weights(self, on_begin: Callable[[], None], on_change: Callable[[bool], None], is_draft_in_place: bool) -> None:
        """See `engine_hook.EngineHook.watch_weights`; does nothing on an unsupported release."""
        if self._engine is not None and self.findings.is_known:
            self._engine.watch_weights(on_begin, on_change, is_draft_in_place)

    @property
    def is_attached(self) -> bool:
        """Whether `attach` was called."""
        return self._is_attached

    def attach(self) -> bool:
        """Once: let every rank inspect its model runner. Drop what it can't do from the findings, with the reason.

        Returns:
            whether more is known about the engine than before.
        """
        if self._is_attached:
            return False
        self._is_attached = True
        with contextlib.suppress(OSError):  # an earlier start's prompts
            self._settings.ring_path.unlink(missing_ok=True)
        before = self.findings, self.graphs
        self._attach()
        return (self.findings, self.graphs) != before

    def _attach(self) -> None:
        of_workers = ("capture", "swap", "estimates")
        wanted = [name for name in of_workers if name in self.findings.capabilities]
        if wanted and not self._can_ask:
            self._drop(of_workers, f"{' and '.join(wanted)} are off: {self._why_mute}")
        if self._settings.wants_trees and not self._can_ask:
            self._drop((), f"trees are off: {self._why_mute}")
        if not self._can_ask or not (self._has_drafts or self._settings.wants_trees):
            return
        settings = {
            "ring_path": str(self._settings.ring_path) if self.can_capture else "",
            "ring_bytes": self._settings.ring_bytes,
            "feature_kind": self._settings.feature_kind,
            "secret": self._secret.hex(),
            "wanted": wanted,
        }
        try:
            answers: list[dict[str, Any]] = self.rpc("honed_attach", settings)
            self.graphs = Captured(*answers[0]["graphs"])
            self._gpus = [answer.get("gpu", "") for answer in answers]
            self._note_reserves(answers)
            self._has_answered, self._told_s = True, time.monotonic()
            for names, limit in dict.fromkeys((tuple(names), limit) for a in answers for names, limit in a["dropped"]):
                self._drop(names, limit)
            if "swap" in self.findings.capabilities:
                self.rpc("honed_begin")
            if self._settings.wants_trees:
                self._attach_trees()
        except NoAnswer:
            raise
        except Exception as error:  # vLLM's executors raise many kinds
            self._drop(of_workers, f"capture, swap and estimates are off: the workers can't be attached to: {error}")

    def _attach_trees(self) -> None:
        answers: list[tuple[str, list[int]]] = self.rpc("honed_trees", self._settings.wants_tree_graphs)
        reason = next((reason for reason, _ in answers if reason), "")
        if reason:
            self._drop((), f"trees are off: {reason}")
        else:
            # Steps with trees don't run in full graphs: no length has one that another lacks.
            self._graphs_of_chains = self.graphs
            self.graphs = self.graphs._replace(token_counts=answers[0][1], lengths=[])
            self.findings = replace(self.findings, capabilities=(*self.findings.capabilities, "trees"))

    def drop_limit(self, beginning: str) -> None:
        """Forget limits that no longer hold."""
        kept = tuple(limit for limit in self.findings.limits if not limit.startswith(beginning))
        self.findings = replace(self.findings, limits=kept)

    def end_trees(self) -> None:
        """Note that the workers verify chains from now on."""
        self.graphs = self._graphs_of_chains
        self._drop(("trees",), "trees are off: they failed too often; vLLM's log has the first error")

    @property
    def _can_ask(self) -> bool:
        return not self._why_mute

    @property
    def _why_mute(self) -> str:
        """Reason why the workers can't be called; empty where they can."""
        if self._engine is None:
            return "honed found no EngineCore that it supports in this vLLM process"
        return "" if self._has_extension else f"vLLM was started without --worker-extension-cls {EXTENSION}"

    def set_capture_share(self, share: float, drafter_version: str, idle_since_step: int) -> None:
        """Capture this share of future requests; from time to time ask for the workers' figures.

        A call to the workers takes a millisecond, and then vLLM's message queue spins for a second in each of them. So it is
        made only when it changes something, and to update the figures: once when the engine becomes idle, and each minute.

        Args:
            idle_since_step: number of the last step when the engine is idle, -1 when it isn't.
        """
        is_news = share != self._share or idle_since_step not in (-1, self._counted_step)
        if self._has_answered and (is_news or time.monotonic() - self._told_s > MOST_AGE_S):
            self._share, self._counted_step = share, idle_since_step
            self._tell_share(drafter_version)

    def _tell_share(self, drafter_version: str) -> None:
        self._told_s = time.monotonic()  # also if it fails
        answers = self.rpc("honed_capture", self._share if self.can_capture else 0.0, drafter_version)
        self.captured = answers[0]
        self.num_errors = sum(int(answer["errors"]) for answer in answers)
        self._note_reserves(answers)

    def _note_reserves(self, answers: list[dict[str, Any]]) -> None:
        """Add up what the ranks want; a rank without a GPU wants nothing."""
        self.reserves = {}
        for gpu, answer in zip(self._gpus, answers, strict=False):
            reserve = int(answer.get("reserve", 0))
            if reserve and not gpu:
                self.reserves = None
                return
            if gpu:
                self.reserves[gpu] = self.reserves.get(gpu, 0) + reserve

    def rest(self, is_asleep: bool) -> None:
        """vLLM falls asleep, or is awake again: nothing may be staged on the device meanwhile."""
        if self._is_attached and "swap" in self.findings.capabilities:
            self.rpc("honed_rest", is_asleep)

    def label(self, drafter_version: str) -> None:
        """Note the weights that samples come from now on; they weren't set by a swap."""
        if self.can_capture and self._share >= 0.0:
            self._tell_share(drafter_version)

    def note_new_target(self) -> None:
        """Note that the target's weights were updated in place: requests that run meanwhile are of both."""
        if self.can_capture and self._is_attached:
            self.rpc("honed_new_target")

    def want_draft_ids(self, are_wanted: bool) -> None:
        """Copy draft token ids to the host, or stop; the workers are called only when that changes."""
        if are_wanted != self._are_ids_wanted:
            self._are_ids_wanted = are_wanted
            if self._are_drafts_on_device and self._can_ask:
                self.rpc("honed_draft_ids", are_wanted)

    def feed(self, is_on: bool, curves: tuple[Curve, Curve] | None) -> None:
        """Feed vLLM's adaptive verification, or stop; the workers are called only when something has changed.

        Args:
            curves: current step costs; None: unknown.
        """
        is_news = is_on and curves is not None and (self._fed_curves is None or not are_alike(self._fed_curves, curves))
        if is_news or is_on != self._is_feeding:
            self._is_feeding = is_on
            self._fed_curves = curves if is_news else None
            self.rpc("honed_feed", is_on, *(curves if is_news and curves is not None else ([], [])))

    def wake(self, callback: Callable[[], None]) -> None:
        """Any thread: run `callback` on the engine's thread once it is idle; at most one is under way."""

        def woken() -> None:
            # Lowered first: a wake-up during the callback must not get lost.
            self._is_wake_pending = False
            callback()

        if self._engine is not None and not self._is_wake_pending:
            self._is_wake_pending = True
            if not self._engine.call_when_idle(woken):
                self._is_wake_pending = False

    def close(self) -> None:
        """Release vLLM."""
        self._engine = None

    def _drop(self, names: Collection[str], limit: str) -> None:
        logger.warning("honed: %s", limit)
        kept = tuple(c for c in self.findings.capabilities if c not in names)
        self.findings = replace(self.findings, capabilities=kept, limits=(*self.findings.limits, limit))
