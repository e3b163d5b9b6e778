"""View of a controller's estimates for a terminal: tables and plots. Documents in, renderables out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from honed.daemon.commands.show import cells
from honed.daemon.commands.show.cells import Rows

Document = dict[str, Any]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_BAR = 24


def explain(document: Document) -> RenderableType:
    """Reasons for an engine's draft lengths: survival, step times, lengths by batch size, recent changes."""
    if not document:
        text = "nothing is known about this engine yet, or it doesn't speculate (`honed engines` then shows k … of 0)"
        return Text(text, "yellow")
    parts: tuple[Callable[[Document], RenderableType | None], ...] = (
        _survival,
        _context_shift,
        _reliability,
        _depths,
        _step_times,
        _plans,
        _changes,
    )
    shown = (render(document) for render in parts)
    return Group(*(part for one in shown if one is not None for part in (one, "")))


def curve(values: list[float]) -> str:
    """Shares from 0 to 1 as a row of bars, one a position."""
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[min(max(round(value * top), 0), top)] for value in values)


def bar(value: float, largest: float) -> str:
    """A horizontal bar, proportional to the value's share of the largest."""
    return "█" * max(round(_BAR * value / largest), 1) if largest > 0 and value > 0 else ""


def _survival(document: Document) -> RenderableType:
    k = document.get("num_spec_tokens") or 0
    table = Rows.of("survival of drafts 1 … K", "rounds", "acc. length", f"1 … {k}", "S(j), %", "drift")
    rows = [("(engine)", document.get("engine") or {}), *(document.get("workloads") or {}).items()]
    alarms = []
    for name, w in rows:
        values = [float(v) for v in w.get("survival") or []]
        drift = w["drift"] if isinstance(w.get("drift"), dict) else {}
        if drift.get("alarm"):
            alarms.append(Text(drift["alarm"], "dim"))
        table.add_row(
            cells.text(name),
            cells.count(w.get("rounds")),
            _with_error(w.get("acceptance_length"), w.get("acceptance_length_error")),
            curve(values),
            cells.shares(values),
            cells.text(drift.get("state")),
        )
    return Group(table, *alarms)


def _with_error(value: float | None, error: float | None) -> str:
    """Show the value with its 95 % interval."""
    return cells.length(value) + (f" ± {1.96 * error:.2f}" if error is not None else "")


def _context_shift(document: Document) -> RenderableType | None:
    """Table of the workloads that have figures; None without any."""
    levels = [("(engine)", document.get("engine") or {}), *(document.get("workloads") or {}).items()]
    rows = [(name, level["context_shift"]) for name, level in levels if level.get("context_shift")]
    if not rows:
        return None
    table = Rows.of("failure odds by context length", "times, from so many tokens on")
    for name, shift in rows:
        table.add_row(cells.text(name), "  ".join(f"{factor:.2f} {tokens:,}" for tokens, factor in shift))
    return table


