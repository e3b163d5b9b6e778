"""A result file that is rewritten after each stage, so that it keeps what was measured when the rest is cut off."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.server.measured import percentile


@dataclass
class Kept:
    """A document and the file that keeps it, if there is one."""

    path: Path | None
    document: dict[str, Any] = field(default_factory=dict)

    def update(self, **figures: Any) -> None:
        """Add figures, and write the file in one piece."""
        self.document.update(figures)
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.document, indent=1) + "\n")
        os.replace(beside, self.path)


def in_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, p50, p99 and maximum in milliseconds; empty without values."""
    if not seconds:
        return {}
    found = {"mean": sum(seconds) / len(seconds), "p50": percentile(seconds, 0.5), "p99": percentile(seconds, 0.99)}
    return {name: round(1e3 * value, 3) for name, value in (found | {"max": max(seconds)}).items()}
