"""Is this vLLM one that the attachment knows? Checked once, at attach, as far as the scheduler's own class goes.

`contract.py` lists what each capability relies on. Where something doesn't fit, that capability is left out and the reason is
said once; when even "events" doesn't fit, nothing is attached. Nothing here may raise.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from honed.attach.contract.contract import CONTRACT, Method

SUPPORTED = ((0, 32), (0, 34))
"""vLLM releases from the first, up to but not including the second."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What can be done on this engine, and why what is missing is missing."""

    capabilities: tuple[str, ...]
    limits: tuple[str, ...]
    is_known: bool = True
    """Whether this vLLM is of a release that honed was made for."""


def check(base: type, vllm_config: Any, vllm_version: str) -> Findings:
    """All findings on an engine. Of a vLLM that isn't known nothing but its events is touched.

    Args:
        base: the scheduler class that is subclassed.
        vllm_config: vLLM's configuration.
        vllm_version: for example "0.32.0+cpu".
    """
    scheduler, features = check_scheduler(base, vllm_version), check_features(vllm_config)
    limits = scheduler.limits + features.limits
    if not is_supported(vllm_version):
        return Findings(scheduler.capabilities, limits, is_known=False)
    without = {name for name in scheduler.capabilities if any(limit.startswith(f"{name} is off") for limit in limits)}
    return Findings(tuple(c for c in scheduler.capabilities + features.capabilities if c not in without), limits)


def check_scheduler(base: type, vllm_version: str) -> Findings:
    """Compare a vLLM scheduler class (Scheduler or AsyncScheduler) with what the contract wants of it."""
    limits: list[str] = []
    is_known = is_supported(vllm_version)
    if not is_known:
        low, high = (".".join(map(str, v)) for v in SUPPORTED)
        limits.append(
            f"vLLM {vllm_version} is outside the range honed was made for (>={low},<{high}): only observing; "
            "install a supported vLLM, or a newer honed"
        )
    capabilities = []
    for capability in ("events", "draft_length"):
        needed = [c for c in CONTRACT[capability] if isinstance(c, Method) and c.owner == "Scheduler" and c.name != "__init__"]
        misfits = [text for method in needed if (text := _misfit(base, method.name, (*method.first, *method.parameters)))]
        if misfits:
            limits.append(f"{capability} is off: {'; '.join(misfits)}")
        elif is_known or capability == "events":
            capabilities.append(capability)
    return Findings(tuple(capabilities), tuple(limits))


def check_features(vllm_config: Any) -> Findings:
    """What the engine's own configuration rules out: capture and swap are for DFlash, on one pipeline stage.

    Under vLLM's adaptive verification the layout of a step's rows is known to the device alone. What it goes by can be fed.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return Findings((), ("the engine was started without a --speculative-config: there is nothing to tune",))
    limits: list[str] = []
    capabilities: tuple[str, ...] = ("capture", "swap")
    method = getattr(speculative, "method", "")
    if method != "dflash":
        limits.append(f"capture and swap are off: they are for method 'dflash', this engine runs '{method}'")
        capabilities = ()
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        limits.append("capture and swap are off: pipeline parallelism splits the hidden states over processes")
        capabilities = ()
    if "capture" in capabilities and getattr(getattr(vllm_config, "model_config", None), "uses_mrope", False):
        limits.append("capture is off: the target's positions are multi-dimensional (M-RoPE), which no drafter is trained with")
        capabilities = ("swap",)
    if getattr(speculative, "enable_adaptive_verification", False):
        limits.append("draft_length is off: vLLM's own adaptive verification is on and would cut the same drafts")
        limits.append("capture is off: under vLLM's own adaptive verification only the device knows which rows are whose")
        capabilities = tuple(c for c in capabilities if c != "capture")
        if vllm_config.parallel_config.tensor_parallel_size == 1:
            capabilities += ("estimates",)
        else:  # each rank chooses by its own, and sums of one rank and another differ in their last bits
            limits.append("estimates are off: under tensor parallelism all ranks have to choose by the very same")
    return Findings(capabilities, tuple(limits))


def has_worker_extension(vllm_config: Any) -> bool:
    """Whether the workers have honed's methods."""
    name = vllm_config.parallel_config.worker_extension_cls
    return bool(name) and hasattr(pkgutil.resolve_name(name), "honed_attach")


def can_shorten_block(vllm_config: Any) -> bool:
    """Whether drafting fewer tokens than K in a step saves anything, and is allowed.

    V2 always drafts K, and its CUDA graphs want that length. Data-parallel ranks of a model with experts take their steps
    together: ranks that draft differently often wait for each other for ever, so vLLM switches its own dynamic lengths off
    there (`config/vllm.py`, `_maybe_disable_dynamic_sd_for_data_parallel`). Other models' replicas are told they are alone.
    Under pipeline parallelism several batches are under way at once, and drafts are fetched for one while another is planned.
    """
    return not vllm_config.use_v2_model_runner and _is_alone(vllm_config)


def can_skip_draft_pass(vllm_config: Any) -> bool:
    """Whether a step of V2 in which nothing is drafted can be spared the draft pass (`idle_drafts`)."""
    is_dflash = vllm_config.speculative_config.method == "dflash"
    return bool(vllm_config.use_v2_model_runner and is_dflash and _is_alone(vllm_config))


def _is_alone(vllm_config: Any) -> bool:
    parallel = vllm_config.parallel_config
    return bool(parallel.data_parallel_size == 1 and parallel.pipeline_parallel_size == 1)


def is_supported(version: str) -> bool:
    """Whether a vLLM release, like "0.32.0+cpu", is one that honed was made for."""
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
