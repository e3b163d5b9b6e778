"""Requests whose next tokens depend on more than the path to a node: they keep vLLM's own chain."""

from __future__ import annotations

from typing import Any

from honed.attach.events.steering import is_steered


def needs_chain(sampling_params: Any) -> bool:
    """Whether a request's sampler takes the rows before a draft for its ancestors, which in a tree they aren't.

    That is so for penalties, bad words, grammars, log-probabilities, and processors that look at the output so far.
    """
    p = sampling_params
    return p is None or is_steered(p) or p.min_p > 0.0 or p.num_logprobs is not None or p.prompt_logprobs is not None
