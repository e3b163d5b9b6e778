"""What a scrape says, as values by name and labels."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from honed.daemon.metrics.render import render
from honed.daemon.service import Service


def scrape(service: Service) -> dict[str, dict[str, float]]:
    """Sample name -> {"label=value label=value": value}, labels in order of their names."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(render(service).decode()):
        for sample in family.samples:
            labels = " ".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {}), f"{sample.name}{{{labels}}} twice"
            found[sample.name][labels] = sample.value
    return found
