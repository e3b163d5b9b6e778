"""The demo's report: one self-contained HTML file made from the demo's record (also written as record.json).

Pure: a record in, a page out. `python -m benchmarks.demo.report demo-out` makes the page again from a record.
"""

from __future__ import annotations

import html
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.demo.figures import drafted_share, headline
from benchmarks.demo.svg_plot import Band, Mark, Series, line_plot

Record = dict[str, Any]

BIN_S = 3.0
"""Seconds that each point of the plots over time averages: one second holds too few rounds."""
COLORS = {"a": 1, "b": 2}

STYLE = """
:root { color-scheme: light dark; --page:#fcfcfb; --ink:#0b0b0b; --soft:#52514e; --faint:#8a8984; --grid:#e6e5e1;
  --base:#c3c2b7; --band:#00000008; --tile:#f3f2ee; --series-1:#2a78d6; --series-2:#eb6834; --series-3:#1baf7a;
  --good:#006300; --bad:#b3261e; }
@media (prefers-color-scheme: dark) { :root { --page:#1a1a19; --ink:#ffffff; --soft:#c3c2b7; --faint:#8f8e88;
  --grid:#2c2c2a; --base:#55544f; --band:#ffffff0b; --tile:#262624; --series-1:#3987e5; --series-2:#d95926;
  --series-3:#199e70; --good:#0ca30c; --bad:#e66767; } }
body { background:var(--page); color:var(--ink); font:15px/1.5 system-ui,sans-serif; margin:0 auto; max-width:900px;
  padding:32px 20px 80px; }
h1 { font-size:24px; margin:0 0 4px; } h2 { font-size:17px; margin:40px 0 8px; } p { margin:6px 0; color:var(--soft); }
svg { width:100%; height:auto; display:block; } .note { color:var(--faint); }
.tiles { display:flex; flex-wrap:wrap; gap:12px; margin:20px 0; }
.tile { background:var(--tile); border-radius:8px; padding:12px 16px; flex:1 1 150px; }
.tile b { display:block; font-size:24px; font-weight:600; } .tile span { color:var(--soft); font-size:13px; }
.scroll { overflow-x:auto; } table { border-collapse:collapse; width:100%; font-size:14px; }
th { text-align:left; color:var(--soft); font-weight:500; }
th,td { padding:5px 12px 5px 0; border-bottom:1px solid var(--grid); }
td.n,th.n { text-align:right; font-variant-numeric:tabular-nums; } .good { color:var(--good); } .bad { color:var(--bad); }
pre { background:var(--tile); padding:12px; border-radius:8px; overflow-x:auto; font-size:12.5px; }
.grid { stroke:var(--grid); stroke-width:1; } .base { stroke:var(--base); } .band { fill:var(--band); }
.tick,.label,.mark-text { font-size:11.5px; fill:var(--soft); } .name { font-size:12.5px; fill:var(--ink); }
.mark { stroke:var(--faint); stroke-dasharray:2 3; } .line { fill:none; stroke-width:2; stroke-linejoin:round; }
.dot { stroke:var(--page); stroke-width:1; }
.s1 { stroke:var(--series-1); } .s2 { stroke:var(--series-2); } .s3 { stroke:var(--series-3); }
.f1 { fill:var(--series-1); } .f2 { fill:var(--series-2); } .f3 { fill:var(--series-3); }
"""


def render(record: Record) -> str:
    """The page."""
    is_kept = all(p["kept"] for p in record["promises"])
    verdict = '<span class="good">every promise kept</span>' if is_kept else '<span class="bad">not every promise kept</span>'
    sections = [
        f"<h1>honed demo: {verdict}</h1><p>{html.escape(record['when'])} · {html.escape(record['machine'])}</p>",
        f"<p><b>{html.escape(headline(record['result']))}</b></p><p>{html.escape(WORKLOADS_NOTE)}</p>",
        tiles(record),
        _section("Acceptance length over time", _over_time(record), ACCEPTANCE_NOTE),
        _section("Draft tokens per round over time", _drafted(record), DRAFTED_NOTE),
        _section("Acceptance by position, before and after", _positions(record), POSITION_NOTE),
        _section("Training", _losses(record), "Loss of the micro-steps, as the trainer reported it once a second."),
        _section("The gate", gate(record["operation"].get("detail", {}).get("gate") or []), GATE_NOTE),
        _section("Phases: vLLM's counters beside honed's", phases(record["phases"]), PHASES_NOTE),
        _section("Promises", promises(record["promises"])),
        _section("How it was run", _how(record)),
    ]
    body = "\n".join(sections)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}<title>honed demo</title></head><body>{body}</body></html>\n'


