"""What tells whether the rows that one version's engine has captured mean the same to another version."""

from __future__ import annotations

from collections.abc import Callable

from honed.recalib.drafter.checkpoint import CheckpointError, read_drafter_config
from honed.recalib.registry.registry import Registry, RegistryError


def contexts_of(registry: Registry) -> Callable[[str, bool], str]:
    """(drafter version, whether rows are fused) -> what is equal for versions whose rows mean the same.

    For fused rows it is the digest of what makes them, for others the target's layers that are read, for a version that isn't
    known its own name.
    """
    known: dict[tuple[str, bool], str] = {}

    def context_of(version: str, is_fused: bool) -> str:
        key = version, is_fused
        if key not in known:
            try:
                known[key] = registry.get(version).context_sha256 if is_fused else _layers(registry, version)
            except (RegistryError, CheckpointError):
                return version
        return known[key]

    return context_of


def _layers(registry: Registry, version: str) -> str:
    return f"layers {list(read_drafter_config(registry.path(version)).target_layer_ids)}"
