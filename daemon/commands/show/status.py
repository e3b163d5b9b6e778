"""Views of honed's answers for a terminal: API documents in, rich renderables out.

Functions here only render; a command fetches and prints. Missing fields show as "–", so an older daemon's
answers still render. Text chosen by clients (workloads, reasons) is never read as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from honed.daemon.commands.show import cells
from honed.daemon.commands.show.cells import Rows
from honed.daemon.views.findings import findings

Document = dict[str, Any]
STATE_STYLES = {
    "succeeded": "green",
    "running": "cyan",
    "queued": "yellow",
    "failed": "red",
    "cancelled": "magenta",
    "drifted": "red",
    "alarm": "red",
    "active": "green",
}


def status(document: Document) -> RenderableType:
    """The whole service on one screen: problems first, then engines, acceptance, weights, trainer, store."""
    return Group(
        _verdict(document),
        engines(document.get("engines") or []),
        "",
        _acceptance(document.get("acceptance") or {}),
        "",
        _facts(document),
    )


def engines(rows: Sequence[Document]) -> RenderableType:
    """Two lines for each engine, which wrap at any width: presence, draft length, honed's cost."""
    lines = []
    for e in rows:
        policy = e.get("policy") or {}
        fallback = policy.get("fallback")
        steering = fallback or f"{policy.get('kind') or cells.NOTHING} #{policy.get('generation', 0)}"
        lines.append(
            Text.assemble(
                (cells.text(e.get("engine_id")), "bold"),
                "  ",
                _presence(e),
                f"  {cells.text(e.get('model_name'))}, drafter {cells.text(e.get('drafter_version'))}, {_drafted(e)} by ",
                (steering, "yellow" if fallback else ""),
            )
        )
        load = f"{cells.number(e.get('tokens_per_s'), 0)} tok/s"
        load += f", {cells.count(e.get('num_running'))} running, {cells.count(e.get('num_waiting'))} waiting"
        cost = f"p99 of deciding {cells.micros(e.get('decide_us_p99'))}, of logging {cells.micros(e.get('log_us_p99'))}"
        lost = (f"{cells.count(e.get('lost_rounds'))} lost", "red" if e.get("lost_rounds") else "")
        lines.append(Text.assemble(f"  {load}; {cells.count(e.get('rounds'))} rounds stored, ", lost, f"; {cost}"))
    return Group(*lines) if lines else Text("no engine has attached", "dim")


def brief_engines(rows: Sequence[Document]) -> RenderableType:
    """One line for each engine, cut where the screen ends."""
    lines = []
    for e in rows:
        fallback = (e.get("policy") or {}).get("fallback")
        figures = f"{cells.number(e.get('tokens_per_s'), 0)} tok/s, {cells.count(e.get('num_running'))} running"
        parts = (f"{figures}, {_drafted(e)}", f" by {fallback}" if fallback else "", f", {cells.text(e.get('model_name'))}")
        name = (cells.text(e.get("engine_id")), "bold")
        lines.append(Text.assemble(name, "  ", _presence(e), "  ", *parts, no_wrap=True, overflow="ellipsis"))
    return Group(*lines) if lines else Text("no engine has attached", "dim")


def _drafted(engine: Document) -> str:
    text = f"k {cells.length(engine.get('draft_tokens_per_round'))} of {cells.count(engine.get('num_spec_tokens'))}"
    if "trees" in (engine.get("capabilities") or []):
        text += f" ({cells.percent(engine.get('tree_share'))} of the rounds trees)"
    return text


def _presence(engine: Document) -> tuple[str, str]:
    if not engine.get("connected"):
        return "gone", "red"
    return ("asleep", "yellow") if engine.get("asleep") else ("connected", "green")


def workloads(rows: Sequence[Document], *, is_brief: bool = False, window: str = "") -> RenderableType:
    """The drafter's acceptance on each workload; at each position, from the first on, the share accepted of those reached.

    Args:
        window: how far back the command looked, as it was given; "": all time, or not a command.
    """
    if window and not rows:
        return Text(f"no rounds with drafts in the last {window}: `--window 0` shows all time", "dim")
    columns = ("engine", "workload", "drafter", "rounds", "acc. length", "tokens/round", "acc. rate")
    table = Rows.of(*columns, "by position, %", "drift")
    table.is_brief = is_brief
    for w in rows:
        drift = w.get("drift") or {}
        state = str(drift.get("state") or cells.NOTHING)
        table.add_row(
            cells.text(w.get("engine_id")),
            cells.text(w.get("workload")),
            cells.text(w.get("drafter_version")),
            cells.count(w.get("rounds")),
            cells.length(w.get("acceptance_length")),
            cells.length(w.get("tokens_per_round")),
            cells.percent(w.get("acceptance_rate")),
            cells.shares(w.get("by_position")),
            Text(state, STATE_STYLES.get(state, "")),
        )
    return table


