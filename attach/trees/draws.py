"""The target's draw at every row of a tree, on vLLM's V1 runner: by vLLM's own top-k and top-p, and its own noise."""

from __future__ import annotations

from typing import Any

import torch

from honed.attach.trees.tree_step import TreeStep

_GREEDY = 1e-5
"""vLLM samples greedily below this temperature."""


def draw(logits: torch.Tensor, step: TreeStep, sampling_metadata: Any) -> torch.Tensor:  # [R, V] -> [R] int64
    """Draw a token at each row of a step's trees; waits for nothing.

    Args:
        logits: changed in place.
        sampling_metadata: vLLM's, of the batch.
    """
    greedy = logits.argmax(-1)
    if sampling_metadata.all_greedy:
        return greedy
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, random_sample

    request, generators = step.batch_index[step.request], sampling_metadata.generators
    temperature = sampling_metadata.temperature[request]
    is_greedy = temperature < _GREEDY
    scaled = logits.float().div_(torch.where(is_greedy, 1.0, temperature)[:, None])
    top_k, top_p = (None if x is None else x[request] for x in (sampling_metadata.top_k, sampling_metadata.top_p))
    scaled = apply_top_k_top_p(scaled, top_k, top_p)
    of_rows = {row: generators[index] for row, index in enumerate(step.batch_rows) if index in generators} if generators else {}
    return torch.where(is_greedy, greedy, random_sample(scaled.softmax(-1, dtype=torch.float32), of_rows).long())
