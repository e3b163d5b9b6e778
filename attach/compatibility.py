"""Is this vLLM one that the attachment knows? Checked once, at attach, against what the code really calls.

Each capability lists what it relies on. Where something doesn't fit, that capability is left out and the reason is said
once; when even "events" doesn't fit, nothing is attached. Nothing here may raise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SUPPORTED = ((0, 32), (0, 34))
"""vLLM releases from the first, up to but not including the second."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What can be done on this engine, and why what is missing is missing."""

    capabilities: tuple[str, ...]
    limits: tuple[str, ...]


_SCHEDULER_NEEDS: dict[str, dict[str, tuple[str, ...]]] = {
    "events": {
        "schedule": (),
        "update_from_output": ("scheduler_output", "model_runner_output"),
        "make_spec_decoding_stats": (
            "spec_decoding_stats",
            "num_draft_tokens",
            "num_accepted_tokens",
            "num_invalid_spec_tokens",
            "request_id",
        ),
        "add_request": ("request",),
        "_free_request": ("request",),
        "has_unfinished_requests": (),
        "get_request_counts": (),
    },
    "draft_length": {
        "_update_after_schedule": ("scheduler_output",),
        "update_draft_token_ids": ("draft_token_ids",),
    },
}


def check_scheduler(base: type, vllm_version: str) -> Findings:
    """Compare a vLLM scheduler class with what the attachment overrides.

    Args:
        base: the class that is subclassed (Scheduler or AsyncScheduler).
        vllm_version: for example "0.32.0+cpu".
    """
    limits: list[str] = []
    is_known = _is_supported(vllm_version)
    if not is_known:
        low, high = (".".join(map(str, v)) for v in SUPPORTED)
        limits.append(
            f"vLLM {vllm_version} is outside the range honed was made for (>={low},<{high}): only observing; "
            "install a supported vLLM, or a newer honed"
        )
    capabilities = []
    for capability, methods in _SCHEDULER_NEEDS.items():
        misfits = [text for name, names in methods.items() if (text := _misfit(base, name, names))]
        if misfits:
            limits.append(f"{capability} is off: {'; '.join(misfits)}")
        elif is_known or capability == "events":
            capabilities.append(capability)
    return Findings(tuple(capabilities), tuple(limits))


def check_features(vllm_config: Any) -> Findings:
    """What the engine's own configuration rules out: capture and swap are for DFlash, on one pipeline stage."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return Findings((), ("the engine was started without a --speculative-config: there is nothing to tune",))
    limits = []
    method = getattr(speculative, "method", "")
    if method != "dflash":
        limits.append(f"capture and swap are off: they are for method 'dflash', this engine runs '{method}'")
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        limits.append("capture and swap are off: pipeline parallelism splits the hidden states over processes")
    if getattr(speculative, "enable_adaptive_verification", False):
        limits.append("draft_length is off: vLLM's own adaptive verification is on and would cut the same drafts")
    return Findings(() if limits else ("capture", "swap"), tuple(limits))


def _is_supported(version: str) -> bool:
    parts = version.split("+")[0].split(".")
    try:
        release = (int(parts[0]), int(parts[1]))
    except (IndexError, ValueError):
        return False
    return SUPPORTED[0] <= release < SUPPORTED[1]


def _misfit(owner: type, name: str, parameters: tuple[str, ...]) -> str:
    method: Callable[..., Any] | None = getattr(owner, name, None)
    if not callable(method):
        return f"{owner.__name__}.{name} is missing"
    have = inspect.signature(method).parameters
    absent = [p for p in parameters if p not in have]
    return f"{owner.__name__}.{name} has no parameter {', '.join(absent)}" if absent else ""
