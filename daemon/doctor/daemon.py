"""What the daemon says of itself, its engines and its drafter, and whether Prometheus hears it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from honed.daemon.doctor.check import Check
from honed.daemon.views.findings import findings

ROUNDS = 500
"""Fewer don't say much about a drafter."""
RIGHT_AT_FIRST = 0.15
"""A drafter of the target's own, on traffic that it never saw, is right more often than this on the first token; one of another
target of the same shape guesses."""

Answer = tuple[int, str]
"""HTTP status (0: no answer) and body, or the reason."""
Fetch = Callable[[str], Answer]


def check_daemon(status: dict[str, Any], own_version: str) -> Iterator[Check]:
    """Versions on both sides, what `honed status` would say, and what acceptance says of each engine's drafter."""
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
        yield Check(subject, "warning", text, "Install the same honed in vLLM's environment; it counts from its restart.")
    drafted, accepted = engine.get("drafted_by_position") or [0], engine.get("accepted_by_position") or [0]
    if drafted[0] < ROUNDS:
        return
    share = accepted[0] / drafted[0]
    if share < RIGHT_AT_FIRST:
        text = (
            f"its drafter is right on {100 * share:.1f} % of first tokens in {drafted[0]:,} rounds: it was trained for another "
            "target, or the target was changed (fine-tuned, quantised) since"
        )
        cure = "Serve the drafter that belongs to this target. Where it does: `honed recalibrate --wait`, then look again."
        yield Check(subject, "error", text, cure)
    else:
        yield Check(subject, "ok", f"its drafter is right on {100 * share:.0f} % of first tokens")


def check_metrics(address: str, fetch: Fetch) -> Iterator[Check]:
    """Whether /metrics can be read where Prometheus would read it."""
    if not address:
        text = "http.metrics_listen is empty: there is nothing for Prometheus to read"
        yield Check("metrics", "warning", text, 'Set http.metrics_listen = "127.0.0.1:9464".')
        return
    code, body = fetch(f"http://{address}/metrics")
    if code != 200:
        text = f"http://{address}/metrics {f'answers {code}' if code else f'gives no answer ({body})'}"
        yield Check("metrics", "error", text, "See `systemctl status honed`; another program may have the port.")
    elif "honed_build_info" not in body:
        text = f"http://{address}/metrics isn't honed's"
        yield Check("metrics", "error", text, "Another program has the port: set http.metrics_listen to a free one.")
    else:
        yield Check("metrics", "ok", f"http://{address}/metrics answers")


def check_prometheus(url: str, fetch: Fetch, *, is_asked: bool) -> Iterator[Check]:
    """Whether a Prometheus server has lately read us. One that nobody named may be absent."""
    code, body = fetch(f"{url}/api/v1/query?query=count(honed_build_info)")
    if code != 200:
        text = f"none at {url} ({f'it answers {code}' if code else body})"
        if is_asked:
            yield Check("Prometheus", "error", text, "Check --prometheus, and that it runs.")
        else:
            yield Check("Prometheus", "unknown", text, "Where there is one, name it: --prometheus URL.")
    elif '"value"' not in body:
        cure = "Add a scrape job for http.metrics_listen; dashboards/ has the recording and alert rules."
        yield Check("Prometheus", "warning", f"{url} knows no honed: it doesn't scrape it", cure)
    else:
        yield Check("Prometheus", "ok", f"{url} scrapes honed")