WORKLOADS_NOTE = (
    "A, the old workload, is Python source code, and the drafter was trained on it. B, the new one, is documentation of a web "
    "service's operations. The target knows both. It has layers that only cost time: 18 in all, where the drafter has three. "
    "vLLM alone always drafts 7 tokens. What honed gains before the retraining comes from drafting less, or not at all. The "
    "retrained drafter adds to that only where its drafts are worth their time. On processors they often aren't, since each "
    "verified token costs time there."
)
ACCEPTANCE_NOTE = (
    "Tokens emitted per verify round, bonus token included. Shaded: held-out prompts with the draft length pinned to 7, or to "
    "trees of 15 nodes. Between them: live traffic, where the controller chooses. In gaps the server was idle."
)
DRAFTED_NOTE = (
    "Tokens verified per round, over the rounds that verified any: 7 while pinned, or 15 nodes of a tree, otherwise the "
    "controller's choice. "
    "A line ends where the controller stops drafting because it doesn't pay."
)
POSITION_NOTE = (
    "Conditional acceptance: among the rounds that accepted all earlier drafts and verified this one, the share that "
    "accepted it too. Held-out prompts; dashed is before."
)
GATE_NOTE = "Expected acceptance length on sessions that were held out from training, as the gate measured it."
PHASES_NOTE = (
    "Differences of totals between a phase's end and its start. Only rounds with drafts count; k is draft tokens per round. "
    "“of all tokens” is the share of the output from such rounds. It is small where drafts don't pay; such a phase gains "
    "by not drafting. Output is compared with that of vLLM without honed."
)


def tiles(record: Record) -> str:
    """Show the key figures."""
    figures, length = record["result"], record["result"]["acceptance_length"]
    rounds = f"{figures['verify_rounds_logged']:,} of {figures['vllm_num_drafts']:,}"
    speed = figures["tokens_per_s"]
    shown = [
        (f"{speed['a']:.0f} → {speed['b']:.0f}", "tokens per second of vLLM alone, on the old workload and on the new one"),
        (f"{speed['b_tuned']:.0f} → {speed['b_healed']:.0f}", "with honed on the new one, before and after the retraining"),
    ]
    for workload, name in (("b", "new"), ("a", "old")):
        before, after = length[f"{workload}_before"], length[f"{workload}_after"]
        shown.append((f"{before:.2f} → {after:.2f}", f"tokens a round, {name} workload ({_change(before, after)})"))
    shown += [
        (_shown(figures["swap_pause_ms"], "{:.1f} ms"), "the server paused for the swap"),
        (_shown(figures["train_seconds"], "{:.0f} s"), "trained, while the server was idle"),
        (rounds, "verify rounds logged"),
        ("equal" if figures["greedy_identical"] else "DIFFERENT", "greedy output, with and without honed"),
    ]
    cells = (f'<div class="tile"><b>{html.escape(a)}</b><span>{html.escape(b)}</span></div>' for a, b in shown)
    return f'<div class="tiles">{"".join(cells)}</div>'


def binned(points: Iterable[Record], above: str, below: str, plus: float, start_s: float) -> list[tuple[float, float]]:
    """(seconds since start, plus + Σ above / Σ below) over bins of BIN_S."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for point in points:
        cell = sums[int((point["t"] - start_s) // BIN_S)]
        cell[0] += point[above]
        cell[1] += point[below]
    return [((i + 0.5) * BIN_S, plus + a / b) for i, (a, b) in sorted(sums.items()) if b]


def gate(rows: Sequence[Record]) -> str:
    """The gate's table."""
    if not rows:
        return '<p class="note">The gate gave no figures.</p>'
    body = []
    for g in rows:
        low, high = (f"{100 * (g[key] - 1):+.1f}" for key in ("gain_low", "gain_high"))
        verdict = _verdict(g["passed"], "passed", "failed") + (" (had to gain)" if g.get("must_gain") else "")
        cells = [g["workload"], g["sessions"], f"{g['parent']:.3f}", f"{g['candidate']:.3f}"]
        body.append([*cells, _change(g["parent"], g["candidate"]), f"{low} … {high} %", Raw(verdict)])
    return _table(["workload", "sessions", "parent", "candidate", "gain", "95 % interval", ""], body)


def phases(rows: Sequence[Record]) -> str:
    """Make one line a phase: vLLM's counts and honed's."""
    counted = ["rounds (vLLM)", "rounds (honed)", "k", "length (vLLM)", "length (honed)", "of all tokens"]
    head = ["phase", "requests", "tok/s", *counted, "output"]
    body = []
    for p in rows:
        v, h = p["vllm"], p.get("honed") or {}
        k = f"{v['draft_tokens'] / v['drafts']:.2f}" if v["drafts"] else "–"
        same = {True: "identical", False: "DIFFERENT", None: "–"}[p.get("identical")]
        cells = [p["name"], p["requests"], f"{p['tokens_per_s']:.0f}", f"{v['drafts']:,}", _shown(h.get("drafts"), "{:,}"), k]
        lengths = [f"{v['acceptance_length']:.3f}", _shown(h.get("acceptance_length"), "{:.3f}")]
        body.append([*cells, *lengths, f"{drafted_share(p):.0%}", same])
    return _table(head, body)