def drafters(document: Document) -> RenderableType:
    """The registry: versions, newest first, with the aliases that point at them."""
    if not document.get("versions"):
        return Text("the registry has no version: an engine's own drafter will be the first", "dim")
    aliases: dict[str, list[str]] = {}
    for alias, version in (document.get("aliases") or {}).items():
        if version:
            aliases.setdefault(version, []).append(alias)
    table = Rows.of("version", "is", "made", "parent", "scope", "MiB", "gain", "sha256", "note")
    for v in sorted(document.get("versions") or [], key=lambda v: -(v.get("created_unix_s") or 0)):
        names = aliases.get(v.get("version", ""), [])
        table.add_row(
            Text(cells.text(v.get("version")), "bold" if names else ""),
            Text(", ".join(names), "green" if "active" in names else "cyan"),
            cells.moment(v.get("created_unix_s")),
            cells.text(v.get("parent")),
            cells.text(v.get("scope")),
            cells.number((v.get("bytes") or 0) / 2**20, 1),
            _gains(v.get("figures")),
            cells.text(v.get("sha256"))[:12],
            cells.text(v.get("note")),
        )
    return table


def operations(rows: Sequence[Document]) -> RenderableType:
    """Requested operations and their results."""
    if not rows:
        return Text("no operation was requested", "dim")
    table = Rows.of("operation", "kind", "state", "stage", "since", "took", "who", "why", "result")
    for o in rows:
        state = cells.text(o.get("state"))
        detail = o.get("detail") or {}
        table.add_row(
            cells.text(o.get("operation_id")),
            cells.text(o.get("kind")),
            Text(state, STATE_STYLES.get(state, "")),
            cells.text(o.get("stage")),
            cells.moment(o.get("created_unix_s")),
            cells.seconds(_took(o)),
            cells.text(o.get("actor")),
            cells.text(o.get("reason")),
            str(o.get("error") or detail.get("version") or ""),
        )
    return table


def operation(document: Document) -> RenderableType:
    """One operation in full, with the gate's figures and the swap's pause where there are any."""
    detail = document.get("detail") or {}
    parts: list[RenderableType] = [operations([document])]
    if detail.get("gate"):
        parts.append(gate(detail["gate"]))
        parts += [trees] if (trees := tree_lengths(detail["gate"])) is not None else []
    if detail.get("is_cut_short"):
        parts.append(Text(f"trainer.deadline_s ended the training: {steps_line(detail)}", "yellow"))
    if detail.get("pause_ms") is not None:
        parts.append(swap_line(detail))
    return Group(*parts)


def swap_line(detail: Document) -> Text:
    """The swap's cost for the serving engine."""
    stage = detail.get("stage_ms")
    staged = f", {stage:.1f} ms staging beside it" if isinstance(stage, int | float) else ""
    return Text(f"swapped to {cells.text(detail.get('version'))}: {detail['pause_ms']:.2f} ms pause{staged}", "green")


def gate(rows: Iterable[Document]) -> RenderableType:
    """Expected acceptance length on held-out sessions, parent against candidate, one workload a line."""
    table = Rows.of("gate", "sessions", "parent", "candidate", "gain", "95 % interval", "p", "must gain", "verdict")
    for g in rows:
        parent, candidate = g.get("parent") or 0.0, g.get("candidate") or 0.0
        gain = f"{100 * (candidate / parent - 1):+.1f} %" if parent else cells.NOTHING
        low, high = g.get("gain_low"), g.get("gain_high")
        interval = f"{100 * (low - 1):+.1f} … {100 * (high - 1):+.1f} %" if low and high else cells.NOTHING
        table.add_row(
            cells.text(g.get("workload")),
            cells.count(g.get("sessions")),
            cells.length(parent),
            cells.length(candidate),
            gain,
            interval,
            cells.number(g.get("p_value"), 3) if g.get("must_gain") else "",
            "yes" if g.get("must_gain") else "",
            _gate_says(g),
        )
    return table


def tree_lengths(rows: Iterable[Document]) -> RenderableType | None:
    """Acceptance length that the gate's sessions would have with draft trees; None: the drafter grows none."""
    told = [g for g in rows if g.get("parent_trees")]
    if not told:
        return None
    table = Rows.of("with draft trees", *(f"{size} nodes" for size in told[0]["parent_trees"]))
    for g in told:
        after = g.get("candidate_trees") or {}
        lengths = [f"{cells.length(length)} → {cells.length(after.get(size))}" for size, length in g["parent_trees"].items()]
        table.add_row(cells.text(g.get("workload")), *lengths)
    return table


def _gate_says(figures: Document) -> Text:
    if not figures.get("passed"):
        return Text("failed", "red")
    return Text("passed", "green") if figures.get("is_judged", True) else Text("not judged: too few sessions", "yellow")


