"""Checks of the daemon, its engines, their drafters and Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from honed.daemon.doctor.check import Check
from honed.daemon.errors import HonedError
from honed.daemon.settings.sections import HttpSettings
from honed.daemon.views.findings import findings

ROUNDS = 500
"""Fewer rounds say little about a drafter."""
RIGHT_AT_FIRST = 0.15
"""Least share of first tokens accepted from the target's own drafter, even on unseen traffic. A drafter of another target with
the same shape only guesses."""

Answer = tuple[int, str]
"""HTTP status and body; 0 and the reason if there was no answer."""
Fetch = Callable[[str], Answer]


def check_daemon(status: dict[str, Any], own_version: str) -> Iterator[Check]:
    """Check versions, the findings of `honed status`, and the acceptance of each engine's drafter."""
    theirs = str(status.get("version") or "")
    if theirs != own_version:
        cure = "Restart the daemon after an upgrade: `systemctl restart honed honed-trainer`."
        yield Check("daemon", "warning", f"it runs honed {theirs}, this command is {own_version}", cure)
    else:
        yield Check("daemon", "ok", f"honed {theirs} answers")
    for found in findings(status):
        yield Check("daemon", "error" if found.level == "error" else "warning", found.text, found.cure)
    for engine in status.get("engines") or []:
        yield from _check_engine(engine, theirs)


def _check_engine(engine: dict[str, Any], daemon_version: str) -> Iterator[Check]:
    subject = f"engine {engine.get('engine_id')}"
    honed = engine.get("honed_version") or ""
    if honed and honed != daemon_version:
        text = f"has honed {honed}, the daemon {daemon_version}"
        yield Check(subject, "warning", text, "Install the same honed in vLLM's environment, then restart vLLM.")
    drafted, accepted = engine.get("drafted_by_position") or [0], engine.get("accepted_by_position") or [0]
    if drafted[0] < ROUNDS:
        return
    share = accepted[0] / drafted[0]
    if share < RIGHT_AT_FIRST:
        text = (
            f"its drafter is right on {100 * share:.1f} % of first tokens in {drafted[0]:,} rounds: it was trained for another "
            "target, or the target has changed since (fine-tuned, quantised)"
        )
        cure = "Serve this target's drafter. If it is this target's: `honed recalibrate --wait`, then check again."
        yield Check(subject, "error", text, cure)
    else:
        yield Check(subject, "ok", f"its drafter is right on {100 * share:.0f} % of first tokens")


def check_metrics(http: HttpSettings, fetch: Fetch) -> Iterator[Check]:
    """Check that /metrics can be read at the address for Prometheus."""
    address = http.metrics_listen
    if not address:
        text = "http.metrics_listen is empty: Prometheus has nothing to read"
        yield Check("metrics", "warning", text, 'Set http.metrics_listen = "127.0.0.1:9464".')
        return
    if http.metrics_web_config is not None:
        try:
            from honed.daemon.settings.web_config import WebConfigFile

            scheme = "http" if WebConfigFile(http.metrics_web_config).context is None else "https"
        except (ImportError, HonedError):  # vLLM's environment lacks what it needs; `check_start` says what is wrong
            scheme = "https"
        port = address.rpartition(":")[2]
        tls = "" if scheme == "http" else f"--cacert CERTIFICATE --resolve HOST:{port}:127.0.0.1 "
        curl = f"curl {tls}--user USER {scheme}://HOST:{port}/metrics"
        text = f"{address} wants what http.metrics_web_config says (TLS, a password), so it wasn't read from here"
        yield Check("metrics", "unknown", text, f"Try it as Prometheus does: `{curl}`.")
        return
    address = address.replace("0.0.0.0:", "127.0.0.1:").replace("[::]:", "[::1]:")
    code, body = fetch(f"http://{address}/metrics")
    if code != 200:
        text = f"http://{address}/metrics {f'answers {code}' if code else f'gives no answer ({body})'}"
        yield Check("metrics", "error", text, "See `systemctl status honed`; another program may use the port.")
    elif "honed_build_info" not in body:
        text = f"http://{address}/metrics isn't honed's"
        yield Check("metrics", "error", text, "Another program uses the port: set http.metrics_listen to a free one.")
    else:
        yield Check("metrics", "ok", f"http://{address}/metrics answers")


def check_prometheus(url: str, fetch: Fetch, *, is_asked: bool) -> Iterator[Check]:
    """Check that a Prometheus server has read honed lately. It may be absent if `is_asked` is false."""
    code, body = fetch(f"{url}/api/v1/query?query=count(honed_build_info)")
    if code != 200:
        text = f"none at {url} ({f'it answers {code}' if code else body})"
        if is_asked:
            yield Check("Prometheus", "error", text, "Check --prometheus, and that it runs.")
        else:
            yield Check("Prometheus", "unknown", text, "If there is one, give --prometheus URL.")
    elif '"value"' not in body:
        cure = "Add a scrape job for http.metrics_listen; dashboards/ has the recording and alert rules."
        yield Check("Prometheus", "warning", f"{url} doesn't scrape honed", cure)
    else:
        yield Check("Prometheus", "ok", f"{url} scrapes honed")
