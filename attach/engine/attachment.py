"""honed's side of the engine's thread, in one object that the scheduler class calls into.

The law of this file: no call blocks, and none raises. Each public method catches errors, counts them, logs the first one and
leaves vLLM as if honed weren't there; after `MAX_ERRORS` the attachment stops deciding and only observes. Only a worker that
hangs ends the engine, as it does in vLLM's own calls (`guard.NoAnswer`).

Non-anticipating by construction: `decide` reads the requests' finished rounds (`observe` runs after a step's verification),
never the draft tokens that it is about to cut.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from honed.adapt.lengths.decider import Decider
from honed.adapt.lengths.policy_tables import are_equal
from honed.adapt.lengths.tree_decider import TreeDecider
from honed.adapt.protocol import wire
from honed.adapt.steps.step_time import StepTimeModel
from honed.adapt.steps.vllm_costs import cost_curves
from honed.attach.contract.compatibility import (
    Findings,
    can_shorten_block,
    can_skip_draft_pass,
    has_worker_extension,
    updates_drafter_in_place,
)
from honed.attach.engine.busy_flag import BusyFlag
from honed.attach.engine.commands import CommandRunner
from honed.attach.engine.environment import AttachSettings
from honed.attach.engine.graphs import LengthTable
from honed.attach.engine.guard import Errors, guarded
from honed.attach.engine.introduction import Introduction
from honed.attach.engine.latency import Latency
from honed.attach.engine.struck_drafts import StruckDrafts, struck_in_output, with_struck
from honed.attach.engine.worker_link import WorkerLink
from honed.attach.events.model_wait import ModelWait
from honed.attach.events.publisher import Callbacks, Publisher
from honed.attach.events.request_book import RequestBook
from honed.attach.events.step_log import TREES_ARE_OFF, UNWALKED, StepLog, Verified
from honed.attach.events.step_recorder import Plan, StepRecorder
from honed.attach.trees.eligible import needs_chain
from honed.attach.trees.slots import NODES_SHARE, block_tokens_of, fitting, reserve

logger = logging.getLogger("honed.attach")

NO_BUSY_FLAG = "the trainer can't see when this engine has requests, and may train beside them"
"""How the limit begins that says why."""
MOST_NOTED = 8
"""Requests a step whose length is read: finding a request takes many cache misses. The others' lengths are their last ones
plus the tokens since."""


class Attachment:
    """The engine thread's side of honed for one scheduler.

    Args:
        scheduler: vLLM's scheduler; only counters and `requests` are read.
        vllm_config: vLLM's configuration.
        settings: from the environment.
        findings: what this engine allows.
    """

    def __init__(self, scheduler: Any, vllm_config: Any, settings: AttachSettings, findings: Findings) -> None:
        self._scheduler = scheduler
        self._config = vllm_config
        self._settings = settings
        self._boot_id = secrets.token_hex(8)
        self._introduction = Introduction(vllm_config, settings, self._boot_id)
        self._num_spec_tokens: int = scheduler.num_spec_tokens
        self._chain_tokens = block_tokens_of(vllm_config.speculative_config)
        """Draft tokens of the drafter's block: fewer than K where the server was given slots for trees."""
        self._most_tokens = self._chain_tokens
        """Most draft tokens of a request: without trees, slots beyond the drafter's block are of no use."""
        self._most_rows = 0
        """Most tokens of a step with trees that aren't a prompt's."""
        self._can_decide = "draft_length" in findings.capabilities and self._num_spec_tokens > 0
        self._is_block_open = can_shorten_block(vllm_config)
        self._can_shorten = self._can_decide and self._is_block_open
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._can_skip = self._can_decide and can_skip_draft_pass(vllm_config)
        self.errors = Errors()
        self.log_latency = Latency()
        self.decide_latency = Latency()
        self._requests = RequestBook()
        max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self._decider: Decider | TreeDecider = Decider(self._num_spec_tokens, max_num_seqs)
        if self._chain_tokens < self._num_spec_tokens:
            self._decider = TreeDecider(self._num_spec_tokens, max_num_seqs, self._chain_tokens)
        self._pending_policy: Any = None
        """A policy's tables, as the decider made them."""
        self._has_news = True
        """Whether `_take_news` may have anything to do."""
        self._undecided = "" if self._can_decide else "observe"
        """Reason why vLLM sets the draft lengths; empty when honed does, unless it has failed too often."""
        self._policy: wire.Policy | None = None
        self._drafter_version = ""
        self._drafting_version = ""
        """Version whose drafts the next step verifies: a swap falls between a draft pass and its verification."""
        self._drafter_generation = 0
        self._target_updates = 0
        self._is_drafter_here = True
        """False while vLLM sleeps, until the drafter is given other weights."""
        self._step = 0
        self._began_ns = 0
        self._decide_ns = 0
        self._decided: tuple[list[str], list[int]] | None = None
        self._are_unequal = False
        """Whether each request of the last step has a draft length of its own."""
        self._in_prompt: set[str] = set()
        """Requests whose prompt isn't computed yet, or no longer is."""
        self._waiting_sessions: set[str] = set()
        """Running requests that wait for their client's next input."""
        self._with_stale_steps: set[str] = set()
        # V1's worker has only the drafts of the step before.
        self._are_drafts_forgotten = vllm_config.scheduler_config.async_scheduling and not vllm_config.use_v2_model_runner
        self._last_scheduled: dict[str, int] | None = None
        """Requests of the last step, if a running one wasn't among them: its drafts will be forgotten."""
        self._plan: Plan | None = None
        self._struck = StruckDrafts()
        self._offered: dict[str, int] = {}
        """Drafts that the grammars are about to judge, by request."""
        self._busy = BusyFlag(settings.busy_path)
        if self._busy.problem:
            limit = f"{NO_BUSY_FLAG}: {self._busy.problem}"
            logger.warning("honed: %s; honed tries again", limit)
            findings = replace(findings, limits=(*findings.limits, limit))
        self._log = StepLog()
        self._model_wait = ModelWait()
        self._recorder = StepRecorder(self._log)
        self._workers = WorkerLink(
            settings,
            findings,
            self._requests.secret,
            vllm_config.use_v2_model_runner,
            has_worker_extension(vllm_config),
            self._num_spec_tokens > 0,
        )
        self._table = LengthTable(scheduler, self._num_spec_tokens)
        self._block = self._num_spec_tokens
        if self._can_shorten and not vllm_config.scheduler_config.async_scheduling:  # else the fetch is for an earlier step
            self._workers.skip_draft_fetch(lambda: self._block > 0)
        self._publisher = Publisher(
            settings.socket_endpoint,
            settings.engine_id,
            self._boot_id,
            self._log,
            settings.queue_bytes,
            self._callbacks(),
            self._model_wait,
        )
        self.commands = CommandRunner(
            (settings.engine_id, self._boot_id),
            self._workers.rpc,
            self._publisher.report,
            self._on_swapped,
            self._on_lost,
            self._wake,
            lambda: self._has_work,
        )
        self._workers.watch_sleep(self.fell_asleep, self.woke_up)
        # attaches the workers first
        self._workers.watch_weights(self._take_news, self.weights_came, updates_drafter_in_place(vllm_config))
        if self._can_decide:
            self._decider.prepare()
        self._publisher.start()

    # --- called by the scheduler class, on the engine's thread --------------------------------------------------------

    @guarded
    def request_added(self, request: Any) -> None:
        """Take in a new request, or a session that goes on with more input: the engine is busy from here on."""
        self._waiting_sessions.discard(request.request_id)
        adapter = request.lora_request.lora_name if request.lora_request is not None else ""
        labels, tracked = self._requests.add(request.request_id, request.sampling_params, request.num_tokens, adapter)
        self._recorder.started(request.request_id, tracked)
        keeps_chain = self._chain_tokens < self._num_spec_tokens and needs_chain(request.sampling_params)
        self._decider.start(request.request_id, labels.workload, labels.max_draft_tokens, keeps_chain=keeps_chain)
        self._in_prompt.add(request.request_id)
        self._struck.start(request)
        self._busy.set(True)

    @guarded
    def request_freed(self, request_id: str) -> None:
        """Forget a request, however it ended; after the last one the engine is idle."""
        self._requests.remove(request_id)
        self._waiting_sessions.discard(request_id)
        self._recorder.over(request_id)
        self._in_prompt.discard(request_id)
        self._struck.finish(request_id)
        self._decider.finish(request_id)
        self._set_busy()

    @guarded
    def request_interrupted(self, request: Any) -> None:
        """Note that a request lost its cache, or that a session waits for more input.

        If vLLM schedules ahead, it may drop the tokens of a step under way.
        """
        self._in_prompt.add(request.request_id)
        self._struck.drop(request.request_id)
        if request.status.name == "WAITING_FOR_STREAMING_REQ":
            self._waiting_sessions.add(request.request_id)
            self._set_busy()
        if request.drop_stale_output and request.num_stale_output_tokens > 0:
            self._with_stale_steps.add(request.request_id)

    @guarded
    def before_schedule(self) -> None:
        """Apply what arrived since the last step: a policy, commands, results of requests that end. Start the step's clock."""
        self._model_wait.end()
        if self._has_news:
            self._take_news()
        if self._are_unequal:
            for request_id, most in self._decider.ending:
                request = self._scheduler.requests.get(request_id)
                if request is not None and len(request.spec_token_ids) > most:
                    request.spec_token_ids = request.spec_token_ids[:most]
        self._began_ns = time.monotonic_ns()

    @guarded
    def without_requests(self) -> None:
        """Apply news though there is nothing to schedule: with experts spread over replicas, all of them step while one has
        requests."""
        if self._has_news:
            self._take_news()

    @guarded
    def _take_news(self) -> None:
        if self.commands.is_asleep and not self._workers.is_attached:
            return  # the weights that the workers would look at aren't there
        self._has_news = False  # first: what comes from here on must not get lost
        if self._busy.problem:
            self._busy.make()
            if not self._busy.problem:
                self._workers.drop_limit(NO_BUSY_FLAG)
                self._publisher.reintroduce()
        is_more_known = self._workers.attach()
        self._tell_gpus()
        if "trees" in self._workers.findings.capabilities and self._most_tokens < self._num_spec_tokens:
            self._most_tokens = self._num_spec_tokens
            self._verify_trees(True)
            self._most_rows = int(self._scheduler.max_num_scheduled_tokens * NODES_SHARE)
            reserve(self._scheduler, self._chain_tokens)
        if is_more_known:
            self._publisher.reintroduce()
        self._workers.want_draft_ids(self._recorder.is_logging_token_ids)
        if self._pending_policy is not None:
            self._apply_policy()
        if self.commands.is_pending:
            self.commands.run()
        if self.commands.is_waiting:
            self._has_news = True

    @guarded
    def choose_lengths(self, output: Any) -> None:
        """Choose the draft length of each request in the step just scheduled; it holds for the request's next round.

        Where the runner can, also shorten the block drafted in this step to the longest length that will be verified. Skip the
        draft pass where no draft will be.
        """
        began_ns = time.perf_counter_ns()
        self._step += 1
        most, output.honed_trees = self._most_tokens, not self._can_decide
        self._block, self._decided, self._are_unequal = most, None, False  # the defaults if anything below fails
        requests = self._scheduler.requests
        scheduled = output.num_scheduled_tokens
        ids, num_prefill, padded = list(scheduled), 0, []
        if self._in_prompt and (in_prompt := self._in_prompt & scheduled.keys()):
            padded = [request_id for request_id in in_prompt if request_id in output.scheduled_spec_decode_tokens]
            for request_id in list(in_prompt):
                request, num_tokens = requests[request_id], scheduled[request_id]
                # A request in the middle of its prompt drafts nothing; one that ends it in this step does.
                if request.num_computed_tokens + num_tokens >= request.num_tokens:
                    in_prompt.remove(request_id)
                    self._in_prompt.remove(request_id)
                    end = request.num_prompt_tokens + request.max_tokens
                    self._decider.note_context(request_id, request.num_tokens, end, self._max_model_len)
                else:
                    num_prefill += num_tokens
            if in_prompt:
                ids = [request_id for request_id in ids if request_id not in in_prompt]
        if self._last_scheduled is not None:
            padded += output.scheduled_spec_decode_tokens.keys() - self._last_scheduled.keys()
        if self._are_drafts_forgotten:  # in an empty step all are
            self._last_scheduled = scheduled if len(self._scheduler.running) > len(scheduled) else None
        if self._undecided == "off":
            self._end_override()
        if self._can_decide and self._chain_tokens < self._num_spec_tokens:  # if anything below fails, no tree grows
            self._decided = ids, [self._chain_tokens] * len(ids)
        reason = "error" if self._can_decide and self.errors.is_too_many else self._undecided
        block, lengths = most, None
        if not reason:
            every = max(-(-len(ids) // MOST_NOTED), 1)
            first, contexts = self._step % every, None
            if self._decider.reads_contexts:
                contexts = [_sure_tokens(requests[request_id]) for request_id in ids[first::every]]
            decision = self._decider.decide(ids, -1, num_prefill, time.monotonic(), contexts, first, every)
            reason, lengths = decision.reason, decision.num_draft_tokens
            if len(lengths) != len(ids):
                raise ValueError(f"{len(lengths)} lengths for {len(ids)} requests")
            if decision.has_trees:
                lengths = fitting(lengths, self._most_rows - len(lengths), self._chain_tokens)
            output.honed_trees = decision.has_trees
            # Where equal lengths are captured in a graph, a shorter one would lose it.
            self._are_unequal = self._policy is not None and not are_equal(self._policy, len(ids))
            if self._can_shorten:
                block = self._workers.graphs.block_for(decision.block, most)
                block = output.num_spec_tokens_to_schedule = min(block, output.num_spec_tokens_to_schedule)
            elif self._can_skip and not decision.block:
                block = output.num_spec_tokens_to_schedule = 0
        else:
            if self._can_decide:
                most = min(most, self._chain_tokens)
            if self._is_block_open:
                block = min(getattr(output, "num_spec_tokens_to_schedule", block), most)
            if most < self._num_spec_tokens and (self._can_decide or self._is_block_open):
                lengths = [most] * len(ids)
                if self._is_block_open:
                    output.num_spec_tokens_to_schedule = block
        self._decided = None
        if lengths is not None and lengths.count(self._num_spec_tokens) < len(lengths):
            self._decided = ids, lengths
        self._block = block
        drafted_by, self._drafting_version = self._drafting_version, self._drafter_version
        struck = self._struck.scheduled(output)
        output.honed_plan = Plan(self._step, self._began_ns, reason, block, drafted_by, padded, struck)
        self._decide_ns = time.perf_counter_ns() - began_ns

    @guarded
    def after_schedule(self) -> None:
        """Note that the step is on its way to the model."""
        self._model_wait.begin()

    def decided(self) -> Iterable[tuple[str, int]]:
        """Request ids with the most drafts that their next round may verify; empty when that is K for all."""
        return zip(*self._decided, strict=True) if self._decided is not None else ()

    @guarded
    def cut(self, request_ids: Sequence[str], drafts: list[list[int]]) -> None:
        """Cut drafts to the chosen lengths."""
        if self._decided is None:
            return
        ids, lengths = self._decided
        most = self._num_spec_tokens
        if request_ids != ids:  # the runner has its own order, and prompts
            length_of = {request_id: length for request_id, length in zip(ids, lengths, strict=True) if length < most}.get
            lengths = [length_of(request_id, most) for request_id in request_ids]
        for i, length in enumerate(lengths):  # a new list for each row would cost a large batch more than all else
            if length < most:
                drafts[i] = drafts[i][:length]

    @guarded
    def before_grammars(self, request_ids: Sequence[str], drafts: Sequence[Sequence[int]]) -> None:
        """Count the drafts that vLLM is about to check against their requests' grammars."""
        self._offered = {}
        self._offered = self._struck.offered(request_ids, drafts)

    @guarded
    def after_grammars(self, output: Any = None) -> None:
        """Note which drafts a grammar struck; `output`: of the step that is under way with them, None: it is yet to come."""
        if output is None:
            self._struck.judged(self._offered, self._scheduler.requests)
        elif self._offered and (plan := getattr(output, "honed_plan", None)) is not None:
            output.honed_plan = plan._replace(struck=struck_in_output(self._offered, output))

    @guarded
    def before_update(self, output: Any, runner_output: Any) -> Callable[[Verified], None]:
        """Prepare for a step's results; return the function that takes vLLM's verify rounds as it counts them."""
        self._model_wait.end()
        self._plan = getattr(output, "honed_plan", None)
        if self._plan is not None and (unjudged := self._struck.unjudged(output)):
            self._plan = self._plan._replace(padded={*self._plan.padded, *unjudged})
        if self._plan is not None and (unwalked := getattr(runner_output, UNWALKED, ())):
            self._plan = self._plan._replace(padded={*self._plan.padded, *unwalked})
        if self._most_tokens > self._chain_tokens and getattr(runner_output, TREES_ARE_OFF, False):
            self._most_tokens = self._chain_tokens
            self._verify_trees(False)
            self._workers.end_trees()
            self._publisher.reintroduce()
        recorder = self._recorder
        recorder.begin(output, runner_output, self._dropped(output) if self._with_stale_steps else ())
        return recorder.verified.append

    @guarded
    def after_update(self) -> None:
        """Log the finished step and learn from it."""
        recorder = self._recorder
        verified, invalid = recorder.verified, recorder.invalid
        unplanned = Plan(self._step, self._began_ns, "unplanned", self._num_spec_tokens, self._drafting_version)
        plan = self._plan or unplanned
        step = recorder.end(plan)
        self.log_latency.record(recorder.spent_ns)
        began_ns = time.perf_counter_ns()
        if plan.padded:
            verified = [one for one in verified if one[0] not in plan.padded]
        if recorder.trees and isinstance(self._decider, TreeDecider):  # the daemon learns from these: what a node is worth
            of_trees = [one for one in verified if one[0] in recorder.trees]
            trees = [recorder.trees[one[0]] for one in of_trees]
            chains = [one.chain_tokens for one in trees], [one.chain_accepted for one in trees]
            self._decider.observe_trees([one[0] for one in of_trees], [one[2] for one in of_trees], *chains)
            verified = [one for one in verified if one[0] not in recorder.trees]
        if invalid or plan.struck:
            verified = with_struck(verified, invalid, plan.struck, step.answered(plan.struck) if step is not None else ())
        if verified and self._can_decide:
            request_ids, drafts, accepted = map(list, zip(*verified, strict=True))
            self._decider.observe(request_ids, drafts, accepted)
        if step is not None and self._policy is not None and self._policy.tells_steps:
            requests = len(step.scheduled)
            prefill = max(step.num_tokens - requests - sum(map(len, step.drafts.values())), 0)
            self._busy.note_step(step.end_ns, step.duration_us, step.num_tokens, requests, self._num_waiting(), prefill)
        self.decide_latency.record(self._decide_ns + time.perf_counter_ns() - began_ns)
        if not self._has_work:
            self._model_wait.rest()

    @guarded
    def fell_asleep(self) -> None:
        """Prepare for vLLM's sleep mode: device memory is for others until it wakes up. The trainer must not use it either."""
        self.commands.is_asleep, self._is_drafter_here = True, False
        self._set_busy()
        self.commands.run()
        self._workers.rest(True)

    @guarded
    def woke_up(self, are_weights_lost: bool) -> None:
        """All of the device's memory is back. A discarded drafter has no version: the daemon restores one.

        The exception is a drafter that got other weights meanwhile.
        """
        self.commands.is_asleep = False
        self._set_busy()
        if are_weights_lost and self._can_swap and not self._is_drafter_here:
            logger.warning("honed: vLLM discarded the drafter's weights in its sleep; the daemon must restore them")
            self._note_drafter(wire.LOST_DRAFTER)
            self._drafting_version = wire.LOST_DRAFTER
            self.commands.take_over()
        self._workers.rest(False)
        if self._has_news:
            self._take_news()

    @guarded
    def weights_came(self, is_draft: bool) -> None:
        """Note weights from vLLM's own endpoints, for target or drafter: honed leaves such a drafter alone until told."""
        if not is_draft:
            self._target_updates += 1
            self._workers.note_new_target()
        elif self._can_swap:
            logger.warning("honed: vLLM's endpoint set the drafter's weights: left alone until a version is promoted")
            self.commands.give_way()
            self._is_drafter_here = True
            self._note_drafter(wire.FOREIGN_DRAFTER)

    @guarded
    def stop(self) -> None:
        """Shut down: send what is left, lower the busy flag, release vLLM."""
        self._publisher.stop()
        self._busy.close()
        self._workers.close()

    # --- helpers on the engine's thread -------------------------------------------------------------------------------

    @property
    def _can_swap(self) -> bool:
        return "swap" in self._workers.findings.capabilities

    def _num_waiting(self) -> int:
        """Requests that wait for a place in the batch. vLLM also counts sessions that wait for their client's next input."""
        _, waiting = self._scheduler.get_request_counts()
        return max(int(waiting) - int(getattr(self._scheduler, "num_waiting_for_streaming_input", 0)), 0)

    @property
    def _has_work(self) -> bool:
        """Whether a request doesn't wait for its client's next input."""
        return len(self._requests) > len(self._waiting_sessions)

    def _set_busy(self) -> None:
        self._busy.set(self.commands.is_asleep or self._has_work)

    def _note_drafter(self, version: str) -> None:
        self._drafter_version = version
        self._drafter_generation += 1
        self._workers.label(version)

    def _verify_trees(self, has_trees: bool) -> None:
        if isinstance(self._decider, TreeDecider):
            self._decider.has_trees = has_trees

    def _dropped(self, output: Any) -> set[str]:
        """Requests whose tokens of this step vLLM is about to drop: it has resumed them since the step was scheduled."""
        requests = self._scheduler.requests
        known = [requests[r] for r in self._with_stale_steps if r in requests]
        # Preempted again, it may be one whose tokens are delivered.
        stale = {one.request_id for one in known if one.drop_stale_output and one.num_stale_output_tokens > 0}
        self._with_stale_steps = stale
        return {r for r in stale if r in output.num_scheduled_tokens}

    def _apply_policy(self) -> None:
        tables, self._pending_policy = self._pending_policy, None
        if tables is None or tables.policy is None:
            return
        policy = self._policy = tables.policy
        if self._can_decide:
            self._undecided = "off" if policy.kind == "off" else ""
        self._table.set_aside(not (self._undecided or self.errors.is_too_many))
        self._decider.use(tables)
        if "estimates" in self._workers.findings.capabilities:
            self._feed(policy, tables.model)
        idle_since_step = -1 if self._scheduler.has_unfinished_requests() else self._step
        self._workers.set_capture_share(policy.capture_share, self._drafter_version, idle_since_step)
        self._tell_gpus()

    def _tell_gpus(self) -> None:
        if self._workers.reserves is not None:
            self._busy.tell_gpus(self._workers.reserves)

    def _end_override(self) -> None:
        """Decide again once an operator's "off" has expired: the daemon that would have ended it may be gone."""
        policy = self._policy
        if policy is not None and "policy" in policy.override and self._decider.policy_age(time.monotonic()) > policy.ttl_s:
            self._undecided = ""
            self._table.set_aside(not self.errors.is_too_many)

    def _feed(self, policy: wire.Policy, model: StepTimeModel) -> None:
        is_off = self.errors.is_too_many or policy.kind == "off"
        is_on, running, config = policy.feeds_estimates and not is_off, self._scheduler.running, self._config
        curves = None
        if is_on and model.is_ready and running:
            curves = cost_curves(
                model,
                num_requests=len(running),
                context_tokens=sum(request.num_tokens for request in running),
                num_spec_tokens=self._num_spec_tokens,
                max_num_seqs=config.scheduler_config.max_num_seqs,
                max_tokens=config.scheduler_config.max_num_batched_tokens,
                captured_tokens=self._workers.graphs.token_counts,
            )
        self._workers.feed(is_on, curves)

    def _on_swapped(self, drafter_version: str, needs_cache_reset: bool) -> None:
        self._drafter_version = drafter_version
        self._drafter_generation += 1
        if needs_cache_reset:
            # The new weights would read context K/V of the old ones: prefix hits never recompute them.
            try:
                self._scheduler.reset_prefix_cache(reset_running_requests=True)
            except RuntimeError as error:  # blocks held by something not running: a waiting session, a KV transfer
                logger.warning("honed: context K/V of the old weights stay cached, and lower acceptance where hit: %s", error)
            # By itself: vLLM leaves it out where the above fails.
            if not self._scheduler.reset_connector_cache():
                logger.warning("honed: the KV connector keeps context K/V of the old weights, which lower acceptance where hit")

    def _on_lost(self) -> None:
        logger.warning("honed: copying a drafter version failed half way; the daemon must restore one")
        self._note_drafter(wire.LOST_DRAFTER)

    # --- called on the publisher's thread -----------------------------------------------------------------------------

    def _callbacks(self) -> Callbacks:
        return Callbacks(
            self._hello, self._status, self._on_welcome, self._on_policy, self._on_command, self._on_tick, self.errors.note
        )

    def _hello(self) -> wire.EngineHello:
        lengths = self._most_tokens if self._can_decide else self._num_spec_tokens, self._chain_tokens
        return self._introduction.hello(self._workers, self._drafter_version, *lengths)

    def _status(self, queue_bytes: int) -> wire.EngineStatus:
        running, waiting = self._scheduler.get_request_counts()
        log_p50, log_p99 = self.log_latency.quantiles_us()
        decide_p50, decide_p99 = self.decide_latency.quantiles_us()
        policy = self._policy
        fallback = "error" if self.errors.is_too_many else self._decider.fallback
        return wire.EngineStatus(
            engine_id=self._settings.engine_id,
            boot_id=self._boot_id,
            num_running=running,
            num_waiting=waiting,
            policy_generation=policy.generation if policy is not None else 0,
            policy_age_s=self._decider.policy_age(time.monotonic()),
            fallback=fallback if self._can_decide else "observe_only",
            drafter_version=self._drafter_version,
            drafter_generation=self._drafter_generation,
            queue_bytes=queue_bytes,
            errors=self.errors.count + self._workers.num_errors,
            log_us_p50=log_p50,
            log_us_p99=log_p99,
            decide_us_p50=decide_p50,
            decide_us_p99=decide_p99,
            captured_rows=int(self._workers.captured.get("rows", 0)),
            capture_skipped_rows=int(self._workers.captured.get("skipped", 0)),
            capture_nonfinite_rows=int(self._workers.captured.get("nonfinite", 0)),
            capture_media_requests=int(self._workers.captured.get("media", 0)),
            is_asleep=self.commands.is_asleep,
            target_updates=self._target_updates,
            pooled_requests=self._requests.workloads.num_pooled,
        )

    def _on_welcome(self, welcome: wire.Welcome) -> None:
        self._recorder.is_logging_token_ids = welcome.log_token_ids
        self._has_news = True
        if welcome.drafter_version and not self._drafter_generation:
            self._drafter_version = self._drafting_version = welcome.drafter_version

    def _on_policy(self, policy: wire.Policy) -> None:
        self._pending_policy = self._decider.tabulate(policy, time.monotonic())
        self._wake()

    def _on_command(self, command: wire.Command) -> None:
        self.commands.put(command)

    def _on_tick(self) -> None:
        if self.commands.is_pending:
            self._wake()

    def _wake(self) -> None:
        self._has_news = True
        self._workers.wake(self._take_news)


def _sure_tokens(request: Any) -> int:
    """A request's tokens, and the one that a step under way is sure to add: the placeholders tell that there is one."""
    num_tokens: int = request.num_tokens + (request.num_output_placeholders > 0)
    return num_tokens
