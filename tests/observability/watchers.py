"""A real Prometheus with honed's rules, and a real Alertmanager that it tells."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import yaml  # type: ignore[import-untyped]

from benchmarks.server.processes import Child, Processes, free_port
from tests.dashboards.contents import ALERTS, RECORDING
from tests.tools import path_of

Series = list[dict[str, Any]]


def get(url: str, **params: Any) -> Any:
    """The JSON of an answer; AssertionError for a refusal."""
    answer = httpx2.get(url, params=params, timeout=30.0, trust_env=False)
    assert answer.status_code == 200, (url, params, answer.text)
    return answer.json()


def is_ready(url: str, child: Child) -> bool:
    child.check()
    try:
        return bool(httpx2.get(f"{url}/-/ready", timeout=5.0, trust_env=False).is_success)
    except httpx2.TransportError:
        return False


class Alertmanager:
    """Receives alerts and tells nobody."""

    def __init__(self, processes: Processes, folder: Path, environment: Mapping[str, str]) -> None:
        folder.mkdir()
        (folder / "alertmanager.yml").write_text("route: {receiver: nobody}\nreceivers: [{name: nobody}]\n")
        self.address = f"127.0.0.1:{free_port()}"
        flags = [f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}", "--cluster.listen-address="]
        self.child = processes.start(
            "alertmanager", [path_of("alertmanager"), *flags, f"--web.listen-address={self.address}"], environment
        )
        self.child.wait_until(lambda: is_ready(f"http://{self.address}", self.child), 30.0, "readiness")

    def alerts(self) -> Series:
        """What it holds."""
        found: Series = get(f"http://{self.address}/api/v2/alerts")
        return found


class Prometheus:
    """Scrapes honed and vLLM every second and evaluates honed's rules as often."""

    def __init__(
        self,
        processes: Processes,
        folder: Path,
        environment: Mapping[str, str],
        targets: Mapping[str, list[str]],
        alertmanager: str,
    ) -> None:
        folder.mkdir()
        shutil.copy(RECORDING, folder)
        # A daemon that is down is told of in two minutes; here in two seconds.
        (folder / ALERTS.name).write_text(ALERTS.read_text().replace("for: 2m", "for: 2s", 1))
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": addresses}]} for job, addresses in targets.items()
            ],
            "rule_files": [ALERTS.name, RECORDING.name],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", "--log.level=warn"]
        self.child = processes.start(
            "prometheus", [path_of("prometheus"), *flags, f"--web.listen-address={address}"], environment
        )
        self.child.wait_until(lambda: is_ready(self.url, self.child), 30.0, "readiness")

    def version(self) -> str:
        """Which one this is."""
        return str(get(f"{self.url}/api/v1/status/buildinfo")["data"]["version"])

    def now(self, expr: str) -> Series:
        """The series that an expression has at this moment."""
        found: Series = get(f"{self.url}/api/v1/query", query=expr)["data"]["result"]
        return found

    def during(self, expr: str, start_s: float, end_s: float, step_s: float = 2.0) -> int:
        """How many values that are numbers an expression has in a span, as Grafana asks for it."""
        series = self.span(expr, start_s, end_s, step_s)
        return sum(math.isfinite(float(value)) for one in series for _, value in one["values"])

    def span(self, expr: str, start_s: float, end_s: float, step_s: float = 2.0) -> Series:
        """The series of an expression in a span."""
        answer = get(f"{self.url}/api/v1/query_range", query=expr, start=start_s, end=end_s, step=step_s)
        found: Series = answer["data"]["result"]
        return found

    def series(self, selector: str, start_s: float) -> list[dict[str, str]]:
        """Label sets, as Grafana's label_values() asks for them."""
        found: list[dict[str, str]] = get(f"{self.url}/api/v1/series", **{"match[]": selector, "start": start_s})["data"]
        return found

    def rules(self) -> Series:
        """All rules, with their health."""
        groups = get(f"{self.url}/api/v1/rules")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def targets(self) -> Series:
        """What it scrapes."""
        found: Series = get(f"{self.url}/api/v1/targets")["data"]["activeTargets"]
        return found
