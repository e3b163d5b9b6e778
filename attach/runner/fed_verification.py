"""Feeds vLLM's adaptive verification with honed's figures: current step costs, and acceptance at each workload's level.

vLLM's rule still decides, on the device and with the drafts at hand. Its two inputs are changed outside of any CUDA graph:
`record_confidences` gets the estimates corrected by `FedLevels`, and `set_cost_curves` is called again when costs have changed.
Like vLLM's own estimates, they only decide which drafts are verified: no token depends on them.

Source: `vllm/v1/worker/gpu/spec_decode/adaptive_verification.py`, `AdaptiveVerificationManager`; `speculator.py`,
`observe_verification`. A supported way to set costs, and a hook for estimates, would replace this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from honed.adapt.protocol.workloads import MAX_WORKLOADS
from honed.adapt.steps.vllm_costs import Curve
from honed.attach.events.labels import read_labels
from honed.attach.runner.fed_levels import FedLevels


class FedVerification:
    """One rank's feed; every rank does the same with the same inputs.

    Args:
        model_runner: vLLM's V2 `GPUModelRunner`, with adaptive verification on.

    Raises:
        TypeError: adaptive verification is off, or differs from what honed supports.
    """

    def __init__(self, model_runner: Any) -> None:
        manager, speculator = model_runner.adaptive_verification, model_runner.speculator
        needed = ((manager, ("record_confidences", "set_cost_curves", "cost_tables")), (speculator, ("observe_verification",)))
        for owner, names in needed:
            if missing := [name for name in names if not hasattr(owner, name)]:
                raise TypeError(f"{type(owner).__name__} has no {missing[0]}: vLLM's adaptive verification can't be fed")
        states = model_runner.req_states
        self._runner, self._manager, self._speculator = model_runner, manager, speculator
        self._device = states.draft_tokens.device
        self._slot_of = states.req_id_to_index
        self._shape = tuple(states.draft_tokens.shape)
        self.levels = self._make_levels()
        self._numbers: dict[str, int] = {}
        """Workload -> its number, that of the latest request last."""
        self._number_of: dict[int, int] = {}
        """Slot -> number of its latest request's workload; kept while feeding is off, too."""
        self._measured = manager.cost_tables
        self.is_on = False

    def _make_levels(self) -> FedLevels:
        slots, num_spec_tokens = self._shape
        return FedLevels(slots, num_spec_tokens, MAX_WORKLOADS, self._device)

    def turn(self, is_on: bool) -> None:
        """Feed from now on, or stop: vLLM then uses the costs it measured at its start."""
        if is_on and not self.is_on:
            self._measured = self._manager.cost_tables
            self.levels = self._make_levels()  # nothing was graded while it was off
            self._set_workloads(self._number_of)
        elif self.is_on and not is_on:
            self._manager.cost_tables = self._measured
        self.is_on = is_on

    def set_costs(self, draft: Curve, verify: Curve) -> None:
        """Set the next steps' costs."""
        if self.is_on:
            self._manager.set_cost_curves(draft, verify)

    def wrap(self, on_error: Callable[[str], None]) -> None:
        """From now on watch new requests and estimates; errors go to `on_error`, vLLM's own figures are used."""
        execute, record = self._runner.execute_model, self._manager.record_confidences
        observe = self._speculator.observe_verification

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            output = execute(scheduler_output, *args, **kwargs)
            if scheduler_output.scheduled_new_reqs and not kwargs.get("dummy_run"):
                try:
                    self._take_in(scheduler_output.scheduled_new_reqs)
                except Exception:
                    on_error("fed_verification")
            return output

        def observe_verification(slots: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> Any:
            if self.is_on:
                try:
                    self.levels.observe(slots, num_sampled, num_rejected)
                except Exception:
                    on_error("fed_verification")
            return observe(slots, num_sampled, num_rejected)

        def record_confidences(predicted: torch.Tensor, input_batch: Any) -> Any:
            if self.is_on:
                try:
                    predicted = self.levels.apply(input_batch.idx_mapping, predicted[: input_batch.num_reqs])
                except Exception:
                    on_error("fed_verification")
            return record(predicted, input_batch)

        self._runner.execute_model = execute_model
        self._manager.record_confidences = record_confidences
        self._speculator.observe_verification = observe_verification

    def _take_in(self, requests: Any) -> None:
        numbers = {}
        for new in requests:
            if (slot := self._slot_of.get(new.req_id)) is not None:
                numbers[slot] = self._number(read_labels(new.sampling_params).workload)
        self._number_of |= numbers
        if self.is_on:
            self._set_workloads(numbers)

    def _set_workloads(self, numbers: Mapping[int, int]) -> None:
        """Set the workloads of these slots' requests, without waiting for the device."""
        if numbers:
            both = torch.tensor([list(numbers), list(numbers.values())])
            if self._device.type == "cuda":
                both = both.pin_memory().to(self._device, non_blocking=True)
            self.levels.set_workloads(both[0], both[1])

    def _number(self, workload: str) -> int:
        """A workload's number; a new one gets that of the workload seen longest ago if there are too many."""
        number = self._numbers.pop(workload, None)
        if number is None:
            is_full = len(self._numbers) >= MAX_WORKLOADS
            number = self._numbers.pop(next(iter(self._numbers))) if is_full else len(self._numbers)
        self._numbers[workload] = number
        return number
