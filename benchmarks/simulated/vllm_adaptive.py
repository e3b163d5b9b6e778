"""vLLM's adaptive verification as a rule in the simulated engine: its own code, from the installed package, on the CPU.

These parts are vLLM's own: the cost tables and how they are profiled and read (`batches_to_profile`, `set_initial_cost_curves`,
`build_cost_tables_from_curves`), the budget (`get_num_tokens`), its assignment to requests (`_assign_draft_token_budget`), and
the fit of its acceptance estimator (`OnlineAcceptanceEstimator.step`: Triton kernels, run here by Triton's interpreter). These
are replaced, with equal results:

- confidences: σ(slope·f + intercept) in numpy; vLLM's `predict` first computes f from the draft's logits, and the simulated
  drafter shows f directly
- the interpreter needs milliseconds per call, so rounds are graded in one call per `REFIT_INTERVAL` steps: the kernel sums over
  rounds, the coefficients don't change in between, and each round brings its own prediction
- `record_confidences` without CUDA streams: the same two slots alternate, so budgets are chosen from the confidences of the
  drafts before the present ones, and 1 for a new request

It always drafts K tokens and sees them before it cuts. Its profile is what it would measure at start: every captured size and
beyond, five noisy runs each, every request at `VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN` (8192) tokens of context. Its
forward time gets everything of a step but the drafter. That includes host time, which its events wouldn't see.

Letters: K = configured number of draft tokens, n = requests in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from benchmarks.simulated.engine import Truth
from benchmarks.simulated.oracle import PROPOSE_S
from benchmarks.simulated.traffic import Traffic
from honed.adapt.control.controller import EngineController
from honed.adapt.control.settings import ControllerSettings
from honed.adapt.lengths.length_policy import Decision
from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.protocol.wire import EventBatch
from honed.adapt.steps.step_time import StepTimeModel
from honed.adapt.steps.vllm_costs import Curve, are_alike, cost_curves
from tests.e2e import triton_on_cpu

triton_on_cpu.install()

import torch  # noqa: E402  vLLM looks for a Triton backend at its first import
from vllm.v1.worker.gpu.async_utils import StepTimingSample  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import (  # noqa: E402
    AdaptiveVerificationManager,
    _assign_draft_token_budget,
    build_cost_tables_from_curves,
)

from honed.adapt.protocol.workloads import MAX_WORKLOADS  # noqa: E402
from honed.attach.runner.fed_levels import FedLevels  # noqa: E402

MOST_LOG_ODDS = 40.0
_CPU = torch.device("cpu")


class Manager(AdaptiveVerificationManager):  # type: ignore[misc]
    """vLLM's manager without a GPU: only the values that its methods read."""

    def __init__(self, num_spec_tokens: int, max_num_reqs: int, max_num_batched_tokens: int) -> None:
        self.num_speculative_steps = num_spec_tokens
        self.req_states = SimpleNamespace(
            num_speculative_steps=num_spec_tokens,
            max_num_reqs=max_num_reqs,
            max_num_batched_tokens=max_num_batched_tokens,
            req_id_to_index={},
            num_computed_tokens_np=np.zeros(max_num_reqs, dtype=np.int64),  # prompts are computed whole, in one step:
            prefill_len=SimpleNamespace(np=np.zeros(max_num_reqs, dtype=np.int64)),  # every request samples
        )
        self.num_bonus_tokens = 1
        self._max_total_logits = max_num_batched_tokens
        self.cost_tables = None
        self._cudagraph_limit = 0
        self._batch_budget = None
        self._confidence_probs = torch.ones((max_num_reqs, num_spec_tokens), dtype=torch.float32)
        ones = np.ones((max_num_reqs, num_spec_tokens), dtype=np.float32)
        self._stale_confidences = [SimpleNamespace(np=ones.copy()) for _ in range(2)]
        self._pending_resets: list[int] = []
        self._stale_idx = 0

    def set_cost_curves(self, draft_curve: list[tuple[int, float]], verify_curve: list[tuple[int, float]]) -> None:
        """Set curves as vLLM does, on a single rank."""
        states = self.req_states
        self.cost_tables = build_cost_tables_from_curves(
            draft_curve, verify_curve, states.max_num_reqs, states.max_num_batched_tokens, self._cudagraph_limit
        )

    def record(self, confidences: Floats, slots: Ints) -> None:
        """Record as vLLM's `record_confidences`, without streams."""
        ready = self._stale_idx ^ 1
        if self._pending_resets:
            self._stale_confidences[ready].np[self._pending_resets] = 1.0
            self._pending_resets.clear()
        self._stale_idx, write = ready, self._stale_idx
        self._confidence_probs[torch.from_numpy(slots)] = torch.from_numpy(confidences.astype(np.float32))
        self._stale_confidences[write].np[:] = self._confidence_probs.numpy()

    def assign(self, slots: Ints) -> Ints:
        """Split the budget from `get_num_tokens` into drafts for each request."""
        scheduled, _, budget = self._batch_budget
        capacities = torch.tensor(list(scheduled.values())[: len(slots)], dtype=torch.int32)
        if budget == 0:
            capacities.zero_()
        elif budget < int(capacities.sum()):
            mapping = torch.from_numpy(slots)
            _assign_draft_token_budget(self._confidence_probs, mapping, capacities, budget, self.num_speculative_steps)
        return capacities.numpy().astype(np.int64)