def canary_line(trial: Document) -> str:
    """A running trial in one line."""
    versions = f"{cells.text(trial.get('new'))} against {cells.text(trial.get('old'))}"
    found = f"{100 * (trial.get('change') or 0.0):+.1f} % accepted"
    worse, better = (cells.odds(trial.get(f"evidence_{says}")) for says in ("worse", "better"))
    pairs = f"{cells.count(trial.get('pairs'))} of at most {cells.count(trial.get('max_pairs'))} pairs of windows"
    rounds = f"{cells.count(trial.get('rounds'))} rounds in {pairs}"
    heard = f", and {cells.count(trial['other_trials'])} trials on other hosts" if trial.get("other_trials") else ""
    return f"{versions}, {rounds}{heard}: {found}, {worse} that it is worse, {better} that it is better"


def canaries(rows: Sequence[Document]) -> RenderableType:
    """Trials of drafter versions, newest first."""
    if not rows:
        return Text("no version has had a trial", "dim")
    table = Rows.of("operation", "kind", "new", "old", "since", "verdict", "why")
    for r in rows:
        decision = cells.text(r.get("decision") or "going on")
        style = {"better": "green", "worse": "red", "going on": "cyan"}.get(decision, "")
        table.add_row(
            cells.text(r.get("operation_id")),
            cells.text(r.get("kind")),
            cells.text(r.get("new")),
            cells.text(r.get("old")),
            cells.moment(r.get("began_unix_s")),
            Text(decision, style),
            cells.text(r.get("text")),
        )
    return table


