"""The HONED_* variables of vLLM's environment, names and values: vLLM's processes inherit nothing else from honed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from honed.adapt.protocol.fields import check_engine_id

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
"""All of them."""
GRAPHS = "graphs"
"""Value of HONED_TREES."""
FEATURES = ("fused", "layers")
"""Values of HONED_FEATURES, the default first."""
RING_BYTES, QUEUE_BYTES = 64 << 20, 32 << 20
"""Defaults."""
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def engine_name(environ: Mapping[str, str]) -> str:
    """Return HONED_ENGINE_ID, to which an engine adds its number. Raises ValueError."""
    name = environ.get("HONED_ENGINE_ID", "").strip() or "engine"
    try:
        check_engine_id(name)
    except ValueError as error:
        raise ValueError(f"HONED_ENGINE_ID: {error}") from error
    return name


def feature_kind(environ: Mapping[str, str]) -> str:
    """Return HONED_FEATURES: "fused" or "layers". Raises ValueError."""
    kind = environ.get("HONED_FEATURES", FEATURES[0])
    if kind not in FEATURES:
        raise ValueError(f"HONED_FEATURES={kind!r}: use {' or '.join(map(repr, FEATURES))}")
    return kind


def is_capture_on(environ: Mapping[str, str]) -> bool:
    """Return whether samples may be captured. Raises ValueError."""
    return _switch(environ, "HONED_CAPTURE", is_on=True)


def wants_trees(environ: Mapping[str, str]) -> bool:
    """Return whether draft trees are switched on. Raises ValueError."""
    return wants_tree_graphs(environ) or _switch(environ, "HONED_TREES", is_on=False, others=(GRAPHS,))


def wants_tree_graphs(environ: Mapping[str, str]) -> bool:
    """Return whether trees are wanted also where vLLM captures CUDA graphs."""
    return environ.get("HONED_TREES", "").strip().lower() == GRAPHS


def ring_bytes(environ: Mapping[str, str]) -> int:
    """Return the size of the sample ring. Raises ValueError."""
    return _bytes(environ, "HONED_RING_BYTES", RING_BYTES, minimum=1 << 20)


def queue_bytes(environ: Mapping[str, str]) -> int:
    """Return the most bytes of events that are kept for the daemon. Raises ValueError."""
    return _bytes(environ, "HONED_QUEUE_BYTES", QUEUE_BYTES, minimum=1 << 16)


def faults(environ: Mapping[str, str]) -> list[str]:
    """Say of each variable that can't be used why: honed doesn't attach then."""
    readers: tuple[Callable[[Mapping[str, str]], object], ...]
    readers = (engine_name, is_capture_on, ring_bytes, queue_bytes, feature_kind, wants_trees)
    found = []
    for reader in readers:
        try:
            reader(environ)
        except ValueError as error:
            found.append(str(error))
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
