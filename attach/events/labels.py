"""Labels that clients give a request: read with care, cut to their bound, and never an error.

`RequestBook` bounds their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from honed.adapt.protocol.workloads import DEFAULT_WORKLOAD, MAX_LABEL_CHARS

WORKLOAD = "honed_workload"
_ON = ("1", "1.0", "true", "yes", "on")
"""What else somebody has written for `honed_capture` was to keep this request out of the training."""


@dataclass(frozen=True, slots=True)
class Labels:
    """A client's labels for a request, in vLLM's `extra_args` (`vllm_xargs` over HTTP)."""

    workload: str = DEFAULT_WORKLOAD
    max_draft_tokens: int = -1
    """Ceiling for this request, -1: none."""
    session: str = ""
    is_captured: bool = True


def read_labels(sampling_params: Any) -> Labels:
    """Read a request's labels; unusable values are ignored."""
    extra: Mapping[str, Any] = (sampling_params.extra_args if sampling_params is not None else None) or {}
    return Labels(
        workload=_text(extra.get(WORKLOAD, ""))[:MAX_LABEL_CHARS] or DEFAULT_WORKLOAD,
        max_draft_tokens=_ceiling(extra.get("honed_max_draft_tokens", -1)),
        session=_text(extra.get("honed_session", "")),
        is_captured=str(extra.get("honed_capture", 1)).strip().lower() in _ON,
    )


def _text(value: Any) -> str:
    """A label as text that can be encoded: half a surrogate pair becomes a question mark."""
    return str(value).encode(errors="replace").decode()


def _ceiling(value: Any) -> int:
    try:
        return max(int(value), -1)
    except (TypeError, ValueError, OverflowError):  # a word, NaN, infinity
        return -1
