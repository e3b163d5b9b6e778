"""Copies to the host what vLLM's V2 runner keeps on the device: ids and number of the drafts that a step verifies.

Its scheduler knows only placeholders. Under vLLM's adaptive verification, which trims drafts on the device, it doesn't even
know their number. Both are gathered after a step's forward pass is dispatched, before the draft pass overwrites them. They
travel on the stream that then carries the step's sampled tokens: vLLM's event for these covers both. So nothing here waits for
the device, and an id is on the host one step after it was drafted. Rows go through a ring of buffers, one more than steps can
be under way: a step allocates nothing.

Letters: R = requests in the batch, S = max_num_reqs, K = num_speculative_steps. Source: `vllm/v1/worker/gpu/model_runner.py`,
`prepare_inputs` and `sample_tokens`, and `async_utils.py`, `AsyncOutput`. An `AsyncOutput` with the verified draft token ids
and their number would replace this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from honed.attach.events.step_log import DRAFT_IDS, NUM_VERIFIED


class _Buffers:
    """Device and host buffers of one step: ids [S, K], logits a request [S]."""

    def __init__(self, drafts: torch.Tensor, counts: torch.Tensor) -> None:
        is_cuda = drafts.is_cuda
        self.device = (torch.empty_like(drafts), torch.empty_like(counts))
        self.host = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in self.device) if is_cuda else self.device
        self.gathered = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]


class VerifiedDrafts:
    """Adds the verified draft token ids to a V2 model runner's output while `are_ids_wanted`, and each request's number of
    verified drafts where vLLM trims them on the device.

    Args:
        model_runner: vLLM's V2 `GPUModelRunner`.
        max_steps_under_way: most steps that are dispatched before the first one's output is taken.

    Raises:
        TypeError: the runner lacks an attribute that this needs.
    """

    def __init__(self, model_runner: Any, max_steps_under_way: int) -> None:
        needed = ("req_states", "execute_model_state", "output_copy_stream", "adaptive_verification")
        if missing := [name for name in needed if not hasattr(model_runner, name)]:
            raise TypeError(f"{type(model_runner).__name__} has no {missing[0]}: draft token ids stay unknown")
        self._runner = model_runner
        drafts = model_runner.req_states.draft_tokens
        counts = torch.empty(len(drafts), dtype=torch.int32, device=drafts.device)
        self._ring = [_Buffers(drafts, counts) for _ in range(max_steps_under_way + 1)]
        self._next = 0
        self._gathered: dict[str, torch.Tensor] = {}
        self.are_ids_wanted = False

    def wrap(self, on_error: Callable[[str], None]) -> None:
        """Gather after each forward pass from now on; errors go to `on_error`, and vLLM goes on."""
        execute, sample = self._runner.execute_model, self._runner.sample_tokens

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            output = execute(scheduler_output, *args, **kwargs)
            self._gathered = {}
            if not kwargs.get("dummy_run"):
                try:
                    self._gather(scheduler_output)
                except Exception:
                    on_error("verified_drafts")
            return output

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            rows, self._gathered = self._gathered, {}
            output = sample(*args, **kwargs)
            if rows and hasattr(output, "get_output"):
                output.get_output = _adding(rows, output.get_output, on_error)
            return output

        self._runner.execute_model, self._runner.sample_tokens = execute_model, sample_tokens

    @torch.inference_mode()
    def _gather(self, scheduler_output: Any) -> None:
        state, is_trimming = self._runner.execute_model_state, self._runner.adaptive_verification is not None
        # The scheduler's output decides: the batch doesn't know drafts that were all trimmed.
        if state is None or not scheduler_output.scheduled_spec_decode_tokens or not (is_trimming or self.are_ids_wanted):
            return
        batch, buffers = state.input_batch, self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        ids, counts = (buffer[: batch.num_reqs] for buffer in buffers.device)
        wanted = {}
        if self.are_ids_wanted:
            torch.index_select(self._runner.req_states.draft_tokens, 0, batch.idx_mapping, out=ids)
            wanted[DRAFT_IDS] = 0
        if is_trimming:  # a request has logits for each verified draft and one more
            ends = batch.cu_num_logits[: batch.num_reqs + 1]
            torch.sub(ends[1:], ends[:-1], out=counts)
            wanted[NUM_VERIFIED] = 1
        if buffers.gathered is not None:
            side = self._runner.output_copy_stream
            buffers.gathered.record()
            side.wait_event(buffers.gathered)
            with torch.cuda.stream(side):
                for index in wanted.values():
                    buffers.host[index][: batch.num_reqs].copy_(buffers.device[index][: batch.num_reqs], non_blocking=True)
        self._gathered = {name: buffers.host[index][: batch.num_reqs] for name, index in wanted.items()}


def _adding(rows: dict[str, torch.Tensor], get_output: Callable[[], Any], on_error: Callable[[str], None]) -> Callable[[], Any]:
    """`AsyncOutput.get_output`, which waits for vLLM's own event, followed by the gathered rows."""

    def get_output_with_drafts() -> Any:
        output = get_output()
        try:
            for name, tensor in rows.items():
                values: npt.NDArray[np.integer[Any]] = tensor.numpy().copy()
                setattr(output, name, values - 1 if name == NUM_VERIFIED else values)
        except Exception:
            on_error("verified_drafts")
        return output

    return get_output_with_drafts
