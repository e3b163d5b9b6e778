"""CUDA graphs that vLLM captured for decode steps, and how to get one for every wanted draft length.

vLLM's V2 runner captures full decode graphs for one draft length, K. If `num_speculative_tokens_per_batch_size` names more
lengths, it captures graphs for each. A step runs in one of them when all its requests have that length. Under adaptive
verification, and where `cudagraph_mode` is FULL, graphs have no length and take any mix. Any other step falls back to piecewise
graphs, or none. So a controller must know the lengths (`captured`), and vLLM's own table, which got them captured, must not
choose between them (`LengthTable`).

An EAGLE or MTP drafter makes a pass for each further token. Where one graph holds all these passes, it holds them for a length:
K, or the lengths of vLLM's table. Other lengths are drafted without a graph, or K tokens are.

Source: `vllm/v1/worker/gpu/cudagraph_utils.py`, `CudaGraphManager._init_candidates`; `vllm/v1/core/sched/scheduler.py`,
`dynamic_sd_lookup`; `spec_decode/target_dependent_ar/cudagraph_utils.py`, `specialize_spec_tokens`. Captured shapes in a
worker's report, and draft lengths as an argument of capture, would replace this.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple


class Captured(NamedTuple):
    """Full decode graphs."""

    token_counts: list[int]
    """Tokens of a step that they were captured for, ascending: a step between two of them is padded."""
    lengths: list[int]
    """Their draft lengths, ascending, the same for all requests of a step; empty: any mix, or there are no graphs."""
    block_lengths: list[int]
    """Lengths beyond 1, ascending, that the drafter's passes after the first have a graph for; empty: any length is drafted as
    well as any other."""

    def block_for(self, length: int, most: int) -> int:
        """Return the shortest block of so many draft tokens or more that the drafter drafts at full speed; at most `most`."""
        if length < 2 or not self.block_lengths:
            return length
        at = bisect_left(self.block_lengths, length)
        return min(self.block_lengths[at], most) if at < len(self.block_lengths) else most


def captured(model_runner: Any) -> Captured:
    """Inspect a V2 model runner; empty before its graphs are captured, and for other runners."""
    graphs = getattr(getattr(model_runner, "cudagraph_manager", None), "graphs", None) or {}
    shapes = [shape for shape in graphs if shape.num_active_loras == 0 and shape.num_ubatches == 1]
    # A request's row is one known token and its drafts.
    lengths = {shape.uniform_token_count - 1 for shape in shapes if shape.uniform_token_count}
    is_any_mix = any(shape.uniform_token_count is None for shape in shapes)
    token_counts = sorted({shape.num_tokens for shape in shapes})
    return Captured(token_counts, [] if is_any_mix else sorted(lengths), _block_lengths(model_runner))


def padded_to_with_trees(model_runner: Any) -> list[int]:
    """Token counts, ascending, that a V2 runner pads a step with trees to, and any other step that has no full graph.

    They are those of piecewise graphs, which take any mix of lengths; none where vLLM captured none.
    """
    manager = getattr(model_runner, "cudagraph_manager", None)
    if manager is None or manager.cudagraph_mode.mixed_mode().name != "PIECEWISE":
        return []
    return sorted(manager.compilation_config.cudagraph_capture_sizes or ())


def _block_lengths(model_runner: Any) -> list[int]:
    drafter: Any = getattr(model_runner, "speculator", None)
    graphs = getattr(getattr(drafter, "decode_cudagraph_manager", None), "graphs", None)
    if not graphs or not getattr(drafter, "supports_decode_metadata_update", False):  # a graph holds one pass
        return []
    return sorted({getattr(shape, "num_speculative_tokens", drafter.num_speculative_steps) for shape in graphs})


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

    @property
    def is_there(self) -> bool:
        """Whether vLLM was started with one."""
        return self._lookup is not None

    def set_aside(self, is_aside: bool) -> None:
        """Set whether honed decides from the next step on."""
        if self._lookup is not None and is_aside != self._is_aside:
            self._is_aside = is_aside
            self._lookup[:] = self._ours if is_aside else self._theirs
