"""The target's draw at every row of a tree, on vLLM's V1 runner: by vLLM's own top-k and top-p, and its own noise."""

from __future__ import annotations

from typing import Any

import torch

from honed.attach.trees.tree_step import TreeStep

_GREEDY = 1e-5
"""vLLM samples greedily below this temperature."""


MOST_DRAWN_BYTES = 1 << 30
"""Most bytes of float32 logits that are sampled at a time. vLLM's rejection sampler on V2 has the same limit."""


def draw(
    logits: torch.Tensor, rows: torch.Tensor, step: TreeStep, sampling_metadata: Any
) -> torch.Tensor:  # [L, V], [R] -> [R] int64
    """Draw a token at each row of a step's trees; waits for nothing.

    Args:
        logits: of the batch.
        rows: those of the trees among them.
        sampling_metadata: vLLM's, of the batch.
    """
    most = max(MOST_DRAWN_BYTES // (4 * logits.shape[1]), 1)
    parts = (slice(start, start + most) for start in range(0, len(rows), most))
    return torch.cat([_draw(logits[rows[part]], part, step, sampling_metadata) for part in parts])


def _draw(logits: torch.Tensor, part: slice, step: TreeStep, sampling_metadata: Any) -> torch.Tensor:  # [R', V] -> [R']
    greedy = logits.argmax(-1)
    if sampling_metadata.all_greedy:
        return greedy
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, random_sample

    request, generators = step.batch_index[step.request[part]], sampling_metadata.generators
    temperature = sampling_metadata.temperature[request]
    is_greedy = temperature < _GREEDY
    scaled = logits.float().div_(torch.where(is_greedy, 1.0, temperature)[:, None])
    top_k, top_p = (None if x is None else x[request] for x in (sampling_metadata.top_k, sampling_metadata.top_p))
    scaled = apply_top_k_top_p(scaled, top_k, top_p)
    indices = enumerate(step.batch_rows[part]) if generators else ()
    of_rows = {row: generators[index] for row, index in indices if index in generators}
    return torch.where(is_greedy, greedy, random_sample(scaled.softmax(-1, dtype=torch.float32), of_rows).long())
