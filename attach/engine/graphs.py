"""CUDA graphs that vLLM captured for decode steps, and how to get one for every wanted draft length.

vLLM's V2 runner captures full decode graphs for one draft length, K. If `num_speculative_tokens_per_batch_size` names more
lengths, it captures graphs for each. A step runs in one of them when all its requests have that length. Attention backends that
take any mix have graphs without a length. Any other step falls back to piecewise graphs, or none. So a controller must know the
lengths (`captured`), and vLLM's own table, which got them captured, must not choose between them (`LengthTable`).

Source: `vllm/v1/worker/gpu/cudagraph_utils.py`, `CudaGraphManager._init_candidates`; `vllm/v1/core/sched/scheduler.py`,
`dynamic_sd_lookup`. Captured shapes in a worker's report, and draft lengths as an argument of capture, would replace this.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Captured(NamedTuple):
    """Full decode graphs."""

    token_counts: list[int]
    """Tokens of a step that they were captured for, ascending: a step between two of them is padded."""
    lengths: list[int]
    """Their draft lengths, ascending, the same for all requests of a step; empty: any mix, or there are no graphs."""


def captured(model_runner: Any) -> Captured:
    """Inspect a V2 model runner; empty before its graphs are captured, and for other runners."""
    graphs = getattr(getattr(model_runner, "cudagraph_manager", None), "graphs", None) or {}
    shapes = [shape for shape in graphs if shape.num_active_loras == 0 and shape.num_ubatches == 1]
    # A request's row is one known token and its drafts.
    lengths = {shape.uniform_token_count - 1 for shape in shapes if shape.uniform_token_count}
    is_any_mix = any(shape.uniform_token_count is None for shape in shapes)
    return Captured(sorted({shape.num_tokens for shape in shapes}), [] if is_any_mix else sorted(lengths))


class LengthTable:
    """vLLM's own draft length by batch size: set aside while honed decides, restored when it doesn't.

    Args:
        scheduler: vLLM's; it reads its table anew in every step.
        num_spec_tokens: K, the table's value while honed decides.
    """

    def __init__(self, scheduler: Any, num_spec_tokens: int) -> None:
        self._lookup: list[int] | None = getattr(scheduler, "dynamic_sd_lookup", None)
        self._theirs = list(self._lookup or ())
        self._ours = [num_spec_tokens] * len(self._theirs)
        self._is_aside = False

    def set_aside(self, is_aside: bool) -> None:
        """Set whether honed decides from the next step on."""
        if self._lookup is not None and is_aside != self._is_aside:
            self._is_aside = is_aside
            self._lookup[:] = self._ours if is_aside else self._theirs
