"""Settings of honed inside vLLM, from the environment variables that switch it on."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from honed.adapt.protocol import attach_variables as variables
from honed.adapt.protocol.attach_variables import RUNTIME_DIR, VARIABLES
from honed.adapt.protocol.folder_owner import why_untrusted

OF_THE_DAEMON = ("HONED_CONFIG", "HONED_STATE_DIR", "HONED_LOG_LEVEL")
"""Variables of the daemon, beside HONED_<SECTION>__<KEY>; one environment file may serve both sides."""


@dataclass(frozen=True, slots=True)
class AttachSettings:
    """Settings that the attachment needs before it hears from the daemon."""

    runtime_dir: Path
    engine_id: str
    is_capture_on: bool = True
    ring_bytes: int = variables.RING_BYTES
    """Size of the shared-memory sample ring."""
    queue_bytes: int = variables.QUEUE_BYTES
    """Most bytes of encoded events kept until the daemon acknowledges them; older ones are dropped and counted."""
    feature_kind: str = variables.FEATURES[0]
    """"fused" (hidden_norm(fc(aux)), H values a row) or "layers" (the aux hidden states: needed to train `fc`)."""
    wants_trees: bool = False
    """Verify draft trees: the server's draft tokens are slots for their nodes."""
    wants_tree_graphs: bool = False
    """Also where vLLM captured CUDA graphs."""

    @property
    def socket_endpoint(self) -> str:
        """ZeroMQ endpoint of the daemon."""
        return f"ipc://{self.runtime_dir}/engine.sock"

    @property
    def engine_dir(self) -> Path:
        """Folder of this engine's shared files."""
        return self.runtime_dir / "engines" / self.engine_id

    @property
    def ring_path(self) -> Path:
        """File of the sample ring."""
        return self.engine_dir / "ring"

    @property
    def busy_path(self) -> Path:
        """File whose first byte says whether the engine has work."""
        return self.engine_dir / "busy"


def from_environment(environ: Mapping[str, str], data_parallel_index: int = 0) -> AttachSettings | None:
    """Read the settings; None when honed is not switched on (no HONED_RUNTIME_DIR).

    Raises:
        ValueError: a variable has an unusable value; the text names it and the valid ones.
    """
    runtime_dir = environ.get(RUNTIME_DIR, "").strip()
    if not runtime_dir:
        return None
    _check_owner(Path(runtime_dir))
    return AttachSettings(
        runtime_dir=Path(runtime_dir).absolute(),  # daemon and trainer get paths below it
        engine_id=f"{variables.engine_name(environ)}-{data_parallel_index}",
        is_capture_on=variables.is_capture_on(environ),
        ring_bytes=variables.ring_bytes(environ),
        queue_bytes=variables.queue_bytes(environ),
        feature_kind=variables.feature_kind(environ),
        wants_trees=variables.wants_trees(environ),
        wants_tree_graphs=variables.wants_tree_graphs(environ),
    )


def _check_owner(folder: Path) -> None:
    """Raise ValueError if somebody else may have made the folder to hear what vLLM sends. It may also be missing yet."""
    try:
        found, parent = folder.lstat(), folder.parent.stat()
    except OSError:
        return
    if why := why_untrusted(folder, found.st_mode, found.st_uid, parent.st_mode, os.getuid()):
        raise ValueError(f"{RUNTIME_DIR}: {why}: remove it, or set a folder of your own")


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """One sentence for each HONED_* variable that neither side reads; the daemon checks the names of settings."""
    known = (*VARIABLES, *OF_THE_DAEMON)
    found = []
    for name in sorted(environ):
        if name.startswith("HONED_") and "__" not in name and name not in known and not name.startswith("HONED_TEST_"):
            near = difflib.get_close_matches(name, known, n=1)
            found.append(f"unknown variable {name} is ignored" + (f"; did you mean {near[0]}?" if near else ""))
    return found
