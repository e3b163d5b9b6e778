"""How many requests an engine captures at once. The command line reads it, so nothing heavy is imported here."""

from __future__ import annotations

MOST_CAPTURED = 32
"""Most requests captured at once: of more, the trainer would get parts of all instead of some as a whole."""