def canary(document: Document) -> RenderableType:
    """One trial with its evidence over time, about 40 lines at most."""
    table = Rows.of("when", "pairs", "rounds", "workload", "worse", "better", "change")
    points = document.get("points") or []
    every = max(1, -(-len(points) // 40))
    for p in points[::-1][::every][::-1]:
        table.add_row(
            cells.moment(p.get("t")),
            cells.count(p.get("pairs")),
            cells.count(p.get("rounds")),
            cells.text(p.get("workload") or "all"),
            cells.odds(p.get("evidence_worse")),
            cells.odds(p.get("evidence_better")),
            f"{100 * (p.get('change') or 0.0):+.1f} %",
        )
    return Group(canaries([document]), table)


def overrides(rows: Sequence[Document]) -> RenderableType:
    """Overrides set by operators, and when they end."""
    if not rows:
        return Text("no override is in force", "dim")
    table = Rows.of("override", "value", "until", "why", "who")
    for o in rows:
        until = cells.moment(o["until_unix_s"]) if o.get("until_unix_s") else cells.seconds(o.get("left_s") or o.get("ttl_s"))
        why, who = cells.text(o.get("reason")), cells.text(o.get("actor"))
        table.add_row(cells.text(o.get("name")), cells.text(o.get("value")), until, why, who)
    return table


def audit(rows: Sequence[Document]) -> RenderableType:
    """Changes and who made them."""
    if not rows:
        return Text("nothing has been changed", "dim")
    table = Rows.of("when", "who", "did", "to", "why", "outcome")
    for r in rows:
        texts = (cells.text(r.get(k)) for k in ("actor", "action", "subject", "reason", "outcome"))
        table.add_row(cells.moment(r.get("t")), *texts)
    return table


def _verdict(document: Document) -> RenderableType:
    found = findings(document)
    worst = found[0].level if found else "fine"
    style = {"error": "red", "warning": "yellow"}.get(worst, "green")
    up = cells.seconds(document.get("uptime_s"))
    title = Text(f"honed {cells.text(document.get('version'))}, {cells.text(document.get('state'))}, up {up}")
    if not found:
        return Panel(Text("all is well", "green"), title=title, title_align="left", border_style=style)
    lines = [Text(f"{'✗' if f.level == 'error' else '!'} {f.text}", "red" if f.level == "error" else "") for f in found]
    return Panel(Group(*lines), title=title, title_align="left", border_style=style)


def _acceptance(document: Document) -> RenderableType:
    table = Rows.of("acceptance", "rounds", "draft tokens", "accepted", "acc. length", "tokens/round", "acc. rate", "k/round")
    for key, label in (("last_minute", "last minute"), ("total", "total")):
        a = document.get(key) or {}
        counts = [cells.count(a.get(k)) for k in ("rounds", "draft_tokens", "accepted_tokens")]
        length, gained = cells.length(a.get("acceptance_length")), cells.length(a.get("tokens_per_round"))
        rate, drafted = cells.percent(a.get("acceptance_rate")), cells.length(a.get("draft_tokens_per_round"))
        table.add_row(label, *counts, length, gained, rate, drafted)
    return table


def _facts(document: Document) -> RenderableType:
    grid = Rows.of(show_header=False)
    d = document.get("drafters") or {}
    names = (f"{alias} {d[alias]}" for alias in ("active", "candidate", "previous") if d.get(alias))
    grid.add_row(Text("drafter", "dim"), ", ".join(names) or cells.NOTHING)
    grid.add_row(Text("trainer", "dim"), trainer_line(document.get("trainer")))
    if running := document.get("operation"):
        text = f"{running.get('kind')} {running.get('operation_id')}: {running.get('stage')}"
        if (share := share_done(running)) is not None:
            text += f", {100 * share:.0f} % done"
        grid.add_row(Text("operation", "dim"), Text(text, "cyan"))
    if trial := document.get("canary"):
        grid.add_row(Text("canary", "dim"), Text(canary_line(trial), "cyan"))
    events, store = document.get("events") or {}, document.get("store") or {}
    rounds = f"{cells.count(events.get('received_rounds'))} rounds, those without drafts included"
    counts = f"{rounds}, in {cells.count(events.get('batches'))} batches"
    lag = f"{cells.number(events.get('lag_s'), 2)} s behind, {cells.count(events.get('lost_rounds'))} rounds lost"
    grid.add_row(Text("events", "dim"), f"{counts}, {lag}")
    size = cells.number((store.get("bytes") or 0) / 2**20, 1)
    grid.add_row(Text("store", "dim"), f"{size} MiB, {cells.count(store.get('errors'))} errors")
    return grid


def trainer_line(trainer: Document | None) -> str:
    """The trainer's activity in one line."""
    if not trainer:
        return "not connected"
    text = f"{cells.text(trainer.get('state'))} on {cells.text(trainer.get('device'))}"
    if why := trainer.get("device_reason"):
        text += f" ({cells.text(why)})"
    if trainer.get("operation_id"):
        text += f", {progress_line(trainer)}"
    yielded = f"{cells.count(trainer.get('preemptions'))} pre-emptions"
    delay_s, computing_s = (cells.number(trainer.get(name), 3) for name in ("preemption_s_p99", "preemption_computing_s_p99"))
    text += f", {yielded} (p99 {delay_s} s, of computing {computing_s} s)"
    return f"{text}, {beside_line(trainer)}" if trainer.get("beside_duty") else text


def beside_line(trainer: Document) -> str:
    """Training beside requests, and what it costs them."""
    seconds, duty, harm, error = (trainer.get(f"beside_{name}") or 0.0 for name in ("seconds", "duty", "harm", "harm_error"))
    cost = f"{100 * duty:.1f} % of their time, steps {100 * harm:+.1f} ± {100 * error:.1f} %"
    if trainer.get("beside_limit"):
        cost += f", held back by their {cells.text(trainer['beside_limit'])}"
    why = trainer.get("beside_pause")
    return f"{seconds:,.0f} s beside requests ({cost}{f'; {cells.text(why)}' if why else ''})"


def progress_line(trainer: Document) -> str:
    """Progress of a training run: samples read, steps, loss."""
    samples, sessions = (trainer.get(k) or 0 for k in ("samples", "sessions"))
    return f"{samples:,} samples of {sessions:,} sessions, {steps_line(trainer)}"


def steps_line(trainer: Document) -> str:
    """Steps and loss of a training run."""
    steps, most = (trainer.get(k) or 0 for k in ("steps", "max_steps"))
    loss = f", loss {trainer['loss']:.3f}" if trainer.get("loss") else ""
    spent, longest = trainer.get("train_seconds"), trainer.get("max_seconds")
    seconds = f", {spent:.0f} of at most {longest:.0f} s" if longest and spent is not None else ""
    return f"step {steps:,}{f'/{most:,}' if most else ''}{seconds}{loss}"


def share_done(operation: Document) -> float | None:
    """Share of the training that is done, 0 … 1, by steps or by time; None if unknown, and in stages of unknown length."""
    detail = operation.get("detail") or {}
    if operation.get("stage") == "done":
        return 1.0
    if operation.get("stage") != "training":
        return None
    shares = [
        detail[done] / detail[most]
        for done, most in (("steps", "max_steps"), ("train_seconds", "max_seconds"))
        if detail.get(most) and detail.get(done) is not None
    ]
    return min(1.0, max(shares)) if shares else None


def _took(document: Document) -> float | None:
    began, ended = document.get("created_unix_s"), document.get("finished_unix_s")
    return ended - began if began and ended else None


def _gains(figures: Any) -> str:
    rows = (figures or {}).get("gate") or []
    pairs = [(g["workload"], g["candidate"] / g["parent"] - 1) for g in rows if g.get("parent")]
    return ", ".join(f"{name or 'all'} {100 * gain:+.0f} %" for name, gain in pairs) or cells.NOTHING
