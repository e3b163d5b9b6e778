"""vLLM's scheduler with honed attached: `--scheduler-cls honed.attach.scheduler.make_scheduler`.

Every override calls vLLM's method and informs the attachment; vLLM alone decides what a step computes. Draft lengths are cut
in the two places where vLLM sets them: in `update_draft_token_ids`, when a step's drafts come back; and, when the scheduler
runs ahead of the worker, in the placeholders that `_update_after_schedule` leaves.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from honed.attach.contract.compatibility import Findings, check
from honed.attach.engine.attachment import Attachment
from honed.attach.engine.environment import AttachSettings, from_environment, unknown_variables
from honed.attach.events.step_log import Verified

logger = logging.getLogger("honed.attach")
vllms_logger = logging.getLogger("vllm.honed")
"""vLLM shows what its own loggers say, and of others only warnings."""
ABILITIES = {
    "events": "events",
    "draft_length": "draft lengths",
    "estimates": "vLLM's own draft lengths",
    "capture": "capture",
    "swap": "swaps",
}
"""Capabilities that are known before the workers are, as the log names them."""


def make_scheduler(*args: Any, **kwargs: Any) -> Scheduler:
    """Make the scheduler that vLLM would have made, with honed attached when it is switched on and fits.

    On any error of honed's, return vLLM's own scheduler and log one line.
    """
    vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    base: type[Scheduler] = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    try:
        # Not `data_parallel_rank`: vLLM sets that to 0 in every replica of a model without experts.
        settings = from_environment(os.environ, vllm_config.parallel_config.data_parallel_index)
        if settings is None:
            logger.warning("honed: not attached: HONED_RUNTIME_DIR isn't set for vLLM; `honed vllm-args` prints it")
            return base(*args, **kwargs)
        _check_launcher(vllm_config.parallel_config)
        for sentence in unknown_variables(os.environ):
            logger.warning("honed: %s", sentence)
        findings = _check(base, vllm_config)
    except Exception as error:
        logger.warning("honed: not attached: %s", error)
        return base(*args, **kwargs)
    scheduler = _attached(base)(*args, **kwargs)
    scheduler.honed_attach(vllm_config, settings, findings)
    return scheduler


def _check_launcher(parallel_config: Any) -> None:
    if parallel_config.distributed_executor_backend == "external_launcher" and parallel_config.world_size > 1:
        raise RuntimeError(
            "under an external launcher every rank has its own scheduler, and all must decide the same in the same step: "
            "start vLLM with its own workers (--distributed-executor-backend mp)"
        )


def _check(base: type[Scheduler], vllm_config: Any) -> Findings:
    findings = check(base, vllm_config, str(vllm.__version__))
    for limit in findings.limits:
        logger.warning("honed: %s", limit)
    if "events" not in findings.capabilities:
        raise RuntimeError("honed doesn't support this vLLM's scheduler: " + "; ".join(findings.limits))
    return findings


_classes: dict[Any, type[Any]] = {}


def _attached(base: type[Scheduler]) -> type[Any]:
    if base not in _classes:
        _classes[base] = type(f"Honed{base.__name__}", (_HonedScheduler, base), {})
    return _classes[base]


class _HonedScheduler:
    """Mixed in before vLLM's class; `_honed` is None until attaching has succeeded."""

    _honed: Attachment | None = None
    _honed_note: Callable[[Verified], None] | None = None
    """Takes each verify round of the step whose results are being processed."""

    def honed_attach(self, vllm_config: Any, settings: AttachSettings, findings: Findings) -> None:
        """Start the attachment; on failure the scheduler stays as it was."""
        is_async = isinstance(self, AsyncScheduler)
        self._honed_placeholders = [[-1] * k for k in range(self.num_spec_tokens + 1)] if is_async else []  # type: ignore[attr-defined]
        try:
            self._honed = Attachment(self, vllm_config, settings, findings)
        except Exception as error:
            logger.warning("honed: not attached: %s: %s", type(error).__name__, error)
            return
        what = ", ".join(words for name, words in ABILITIES.items() if name in findings.capabilities)
        vllms_logger.info("honed: attached as %s, for %s; daemon: %s", settings.engine_id, what, settings.socket_endpoint)

    def add_request(self, request: Any) -> None:
        # `_update_request_as_session` tells of a session that goes on, perhaps later.
        if self._honed is not None and request.request_id not in self.requests:  # type: ignore[attr-defined]
            self._honed.request_added(request)
        super().add_request(request)  # type: ignore[misc]

    def _update_request_as_session(self, session: Any, *args: Any, **kwargs: Any) -> None:
        super()._update_request_as_session(session, *args, **kwargs)  # type: ignore[misc]
        if self._honed is not None:
            self._honed.request_added(session)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        honed = self._honed
        if honed is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        honed.before_schedule()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        honed.after_schedule()
        return output

    def has_requests(self) -> bool:
        # Called before every step; with nothing to schedule, it is the only call.
        found: bool = super().has_requests()  # type: ignore[misc]
        if not found and self._honed is not None:
            self._honed.without_requests()
        return found

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        honed = self._honed
        if honed is not None:
            honed.choose_lengths(scheduler_output)
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        if honed is not None and self._honed_placeholders:
            requests = self.requests  # type: ignore[attr-defined]
            for request_id, length in honed.decided():
                if length < self.num_spec_tokens:  # type: ignore[attr-defined]
                    request = requests[request_id]
                    if len(request.spec_token_ids) > length:
                        request.spec_token_ids = self._honed_placeholders[length]

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        honed = self._honed
        if honed is not None:
            honed.cut(draft_token_ids.req_ids, draft_token_ids.draft_token_ids)
            honed.before_grammars(draft_token_ids.req_ids, draft_token_ids.draft_token_ids)
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]
        if honed is not None:
            honed.after_grammars()

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        # Only for grammars, when the scheduler runs ahead: the drafts take their placeholders' places.
        honed = self._honed
        if honed is not None:
            honed.before_grammars(draft_token_ids.req_ids, draft_token_ids.draft_token_ids)
        super().update_draft_token_ids_in_output(draft_token_ids, scheduler_output)  # type: ignore[misc]
        if honed is not None:
            honed.after_grammars(scheduler_output)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: Any,
        request_id: str,
        **others: Any,
    ) -> Any:
        # Called for every round of every step: only take a note.
        if self._honed_note is not None and num_draft_tokens:
            self._honed_note((request_id, num_draft_tokens, num_accepted_tokens))
        return super().make_spec_decoding_stats(  # type: ignore[misc]
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id, **others
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        honed = self._honed
        if honed is None:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._honed_note = honed.before_update(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        honed.after_update()
        return outputs

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        if self._honed is not None:
            self._honed.request_interrupted(request)

    def _handle_stopped_request(self, request: Any) -> bool:
        is_over: bool = super()._handle_stopped_request(request)  # type: ignore[misc]
        if not is_over and self._honed is not None:
            self._honed.request_interrupted(request)
        return is_over

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self._honed is not None:
            self._honed.request_freed(request.request_id)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def shutdown(self) -> None:
        if self._honed is not None:
            self._honed.stop()
        super().shutdown()  # type: ignore[misc]
