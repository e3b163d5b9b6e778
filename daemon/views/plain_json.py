"""JSON-safe documents."""

from __future__ import annotations

import math
from typing import Any

import msgspec


def finite(document: Any) -> Any:
    """Replace NaN and infinity , unknown to JSON, by null."""
    if isinstance(document, float):
        return document if math.isfinite(document) else None
    if isinstance(document, dict):
        return {str(name): finite(value) for name, value in document.items()}
    if isinstance(document, list | tuple):
        return [finite(value) for value in document]
    if isinstance(document, msgspec.Struct):
        return finite(msgspec.to_builtins(document))
    return document
