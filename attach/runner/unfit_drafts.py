"""Tells on V1 which drafts nobody drafted: where a batch doesn't fit the drafter's context, vLLM puts zeros in their place.

It asks once for the whole batch (`_input_fits_in_drafter`). So one request that is longer than the drafter's context, or near
`max_model_len`, takes the drafts of all. Each request's next step verifies the zeros: under pipeline parallelism, and where not
all fit in a step, it isn't the runner's next one. They say nothing about the drafter, so their rounds are told as those whose
drafts weren't verified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from honed.attach.events.step_log import UNWALKED


class UnfitDrafts:
    """Marks such rounds on the output of a V1 `GPUModelRunner`.

    Raises:
        AttributeError: the runner lacks a method that this needs.
    """

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._fits, self._execute = model_runner._input_fits_in_drafter, model_runner.execute_model
        self._sample = model_runner.sample_tokens
        self._zeroed: set[str] = set()
        """Requests whose next drafts are zeros."""
        self._unfit: set[str] = set()
        """Requests of the step under way whose drafts are zeros."""

    def wrap(self, on_error: Callable[[str], None]) -> None:
        """Mark them from now on; errors go to `on_error`, and vLLM goes on."""
        runner = self._runner

        def input_fits_in_drafter(*args: Any, **kwargs: Any) -> Any:
            found = self._fits(*args, **kwargs)
            try:
                if not found:
                    self._zeroed.update(runner.input_batch.req_ids)
                elif self._zeroed:
                    self._zeroed.difference_update(runner.input_batch.req_ids)
            except Exception:
                on_error("drafts that don't fit")
            return found

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if self._zeroed:
                    self._zeroed -= scheduler_output.finished_req_ids
                    self._unfit = self._zeroed & scheduler_output.scheduled_spec_decode_tokens.keys()
            except Exception:
                on_error("drafts that don't fit")
            return self._execute(scheduler_output, *args, **kwargs)

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            unfit, self._unfit = self._unfit, set()
            output = self._sample(*args, **kwargs)
            if unfit and hasattr(output, "get_output"):
                output.get_output = _marking(unfit, output.get_output)
            elif unfit and output is not None:
                _mark(output, unfit)
            return output

        runner._input_fits_in_drafter = input_fits_in_drafter
        runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


def _marking(unfit: set[str], get_output: Callable[[], Any]) -> Callable[[], Any]:
    def get_marked_output() -> Any:
        return _mark(get_output(), unfit)

    return get_marked_output


def _mark(output: Any, unfit: set[str]) -> Any:
    setattr(output, UNWALKED, unfit.union(getattr(output, UNWALKED, ())))
    return output