def _reliability(document: Document) -> RenderableType:
    table = Rows.of("predicted against observed survival", "error", "predicted -> observed, %")
    for name, w in (document.get("workloads") or {}).items():
        reliability = w.get("reliability") or {}
        bins = reliability.get("bins") or []
        shown = "  ".join(f"{100 * p:.0f}->{100 * o:.0f}" for p, o, _ in bins[:: max(len(bins) // 6, 1)])
        table.add_row(cells.text(name), cells.number(reliability.get("expected_calibration_error"), 4), shown)
    return table


def _depths(document: Document) -> RenderableType | None:
    """Table of workloads with corrected predictions, if any."""
    found = {name: (w.get("reliability") or {}).get("by_depth") for name, w in (document.get("workloads") or {}).items()}
    rows = [(name, lines) for name, lines in found.items() if lines]
    if not rows:
        return None
    table = Rows.of("acceptance corrected by depth: a + b · its log-odds", "a, by position", "b, by position")
    for name, lines in rows:
        intercepts = " ".join(f"{intercept:+.2f}" for intercept, _ in lines)
        table.add_row(cells.text(name), intercepts, " ".join(f"{slope:.2f}" for _, slope in lines))
    return table


def _step_times(document: Document) -> RenderableType:
    model = document.get("step_time") or {}
    of_chains = "predicted ms of a step, by requests", "k", document.get("step_ms") or []
    of_trees = "predicted ms of a step with draft trees, by requests", "nodes", document.get("tree_step_ms") or []
    tables = [_price_table(title, what, prices) for title, what, prices in (of_chains, of_trees) if prices]
    if not tables:
        return Text(f"step times are unknown yet: {_missing(document, model)}", "yellow")
    typical = model.get("measured_seconds"), model.get("predicted_seconds")
    measured, predicted = (cells.number(1e3 * s if isinstance(s, int | float) else None, 2) for s in typical)
    spread = cells.percent(model.get("spread"))
    notes = f"recently {measured} ms measured, {predicted} predicted; half of the steps within ± {spread}"
    if model.get("world_changes"):
        notes += f"; step times shifted {cells.count(model['world_changes'])} times"
    return Group(*tables, Text(notes, "dim"))


def _price_table(title: str, what: str, prices: Sequence[Document]) -> RenderableType:
    lengths = range(len(prices[0]["by_length"]))
    chosen = _one_in(len(lengths))
    table = Rows.of(title, *(f"{what} {k}" for k in lengths if k in chosen))
    for row in prices:
        shown = (f"{ms:.2f}" for k, ms in enumerate(row["by_length"]) if k in chosen)
        table.add_row(str(row["num_requests"]), *shown)
    return table


def _missing(document: Document, model: Document) -> str:
    """Observations needed before step times are known, and how to get them if they don't come by themselves."""
    steps, least = model.get("num_steps") or 0, model.get("least_steps") or 0
    policy, lengths = document.get("policy") or {}, model.get("lengths_seen") or []
    is_exploring = policy.get("kind") in ("goodput", "latency") and policy.get("explore_share")
    until = "; lengths are fixed until then" if policy.get("kind") in ("goodput", "latency") else ""
    if steps < least:
        return f"{cells.count(steps)} steps seen, of {cells.count(least)} needed{until}"
    drafted = f"all drafted {lengths[0]} tokens a request" if lengths else "none often enough"
    why = f"{cells.count(steps)} steps seen, {drafted}, and a draft's cost shows only with two draft lengths{until}"
    if is_exploring:
        return f"{why}. Other lengths are being tried"
    if not policy:
        return f"{why}. honed doesn't decide on this engine"
    half = (document.get("num_spec_tokens") or 0) // 2
    other = half + 1 if half in lengths else half
    return (
        f"{why}. Try other lengths (controller.explore_share above 0, in mode goodput or latency), or fix one"
        f" for a minute: `honed override set draft_tokens {other} --ttl 1m`"
    )


def _plans(document: Document) -> RenderableType | None:
    plans = document.get("draft_tokens_by_batch") or []
    if not plans:
        return None
    may_have_trees = bool(document.get("tree_step_ms"))
    table = Rows.of("typical requests", "k", "", "tokens/s", "over k = 0", *["verifies"] * may_have_trees)
    largest = float(document.get("num_spec_tokens") or 0)
    for plan in plans:
        k = float(plan["draft_tokens_per_request"])
        rate, speedup = cells.number(plan["predicted_tokens_per_s"], 0), f"x {plan['speedup']:.2f}"
        side = ["trees" if plan.get("has_trees") else "chains"] * may_have_trees
        table.add_row(str(plan["num_requests"]), f"{k:.1f}", bar(k, largest), rate, speedup, *side)
    if (document.get("policy") or {}).get("kind") in (None, "off"):
        return Group(table, Text("honed doesn't decide: these are the lengths from vLLM's configuration", "dim"))
    return table


def _changes(document: Document) -> RenderableType:
    policy = document.get("policy") or {}
    lines: list[RenderableType] = [
        Text(
            f"policy {cells.count(policy.get('generation'))}: {cells.text(policy.get('kind'))}"
            + (f", overridden: {policy['override']}" if policy.get("override") else "")
        )
    ]
    decisions = document.get("decisions") or {}
    if total := sum(decisions.values()):
        ordered = sorted(decisions.items(), key=lambda item: -item[1])
        lines.append(Text("steps decided by: " + ", ".join(f"{name} {100 * count / total:.1f} %" for name, count in ordered)))
    table = Rows.of("generation", "because")
    for change in (document.get("changes") or [])[-8:]:
        table.add_row(cells.count(change.get("generation")), cells.text(change.get("reason")))
    return Group(*lines, table)


def _one_in(count: int, most: int = 7) -> set[int]:
    """Up to `most` evenly spread indices, including the first and the last."""
    return {round(i * (count - 1) / max(min(most, count) - 1, 1)) for i in range(min(most, count))}
