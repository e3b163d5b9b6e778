"""Checks whether the attachment supports this vLLM: once, at attach, as far as the scheduler's own class shows it.

`contract.py` lists the needs of each capability. A capability that doesn't fit is left out, and the reason is logged once. When
even "events" doesn't fit, nothing is attached. Nothing here may raise.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from honed.adapt.models.drafter_tensor_names import METHODS
from honed.adapt.models.trainable import why_untrained
from honed.adapt.protocol.fields import MAX_TEXT_CHARS
from honed.attach.contract.contract import CONTRACT, Method
from honed.attach.contract.model_files import pair_of

SUPPORTED = ((0, 32), (0, 34))
"""Supported vLLM releases: from the first, up to but not including the second."""

SHORTENED = ("ngram", "draft_model", "eagle", "eagle3", "mtp", "dflash")
"""Methods whose drafters on V1 take any number of tokens from 0 to K. Source: `propose` in vLLM 0.32 and 0.33."""
SHORTENED_ON_V2 = ("eagle", "eagle3", "mtp")
"""Methods whose drafters on V2 make no pass for tokens that aren't asked for. Source: `TargetDependentARSpeculator.propose`."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Capabilities on this engine, and the reasons for missing ones."""

    capabilities: tuple[str, ...]
    limits: tuple[str, ...]
    is_known: bool = True
    """Whether honed supports this release of vLLM."""
    untrained: tuple[str, ...] = ()
    """Reasons why this target and drafter can't be trained."""


def check(base: type, vllm_config: Any, vllm_version: str) -> Findings:
    """All findings on an engine. On an unsupported vLLM, honed only logs events.

    Args:
        base: the scheduler class that is subclassed.
        vllm_config: vLLM's configuration.
        vllm_version: for example "0.32.0+cpu".
    """
    scheduler, features = check_scheduler(base, vllm_version), check_features(vllm_config)
    limits = scheduler.limits + features.limits
    if not is_supported(vllm_version):
        return replace(scheduler, limits=limits, is_known=False)
    without = {name for name in scheduler.capabilities if any(limit.startswith(f"{name} is off") for limit in limits)}
    capabilities = tuple(c for c in scheduler.capabilities + features.capabilities if c not in without)
    return replace(features, capabilities=capabilities, limits=limits)


def check_scheduler(base: type, vllm_version: str) -> Findings:
    """Compare a vLLM scheduler class (Scheduler or AsyncScheduler) with the contract."""
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
    """Capabilities that the engine's configuration allows: capture needs a pair that can be trained, swap a drafter of honed's.

    Under vLLM's adaptive verification only the device knows the layout of a step's rows. Its estimates can be fed.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return Findings((), ("the engine was started without a --speculative-config: there is nothing to tune",))
    try:
        untrained = why_untrained(pair_of(vllm_config))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        untrained = [f"honed can't tell whether this pair can be trained: {error}"[:MAX_TEXT_CHARS]]
    can_swap = speculative.method in METHODS and vllm_config.parallel_config.pipeline_parallel_size == 1
    off = "capture is off" if can_swap else "capture and swap are off"
    limits = [f"{off}: {reason}" for reason in untrained]
    capabilities: tuple[str, ...] = (*(() if untrained else ("capture",)), *(("swap",) if can_swap else ()))
    if getattr(speculative, "enable_adaptive_verification", False):
        limits.append("draft_length is off: vLLM's own adaptive verification is on and would cut the same drafts")
        if vllm_config.parallel_config.tensor_parallel_size == 1:
            capabilities += ("estimates",)
        else:  # each rank chooses by its own estimates, and sums differ between ranks in their last bits
            limits.append("estimates are off: under tensor parallelism all ranks would need identical estimates")
    if speculative.method == "extract_hidden_states":
        limits.append("draft_length is off: method extract_hidden_states drafts nothing")
    if _breaks_at_shorter_drafts(vllm_config):
        limits.append(
            "draft_length is off: vLLM's Gated DeltaNet on a CPU fails where fewer tokens are drafted than were accepted"
        )
    return Findings(capabilities, tuple(limits), untrained=tuple(untrained))


def _breaks_at_shorter_drafts(vllm_config: Any) -> bool:
    """Whether the target's recurrent layers keep a window of states that only drafts of one length fit.

    Source: vLLM 0.32 `layers/mamba/ops/cpu/gdn_attention.py` (`_spec_forward`). Its kernels for GPUs take any length.
    """
    model, device = (getattr(vllm_config, name, None) for name in ("model_config", "device_config"))
    return bool(getattr(model, "is_hybrid", False)) and getattr(device, "device_type", "") == "cpu"


def has_worker_extension(vllm_config: Any) -> bool:
    """Whether the workers have honed's methods."""
    name = vllm_config.parallel_config.worker_extension_cls
    return bool(name) and hasattr(pkgutil.resolve_name(name), "honed_attach")


def updates_drafter_in_place(vllm_config: Any) -> bool:
    """Whether a draft update through vLLM's own endpoints changes live parameters before it is finished.

    vLLM loads most drafters as it reloads a target: layer by layer, each on `meta` until all of it is there. DFlash's kind is
    kept by `arriving_weights`, except where a transfer writes into the parameters.
    """
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    method = getattr(vllm_config.speculative_config, "method", "")
    return method not in ("dflash", "dspark") or getattr(transfer, "backend", "") in ("sparse_nccl", "sharded_rdt")


def can_shorten_block(vllm_config: Any) -> bool:
    """Whether drafting fewer tokens than K in a step saves anything, and is allowed.

    Of V1's drafters only some take fewer. The others assert that they are asked for K, which would end the engine, or draft one
    where none is wanted (Step 3.5's MTP). Those that draft all tokens in one pass, such as P-EAGLE, make rows for K of them. Of
    these only V1's DFlash can be cut.

    On V2 drafters that draft token after token take fewer, unless each depth has a module of its own. Their graphs may need
    certain lengths: `graphs.Captured.block_lengths`. The others always draft K.

    Data-parallel ranks of a model with experts take their steps together: ranks that draft differently often would wait for
    each other forever. So vLLM switches its own dynamic lengths off there (`config/vllm.py`,
    `_maybe_disable_dynamic_sd_for_data_parallel`). Other models' replicas are told they are alone.
    Under pipeline parallelism several batches are under way at once: drafts of one are fetched while another is planned.
    """
    speculative = vllm_config.speculative_config
    draft_config = getattr(getattr(speculative, "draft_model_config", None), "hf_config", None)
    method = getattr(speculative, "method", "")
    if vllm_config.use_v2_model_runner:
        is_shortened = method in SHORTENED_ON_V2 and not getattr(speculative, "use_multi_module_mtp", lambda: False)()
    else:
        is_shortened = method in SHORTENED and getattr(draft_config, "model_type", "") != "step3p5_mtp"
    if getattr(speculative, "parallel_drafting", False) and method != "dflash":
        is_shortened = False
    return is_shortened and _is_alone(vllm_config)


def can_skip_draft_pass(vllm_config: Any) -> bool:
    """Whether a V2 step that drafts nothing can skip the draft pass (`idle_drafts`)."""
    drafts_at_once = vllm_config.speculative_config.method in ("dflash", "dspark")
    return bool(vllm_config.use_v2_model_runner and drafts_at_once and _is_alone(vllm_config))


def _is_alone(vllm_config: Any) -> bool:
    parallel = vllm_config.parallel_config
    return bool(parallel.data_parallel_size == 1 and parallel.pipeline_parallel_size == 1)


def is_supported(version: str) -> bool:
    """Whether honed supports a vLLM release, like "0.32.0+cpu"."""
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