class Estimator:
    """vLLM's acceptance estimator, graded once per refit."""

    def __init__(self, num_spec_tokens: int) -> None:
        self.vllm = OnlineAcceptanceEstimator(1, num_spec_tokens, _CPU)
        self._steps: list[tuple[Floats, Floats, Ints, Ints]] = []

    @property
    def slope(self) -> float:
        """The estimator's one slope."""
        return float(self.vllm.slope)

    def predict(self, features: Floats) -> Floats:
        """Predict acceptance, [n, K], of drafts that show these log-odds."""
        clamped = np.clip(features, -MOST_LOG_ODDS, MOST_LOG_ODDS)
        predicted: Floats = 1.0 / (1.0 + np.exp(-(self.slope * clamped + self.vllm.intercepts.numpy())))
        return predicted

    def observe(self, features: Floats, predicted: Floats, num_draft_tokens: Ints, num_accepted_tokens: Ints) -> None:
        """Grade a step's drafts, [n, K] and [n]."""
        self._steps.append((np.clip(features, -MOST_LOG_ODDS, MOST_LOG_ODDS), predicted, num_draft_tokens, num_accepted_tokens))
        if len(self._steps) < self.vllm.REFIT_INTERVAL:
            return
        columns = [torch.from_numpy(np.concatenate(column)) for column in zip(*self._steps, strict=True)]
        self._steps = []
        self.vllm.features, self.vllm.predictions = columns[0].float(), columns[1].float()
        self.vllm._steps_since_refit = self.vllm.REFIT_INTERVAL - 1
        self.vllm.step(torch.arange(len(columns[2])), columns[3] + 1, columns[2] - columns[3])


class AdaptiveVerification:
    """The rule: vLLM's manager and estimator, asked in the order in which vLLM's runner asks them."""

    def __init__(self, traffic: Traffic, seed: int = 0) -> None:
        trace = traffic.trace
        self.num_spec_tokens = trace.num_spec_tokens
        self.estimator = Estimator(trace.num_spec_tokens)
        most = max(trace.max_prefill_tokens * 2, trace.max_num_seqs * (trace.num_spec_tokens + 1))
        self.manager = Manager(trace.num_spec_tokens, trace.max_num_seqs, most)
        self._profile(traffic, np.random.default_rng([trace.seed, seed, 6]))
        self._slots = self.manager.req_states.req_id_to_index
        self._free = list(range(trace.max_num_seqs))[::-1]
        self._newcomers: list[str] = []
        self._features: Floats | None = None
        self._predicted: Floats = np.zeros((0, self.num_spec_tokens))

    def _profile(self, traffic: Traffic, rng: np.random.Generator) -> None:
        trace, cost = traffic.trace, traffic.cost(0.0)
        samples = []
        captured = [size for size in cost.captured_tokens if size <= self.manager.req_states.max_num_batched_tokens]
        for run in self.manager.batches_to_profile(captured or [2**power for power in range(10)]):
            tokens = run["num_tokens"]
            requests = min(tokens, trace.max_num_seqs)
            noise = np.exp(trace.noise * rng.standard_normal(2) - 0.5 * trace.noise**2)
            shape = (requests, np.array(tokens), requests * run["context_len"], 0)
            forward = float(cost.seconds(*shape, np.array(0)))
            drafter = float(cost.seconds(*shape, np.array(trace.num_spec_tokens))) - forward
            is_graph = not cost.captured_tokens or tokens <= cost.captured_tokens[-1]
            samples.append(StepTimingSample(1e3 * forward * noise[0], 1e3 * drafter * noise[1], tokens, requests, is_graph))
        self.manager.set_initial_cost_curves(samples)

    def see(self, truth: Truth) -> None:
        """Take in the drafts of the step to be decided, and nothing else of the truth."""
        assert truth.drafts is not None
        self._features = truth.drafts.features

    def start(self, request_id: str, workload: str = "default", ceiling: int = -1) -> None:
        """Add a request, in prefill at first."""
        self._slots[request_id] = self._free.pop()
        self._newcomers.append(request_id)

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        self._free.append(self._slots.pop(request_id))
        if request_id in self._newcomers:
            self._newcomers.remove(request_id)

    def decide(
        self,
        request_ids: Sequence[str],
        context_tokens: int,
        num_prefill_tokens: int,
        now_s: float,
        contexts: Sequence[int] | None = None,
    ) -> Decision:
        """Cut the drafts seen last."""
        assert self._features is not None
        here = set(request_ids)
        for request_id in [one for one in self._newcomers if one in here]:  # prefilled in a step without rounds
            self._take_in(request_id)
        slots = np.array([self._slots[request_id] for request_id in request_ids], dtype=np.int64)
        self._predicted = self.estimator.predict(self._features)
        self.manager.record(self._told(self._predicted, slots, context_tokens), slots)
        prompts = [one for one in self._newcomers if one not in here]
        for request_id in prompts:
            self._take_in(request_id)
        tokens = dict.fromkeys(request_ids, 1 + self.num_spec_tokens)
        if num_prefill_tokens:
            tokens |= dict.fromkeys(prompts, 1) | {prompts[0]: num_prefill_tokens - len(prompts) + 1}
        self.manager.get_num_tokens(tokens, dict.fromkeys(request_ids, [0] * self.num_spec_tokens))
        return Decision(self.manager.assign(slots).tolist(), self.num_spec_tokens, "vllm")

    def observe(
        self,
        request_ids: Sequence[str],
        num_draft_tokens: Sequence[int],
        num_accepted_tokens: Sequence[int],
    ) -> None:
        """Grade the drafts of the step decided last."""
        assert self._features is not None
        drafted, accepted = (np.array(column, dtype=np.int64) for column in (num_draft_tokens, num_accepted_tokens))
        self.estimator.observe(self._features, self._predicted, drafted, accepted)
        self._graded(drafted, accepted)

    def _told(self, predicted: Floats, slots: Ints, context_tokens: int) -> Floats:
        """Return the manager's input for its estimates."""
        return predicted

    def _graded(self, num_draft_tokens: Ints, num_accepted_tokens: Ints) -> None:
        """Note that the drafts of the step decided last have been verified."""

    def _take_in(self, request_id: str) -> None:
        self._newcomers.remove(request_id)
        self.manager.add_request(self._slots[request_id])


