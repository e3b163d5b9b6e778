"""Brings the ids of the draft tokens that a step verifies to the host, for the log: vLLM's V2 runner keeps them on the device.

Its scheduler knows placeholders only. A step's drafts are gathered when its forward pass has been dispatched, before the draft
pass overwrites them, and travel on the stream on which vLLM then brings the step's sampled tokens: the event that covers these
covers the ids too. So nothing here waits for the device, and an id is on the host one step after it was drafted. Rows go
through a ring of buffers, one more than steps can be under way: a step allocates nothing.

Letters: R = requests in the batch, S = max_num_reqs, K = num_speculative_steps. Source: `vllm/v1/worker/gpu/model_runner.py`,
`sample_tokens`, and `async_utils.py`, `AsyncOutput`. What would replace it: `AsyncOutput` with the verified draft token ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from honed.attach.step_log import DRAFT_IDS


class _Buffers:
    """What one step's ids are gathered and brought in."""

    def __init__(self, like: torch.Tensor) -> None:  # [S, K]
        self.host = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        self.device = torch.empty_like(like) if like.is_cuda else self.host
        self.gathered = torch.cuda.Event() if like.is_cuda else None  # type: ignore[no-untyped-call]


class DraftIds:
    """Adds the verified draft token ids to what a V2 model runner returns, while `is_on`.

    Args:
        model_runner: vLLM's V2 `GPUModelRunner`.
        max_steps_under_way: most steps that are dispatched before the first one's output was taken.

    Raises:
        TypeError: the runner lacks what this relies on.
    """

    def __init__(self, model_runner: Any, max_steps_under_way: int) -> None:
        needed = ("req_states", "execute_model_state", "output_copy_stream", "execute_model", "sample_tokens")
        if missing := [name for name in needed if not hasattr(model_runner, name)]:
            raise TypeError(f"{type(model_runner).__name__} has no {missing[0]}: draft token ids stay unknown")
        self._runner = model_runner
        self._ring = [_Buffers(model_runner.req_states.draft_tokens) for _ in range(max_steps_under_way + 1)]
        self._next = 0
        self._gathered: torch.Tensor | None = None
        self.is_on = False

    def wrap(self, on_error: Callable[[str], None]) -> None:
        """From now on gather after each forward pass; what goes wrong is told to `on_error`, and vLLM goes on."""
        execute, sample = self._runner.execute_model, self._runner.sample_tokens

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            output = execute(*args, **kwargs)
            self._gathered = None
            if self.is_on and not kwargs.get("dummy_run"):
                try:
                    self._gather()
                except Exception:
                    on_error("draft_ids")
            return output

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            rows, self._gathered = self._gathered, None
            output = sample(*args, **kwargs)
            if rows is not None and hasattr(output, "get_output"):
                output.get_output = _adding(rows, output.get_output)
            return output

        self._runner.execute_model, self._runner.sample_tokens = execute_model, sample_tokens

    @torch.inference_mode()
    def _gather(self) -> None:
        state = self._runner.execute_model_state
        if state is None or not state.input_batch.num_draft_tokens:
            return
        batch, buffers = state.input_batch, self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        gathered, rows = buffers.device[: batch.num_reqs], buffers.host[: batch.num_reqs]
        torch.index_select(self._runner.req_states.draft_tokens, 0, batch.idx_mapping, out=gathered)
        if buffers.gathered is not None:
            side = self._runner.output_copy_stream
            buffers.gathered.record()
            side.wait_event(buffers.gathered)
            with torch.cuda.stream(side):
                rows.copy_(gathered, non_blocking=True)
        self._gathered = rows


def _adding(rows: torch.Tensor, get_output: Callable[[], Any]) -> Callable[[], Any]:
    """`AsyncOutput.get_output`, which waits for vLLM's own event, and then the ids."""

    def get_output_with_ids() -> Any:
        output = get_output()
        setattr(output, DRAFT_IDS, rows.numpy().copy())
        return output

    return get_output_with_ids
