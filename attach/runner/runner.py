"""vLLM's two model runners behind one small interface: the drafter, and the results of a step.

V2 (`vllm/v1/worker/gpu/model_runner.py`) runs on CUDA. V1 (`vllm/v1/worker/gpu_model_runner.py`) runs on a CPU, and on CUDA
where V2 lacks a requested feature. Both call `propose` on their drafter once a step, outside of any CUDA graph, with the
target's hidden states of every scheduled token: it is wrapped on the instance. `execute_model` is wrapped to see requests come
and go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from honed.adapt.models.drafter_tensor_names import METHODS
from honed.attach.runner.top_tokens import TopTokens


@dataclass(frozen=True, slots=True)
class StepView:
    """The drafter's inputs in one step; tensors are the runner's own buffers, valid until the next step.

    Letters: R = requests in the batch, T = scheduled tokens, H = drafter's hidden size, A = size of the aux hidden states.
    """

    req_ids: list[str]
    row_starts: npt.NDArray[np.int64]  # [R + 1]
    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    states: Callable[[], torch.Tensor]  # -> [T, H] after `fc`, before a norm; DFlash: elsewhere the drafter overwrites them
    aux: torch.Tensor | list[torch.Tensor] | None  # [T, A], whole or as layers to concatenate; MTP: the target's last states
    fuse: Callable[[torch.Tensor], torch.Tensor]  # [N, A] -> [N, H]: the drafter's `fc`; MTP: no change
    num_rejected: torch.Tensor | None  # [R] rows at a request's end that hold rejected drafts; None: there are none
    top_tokens: torch.Tensor | None = None  # [T] int32: see `TopTokens.take`


OnStep = Callable[[StepView], None]
OnSchedule = Callable[[Any], None]


class Runner(ABC):
    """One of vLLM's model runners.

    Args:
        model_runner: vLLM's object.
    """

    name: str

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self.top_tokens = TopTokens()
        self.num_steps = 0
        """Steps begun since `count_steps`: the same number on every rank between the same two steps."""
        self.looks_first = False
        """Whether a step's view is taken before the draft pass, for the target's states: a CUDA graph of the drafter may write
        where the target's graph left them. What the drafter makes of them is there after it."""

    @property
    def model_runner(self) -> Any:
        """vLLM's object."""
        return self._runner

    def count_steps(self) -> None:
        """Count steps from now on."""
        execute = self._runner.execute_model

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            self.num_steps += 1
            return execute(*args, **kwargs)

        self._runner.execute_model = execute_model

    @property
    @abstractmethod
    def drafter(self) -> Any:
        """The object whose `propose` drafts."""

    @property
    def draft_model(self) -> Any:
        """The drafter's `DFlashQwen3ForCausalLM`, `Eagle3LlamaForCausalLM` or like, unwrapped."""
        model = self.drafter.model
        return model.unwrap() if hasattr(model, "unwrap") else model

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:  # [N, A] -> [N, H]
        """Apply the drafter's `fc` to hidden states of the target. An MTP head has none, and returns them as they are."""
        combine: Callable[[torch.Tensor], torch.Tensor] | None = getattr(self.draft_model, "combine_hidden_states", None)
        return aux if combine is None else combine(aux)

    @abstractmethod
    def watch_logits(self, on_error: Callable[[str], None]) -> None:
        """Show `top_tokens` each step's logits, from now on and before vLLM's sampler changes them."""

    @abstractmethod
    def view(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepView | None:
        """The arguments of `propose`, before it runs, since it may change them; None for a dummy step."""

    def wrap(self, on_schedule: OnSchedule, on_step: OnStep, on_error: Callable[[str], None]) -> None:
        """Call `on_schedule(scheduler_output)` before each step and `on_step(view)` beside each draft pass, from now on.

        Both run inside vLLM's step: they must not synchronise with the device. Their exceptions go to `on_error`.
        """
        execute, propose, runner = self._runner.execute_model, self.drafter.propose, self
        self.watch_logits(on_error)

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                on_schedule(scheduler_output)
            except Exception:
                on_error("on_schedule")
            return execute(scheduler_output, *args, **kwargs)

        def propose_and_look(*args: Any, **kwargs: Any) -> Any:
            view = None
            try:
                view = runner.view(args, kwargs)
            except Exception:
                on_error("view")
            if runner.looks_first:
                look(view)
            drafts = propose(*args, **kwargs)
            if not runner.looks_first:
                look(view)
            return drafts

        def look(view: StepView | None) -> None:
            try:
                if view is not None:
                    on_step(view)
            except Exception:
                on_error("on_step")

        self._runner.execute_model = execute_model
        self.drafter.propose = propose_and_look


class RunnerV1(Runner):
    """`gpu_model_runner.GPUModelRunner` and its CPU subclass."""

    name = "v1"
    _logits_rows: torch.Tensor | None = None
    """Rows that the last step's logits were of; None: the last one of each request."""

    @property
    def drafter(self) -> Any:
        return self._runner.drafter

    def watch_logits(self, on_error: Callable[[str], None]) -> None:
        sample = self._runner._sample

        def _sample(logits: Any, spec_decode_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                self.top_tokens.look(logits)
                self._logits_rows = None if spec_decode_metadata is None else spec_decode_metadata.logits_indices
            except Exception:
                on_error("top tokens")
            return sample(logits, spec_decode_metadata, *args, **kwargs)

        self._runner._sample = _sample

    def view(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepView | None:
        positions = kwargs["target_positions"]
        if positions.dim() > 1:  # M-RoPE: for text all dimensions are the same
            positions = positions[0]
        metadata = kwargs["common_attn_metadata"]
        starts = metadata.query_start_loc_cpu.numpy().astype(np.int64)
        aux: torch.Tensor = kwargs["target_hidden_states"]
        tops = None
        if self.top_tokens.is_wanted:
            rows = self._logits_rows if self._logits_rows is not None else metadata.query_start_loc[1:] - 1
            tops = self.top_tokens.take(rows, len(kwargs["target_token_ids"]))
        return StepView(
            req_ids=self._runner.input_batch.req_ids[: len(starts) - 1],
            row_starts=starts,
            token_ids=kwargs["target_token_ids"],
            positions=positions,
            states=lambda: self.fuse(aux) if (made := self.drafter._dflash_hidden_states) is None else made,
            aux=aux,
            fuse=self.fuse,
            num_rejected=kwargs["num_rejected_tokens_gpu"],
            top_tokens=tops,
        )


class RunnerV2(Runner):
    """`gpu.model_runner.GPUModelRunner` and its CPU subclass."""

    name = "v2"
    _POSITIONAL = (
        "input_batch",
        "attn_metadata",
        "slot_mappings",
        "last_hidden_states",
        "aux_hidden_states",
        "num_sampled",
        "num_rejected",
    )

    @property
    def drafter(self) -> Any:
        return self._runner.speculator

    def watch_logits(self, on_error: Callable[[str], None]) -> None:
        model, compute = self._runner.model, self._runner.model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            try:
                self.top_tokens.look(logits)
            except Exception:
                on_error("top tokens")
            return logits

        model.compute_logits = compute_logits

    def view(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepView | None:
        if kwargs.get("dummy_run"):
            return None
        given = dict(zip(self._POSITIONAL, args, strict=False)) | kwargs
        batch = given["input_batch"]
        return StepView(
            req_ids=batch.req_ids[: batch.num_reqs],
            row_starts=batch.query_start_loc_np[: batch.num_reqs + 1].astype(np.int64),
            token_ids=batch.input_ids[: batch.num_tokens],
            positions=batch.positions[: batch.num_tokens],
            states=lambda: self.drafter.hidden_states[: batch.num_tokens],
            aux=given["aux_hidden_states"] or given["last_hidden_states"][: batch.num_tokens],
            fuse=self.fuse,
            num_rejected=given["num_rejected"][: batch.num_reqs],
            top_tokens=self.top_tokens.take(batch.logits_indices, batch.num_tokens),
        )


def runner_of(model_runner: Any) -> Runner:
    """The adapter for a worker's model runner.

    Raises:
        TypeError: it is neither of the two, or doesn't speculate with a draft model.
    """
    if getattr(model_runner, "speculator", None) is not None:
        runner: Runner = RunnerV2(model_runner)
    elif getattr(model_runner, "drafter", None) is not None:
        runner = RunnerV1(model_runner)
    else:
        raise TypeError(f"{type(model_runner).__name__} has no drafter that honed supports")
    model = runner.draft_model
    inner = getattr(model, "model", None)
    is_mtp = any(hasattr(inner, name) for name in ("pre_fc_norm_hidden", "mtp_layers"))
    if not hasattr(runner.drafter, "propose") or not (is_mtp or hasattr(model, "combine_hidden_states")):
        raise TypeError(f"the drafter {type(runner.drafter).__name__} is of none of the kinds {', '.join(METHODS)}")
    return runner