class FedVerification(AdaptiveVerification):
    """The same, fed as by `attach.runner.fed_verification`: honed's costs once a second, estimates at each workload's level."""

    def __init__(self, traffic: Traffic, seed: int = 0) -> None:
        super().__init__(traffic, seed)
        trace = traffic.trace
        self._captured = trace.costs[0][1].captured_tokens
        settings = ControllerSettings(captured_tokens=self._captured)
        self._controller = EngineController("synthetic", trace.num_spec_tokens, trace.max_num_seqs, settings)
        self._levels = FedLevels(trace.max_num_seqs, trace.num_spec_tokens, MAX_WORKLOADS, _CPU)
        self._numbers: dict[str, int] = {}
        self._batch = (1, 0)
        self._decided = np.zeros(0, dtype=np.int64)
        self._curves: tuple[Curve, Curve] | None = None
        self._due_s = 0.0

    def start(self, request_id: str, workload: str = "default", ceiling: int = -1) -> None:
        """Add a request of a workload."""
        super().start(request_id, workload, ceiling)
        number = self._numbers.setdefault(workload, len(self._numbers) + 1)
        self._levels.set_workloads(torch.tensor([self._slots[request_id]]), torch.tensor([number]))

    def take(self, batch: EventBatch, now_s: float) -> None:
        """Learn prices from a batch, and pass them on when they have moved."""
        self._controller.observe(batch)
        if now_s < self._due_s:
            return
        self._due_s = now_s + PROPOSE_S
        model = StepTimeModel.from_policy(self._controller.propose(now_s))
        if not model.is_ready:
            return
        states = self.manager.req_states
        curves = cost_curves(
            model,
            num_requests=self._batch[0],
            context_tokens=self._batch[1],
            num_spec_tokens=self.num_spec_tokens,
            max_num_seqs=states.max_num_reqs,
            max_tokens=states.max_num_batched_tokens,
            captured_tokens=self._captured,
        )
        if self._curves is None or not are_alike(self._curves, curves):
            self._curves = curves
            self.manager.set_cost_curves(*curves)

    def _graded(self, num_draft_tokens: Ints, num_accepted_tokens: Ints) -> None:
        accepted = torch.from_numpy(num_accepted_tokens)
        self._levels.observe(torch.from_numpy(self._decided), accepted + 1, torch.from_numpy(num_draft_tokens) - accepted)

    def _told(self, predicted: Floats, slots: Ints, context_tokens: int) -> Floats:
        self._batch, self._decided = (len(slots), context_tokens), slots
        shifted: Floats = self._levels.apply(torch.from_numpy(slots), torch.from_numpy(predicted)).numpy()
        return shifted