def promises(rows: Sequence[Record]) -> str:
    """List the promises and their measured values."""
    body = [[p["text"], p["found"], Raw(_verdict(p["kept"], "kept", "NOT KEPT"))] for p in rows]
    return _table(["promise", "found", ""], body)


class Raw(str):
    """Text that is HTML already."""


def _over_time(record: Record) -> str:
    return _plot_by_workload(record, "Acceptance length over time", "accepted_tokens", 1.0, "tokens per round")


def _drafted(record: Record) -> str:
    return _plot_by_workload(record, "Draft tokens per round over time", "draft_tokens", 0.0, "draft tokens per round")


def _plot_by_workload(record: Record, title: str, above: str, plus: float, y_label: str) -> str:
    start_s = record["start_unix_s"]
    points = [p for p in record["timeline"]["points"] if p["t"] >= start_s - 1]
    series = []
    for workload in sorted({p["workload"] for p in points}):
        mine = binned((p for p in points if p["workload"] == workload), above, "rounds", plus, start_s)
        series.append(Series(f"workload {workload}", mine, COLORS.get(workload, 3)))
    marks = [Mark(m["t"] - start_s, m["kind"]) for m in record["timeline"]["marks"] if m["t"] >= start_s and _is_shown(m)]
    bands = [Band(p["start_s"] - start_s, p["end_s"] - start_s, p["name"]) for p in record["phases"] if p.get("pinned")]
    return line_plot(
        series,
        title=title,
        x_label="seconds since vLLM was attached",
        y_label=y_label,
        marks=marks,
        bands=bands,
        y_low=plus,
        gap=4 * BIN_S,
    )


def _is_shown(mark: Record) -> bool:
    return mark["kind"] in ("swap", "rollback", "drift", "promote")


def _positions(record: Record) -> str:
    series = []
    for workload in ("b", "a"):
        for when in ("before", "after"):
            phase = next((p for p in record["phases"] if p["key"] == f"{workload}_{when}"), None)
            shares = (phase or {}).get("by_position") or []
            points = [(float(j), share) for j, share in enumerate(shares, 1)]
            series.append(Series(f"{workload} {when}", points, COLORS[workload], is_dashed=when == "before"))
    title = "Acceptance by position"
    return line_plot(
        series, title=title, x_label="position in the draft", y_label="accepted, conditional", y_low=0.0, x_least_step=1.0
    )


def _losses(record: Record) -> str:
    points = [(float(s["steps"]), float(s["loss"])) for s in record["training"] if s["steps"] and s["loss"]]
    unique = list(dict(points).items())
    return line_plot([Series("loss", unique, 3)], title="Training loss", x_label="micro-step", y_label="loss")


def _how(record: Record) -> str:
    commands = "\n".join(record["commands"])
    return (
        f"<p>The commands:</p><pre>{html.escape(commands)}</pre>"
        f"<p>honed.toml:</p><pre>{html.escape(record['config'])}</pre>"
        f"<p>{html.escape(record['trigger'])}</p>"
    )


def _section(title: str, body: str, note: str = "") -> str:
    about = f"<p>{html.escape(note)}</p>" if note else ""
    return f"<h2>{html.escape(title)}</h2>{about}{body}"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Make a table; the first column is text, the others are set as figures."""
    style = [""] + [' class="n"'] * (len(head) - 1)
    cells = "".join(f"<th{s}>{html.escape(h)}</th>" for h, s in zip(head, style, strict=True))
    lines = []
    for row in rows:
        shown = (c if isinstance(c, Raw) else html.escape(str(c)) for c in row)
        lines.append("<tr>" + "".join(f"<td{s}>{c}</td>" for c, s in zip(shown, style, strict=True)) + "</tr>")
    return f'<div class="scroll"><table><tr>{cells}</tr>{"".join(lines)}</table></div>'


def _verdict(is_good: bool, good: str, bad: str) -> str:
    return f'<span class="{"good" if is_good else "bad"}">{good if is_good else bad}</span>'


def _change(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.1f} %" if before else "–"


def _shown(value: float | int | None, pattern: str) -> str:
    return "–" if value is None else pattern.format(value)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo-out")
    (folder / "report.html").write_text(render(json.loads((folder / "record.json").read_text())))
