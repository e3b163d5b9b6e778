"""Environment variables that switch on honed inside vLLM: vLLM's processes inherit nothing else from honed."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from honed.adapt.protocol.fields import check_engine_id
from honed.adapt.protocol.folder_owner import why_untrusted

RUNTIME_DIR = "HONED_RUNTIME_DIR"
VARIABLES = (
    RUNTIME_DIR,
    "HONED_ENGINE_ID",
    "HONED_CAPTURE",
    "HONED_RING_BYTES",
    "HONED_QUEUE_BYTES",
    "HONED_FEATURES",
    "HONED_TREES",
)
"""All variables read here."""
OF_THE_DAEMON = ("HONED_CONFIG", "HONED_STATE_DIR", "HONED_LOG_LEVEL")
"""Variables of the daemon, beside HONED_<SECTION>__<KEY>; one environment file may serve both sides."""
GRAPHS = "graphs"
"""Value of HONED_TREES."""
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class AttachSettings:
    """Settings that the attachment needs before it hears from the daemon."""

    runtime_dir: Path
    engine_id: str
    is_capture_on: bool = True
    ring_bytes: int = 64 << 20
    """Size of the shared-memory sample ring."""
    queue_bytes: int = 32 << 20
    """Most bytes of encoded events kept until the daemon acknowledges them; older ones are dropped and counted."""
    feature_kind: str = "fused"
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
    engine_id = environ.get("HONED_ENGINE_ID", "engine").strip() or "engine"
    try:
        check_engine_id(engine_id)
    except ValueError as error:
        raise ValueError(f"HONED_ENGINE_ID: {error}") from error
    feature_kind = environ.get("HONED_FEATURES", "fused")
    if feature_kind not in ("fused", "layers"):
        raise ValueError(f"HONED_FEATURES={feature_kind!r}: use 'fused' or 'layers'")
    return AttachSettings(
        runtime_dir=Path(runtime_dir).absolute(),  # daemon and trainer get paths below it
        engine_id=f"{engine_id}-{data_parallel_index}",
        is_capture_on=_switch(environ, "HONED_CAPTURE", is_on=True),
        ring_bytes=_bytes(environ, "HONED_RING_BYTES", 64 << 20, minimum=1 << 20),
        queue_bytes=_bytes(environ, "HONED_QUEUE_BYTES", 32 << 20, minimum=1 << 16),
        feature_kind=feature_kind,
        wants_trees=wants_trees(environ),
        wants_tree_graphs=wants_tree_graphs(environ),
    )


def _check_owner(folder: Path) -> None:
    """Raise ValueError if somebody else may have made the folder to hear what vLLM sends. It may also be missing yet."""
    try:
        found, parent = folder.lstat(), folder.parent.stat()
    except OSError:
        return
    if why := why_untrusted(folder, found.st_mode, found.st_uid, parent.st_mode, os.getuid()):
        raise ValueError(f"{RUNTIME_DIR}: {why}: remove it, or set a folder of your own")


def wants_trees(environ: Mapping[str, str]) -> bool:
    """Whether draft trees are switched on. Raises ValueError."""
    return wants_tree_graphs(environ) or _switch(environ, "HONED_TREES", is_on=False, others=(GRAPHS,))


def wants_tree_graphs(environ: Mapping[str, str]) -> bool:
    """Whether trees are wanted also where vLLM captures CUDA graphs."""
    return environ.get("HONED_TREES", "").strip().lower() == GRAPHS


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """One sentence for each HONED_* variable that neither side reads; the daemon checks the names of settings."""
    known = (*VARIABLES, *OF_THE_DAEMON)
    found = []
    for name in sorted(environ):
        if name.startswith("HONED_") and "__" not in name and name not in known and not name.startswith("HONED_TEST_"):
            near = difflib.get_close_matches(name, known, n=1)
            found.append(f"unknown variable {name} is ignored" + (f"; did you mean {near[0]}?" if near else ""))
    return found


def _switch(environ: Mapping[str, str], name: str, *, is_on: bool, others: tuple[str, ...] = ()) -> bool:
    text = environ.get(name, "").strip().lower()
    if text in (*_ON, *_OFF):
        return text in _ON
    if text:
        raise ValueError(f"{name}={environ[name]!r}: use {', '.join(('0', '1', *others))}")
    return is_on


def _bytes(environ: Mapping[str, str], name: str, default: int, minimum: int) -> int:
    text = environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < minimum:
        raise ValueError(f"{name}={text!r}: use a whole number of bytes, at least {minimum}")
    return int(text)
