"""`honed replay`: predicts the result of other draft-length rules on the stored log.

It reads the database itself, read-only and a page at a time, so it works with or without a running daemon.
`adapt.replay.replay` computes the answer; this module holds the question, the batches and the table.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from honed.daemon.client.client import EXIT_FAILED, EXIT_USAGE, exit_code_of
from honed.daemon.client.terminal import JsonFlag, duration_s, duration_text, emit, fail, load_settings, moment_s
from honed.daemon.commands.show import cells
from honed.daemon.commands.show.cells import Rows
from honed.daemon.errors import HonedError
from honed.recalib.registry.durable import is_missing

if TYPE_CHECKING:
    from honed.adapt.control.settings import ControllerSettings
    from honed.adapt.protocol.wire import EngineHello
    from honed.adapt.replay.log import Log

Document = dict[str, Any]

DEFAULT_ROUNDS = 200_000
"""Latest rounds replayed if no span is given: a few seconds for each policy."""
MOST_ROUNDS = 1_000_000
"""Most rounds of a span: with long drafts and short requests, a minute for each policy and 2 GB."""


class ReplayError(RuntimeError):
    """The replay is impossible; `cure` says what to do."""

    def __init__(self, message: str, *, cure: str = "", exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.cure = cure
        self.exit_code = exit_code


@dataclass(frozen=True)
class Question:
    """Selection to replay; empty and None select all. `since_s` is included, `until_s` is not.

    Without `since_s`: the latest `DEFAULT_ROUNDS` before `until_s`.
    """

    policies: tuple[str, ...] = ()
    engine: str = ""
    workload: str = ""
    since_s: float | None = None
    until_s: float | None = None
    seed: int = 0
    settings: ControllerSettings | None = None
    """The daemon's; None: the defaults. The engine's hello fills in unset ones."""


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("replay")(command)


def command(
    context: typer.Context,
    policies: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[POLICY]...",
            show_default=False,
            help="static:K, static (each K), table:BATCH=K,BATCH=K (K up to that batch size), table (from the settings), "
            "goodput, latency. Without any: static and goodput.",
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="Engine; optional if there is only one.")] = "",
    workload: Annotated[str, typer.Option(help="Figures of this workload only.")] = "",
    since: Annotated[str, typer.Option(help="From: 2026-11-20T12:00, unix seconds, or 2h (ago).")] = "",
    until: Annotated[str, typer.Option(help="Up to; same formats.")] = "",
    last: Annotated[str, typer.Option(help="The last 10m, 2h, 1d. Without a span: the latest 200,000 rounds.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of random draws.")] = 0,
    state_dir: Annotated[Path | None, typer.Option(help="The daemon's state folder.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict the result of other draft-length rules on the stored log. Needs no daemon."""
    if last and since:
        raise typer.BadParameter("give either --last or --since", param_hint="--last")
    now_s = time.time()
    since_s = now_s - duration_s(last) if last else moment_s(since, now_s) if since else None
    settings = load_settings(context.obj.config, state_dir=state_dir)
    question = Question(
        tuple(policies or ()),
        engine,
        workload,
        since_s,
        moment_s(until, now_s) if until else None,
        seed,
        settings.controller_settings(),
    )
    try:
        emit(replay(settings.paths.database, question), as_json, render)
    except ReplayError as error:
        fail(str(error), cure=error.cure, exit_code=error.exit_code)


def replay(database: Path, question: Question) -> Document:
    """Answer a question from a database.

    Raises:
        ReplayError: missing or unreadable database, no rounds or more than `MOST_ROUNDS` in the span, unknown policy, engine
            or workload.
    """
    from honed.adapt.control.settings import ControllerSettings
    from honed.adapt.replay.replay import Replay
    from honed.adapt.replay.rules import parse_rule

    engine_id, hello = _engine(database, question.engine)
    now_s = time.time()  # what a clock that was wrong has stamped later isn't the latest
    until_s = now_s if question.until_s is None else min(question.until_s, now_s)
    since_s, num_left_out = _start(database, engine_id, question, until_s)
    log, span, unreadable = _read(database, engine_id, since_s, until_s)
    num_spec_tokens = max(log.most_drafted, (hello.chain_tokens or hello.num_spec_tokens) if hello else 0)
    if num_spec_tokens == 0:
        raise ReplayError("this engine doesn't speculate; there is no length to compare")
    settings = question.settings or ControllerSettings()
    settings = settings.with_graphs(*(hello.captured_tokens, hello.captured_lengths) if hello else ((), ()))
    try:
        names = _named(question.policies, num_spec_tokens)
        rules = [parse_rule(text, num_spec_tokens, settings.table) for text in names]
    except ValueError as error:
        raise ReplayError(str(error), exit_code=EXIT_USAGE) from error
    asked = Replay(
        log,
        num_spec_tokens,
        question.seed,
        settings,
        can_shorten=hello.shortens_block if hello else None,
        can_skip=hello is not None and hello.method in ("dflash", "dspark"),
        mask=_mask(log, question.workload),
    )
    return {
        "engine_id": engine_id,
        "workload": question.workload,
        "first_unix_s": span[0] / 1e9,
        "last_unix_s": span[1] / 1e9,
        "older_rounds_left_out": num_left_out,
        "num_spec_tokens": num_spec_tokens,
        "steered_by": {
            "max_k": min(k for k in (settings.max_k, settings.request_ceiling, num_spec_tokens) if k >= 0),
            "equal_lengths": settings.are_lengths_equal,
            "captured_lengths": list(settings.captured_lengths),
            "hysteresis": settings.hysteresis,
            "explore_share": settings.explore_share,
            "is_hello_known": hello is not None,
        },
        "unreadable_batches": unreadable,
        "logged": asdict(asked.logged),
        "policies": [asdict(asked.predict(rule)) for rule in rules],
    }


def render(document: Document) -> RenderableType:
    """A line for the log and one for each policy; the fastest is bold."""
    logged, policies = document["logged"], document["policies"]
    table = Rows.of("policy", "tokens/s", "95 %", "ratio", "ms/token", "p95", "τ", "k", "exact", "seen")
    table.add_row(
        "(logged)",
        _speed(logged["tokens_per_s"]),
        "",
        "1.000",
        _ms(logged["tpot_s"]),
        _ms(logged["tpot_p95_s"]),
        *_lengths(logged),
        "",
        "",
    )
    known = [policy["tokens_per_s"]["value"] for policy in policies if policy["tokens_per_s"]]
    for policy in policies:
        speed, ratio, tpot = (policy[name] or {} for name in ("tokens_per_s", "ratio", "tpot_s"))
        table.add_row(
            policy["policy"],
            _speed(speed.get("value")),
            _interval(policy["tokens_per_s"]),
            cells.number(ratio.get("value"), 3),
            _ms(tpot.get("value")),
            _ms(policy["tpot_p95_s"]),
            *_lengths(policy),
            cells.percent(policy["exact_tokens"]),
            cells.percent(policy["exact_seconds"]) if speed else cells.NOTHING,
            style="bold" if speed and speed["value"] == max(known) else None,
        )
    head = (
        f"{document['engine_id']}{', workload ' + document['workload'] if document['workload'] else ''}: "
        f"{cells.count(logged['tokens'])} tokens of {cells.count(logged['requests'])} requests, "
        f"{cells.count(logged['steps'])} steps, {cells.seconds(logged['seconds'])} busy, "
        f"{cells.moment(document['first_unix_s'])} to {cells.moment(document['last_unix_s'])}"
    )
    notes = [
        "ms/token: mean time per output token over requests; p95: 95th percentile, which the latency rule lowers.",
        "τ: tokens per round; k: draft tokens per round. Text and load are those of the log.",
        "exact: tokens of rounds that the log determines; seen: time measured on logged steps. The rest is modelled.",
    ]
    notes += _about_rules(document)
    if len(known) < len(policies):
        notes.append("No speed: only one draft length was logged. Let the engine explore (controller.explore_share).")
    if any(policy["tokens_per_s"] and policy["tokens_per_s"]["low"] is None for policy in policies):
        notes.append("No interval: too few requests to estimate their variance.")
    if document["older_rounds_left_out"]:
        left_out = f"{cells.count(document['older_rounds_left_out'])} older rounds are left out"
        notes.append(f"{left_out}: a span (--last, --since) may have up to {MOST_ROUNDS:,}.")
    if document["unreadable_batches"]:
        notes.append(f"{cells.count(document['unreadable_batches'])} batches could not be read and were left out.")
    return Group(Text(head), table, *(Text(note, "dim") for note in notes))


def _about_rules(document: Document) -> list[str]:
    """Limits of the adaptive rules, and policies whose lengths have no CUDA graph."""
    by, policies = document["steered_by"], document["policies"]
    lengths = " or ".join(map(str, by["captured_lengths"]))
    notes = []
    if any(policy["policy"] in ("goodput", "latency") for policy in policies):
        kind = "any mix of lengths"
        if by["equal_lengths"]:
            kind = f"one length a step ({lengths}, or none)" if lengths else "one length a step"
        notes.append(
            f"goodput, latency: {kind}, at most {by['max_k']}; {cells.percent(by['explore_share'])} of the steps explore, "
            "more if predicted speeds are close."
        )
        if not by["is_hello_known"] and not by["equal_lengths"]:
            notes.append(
                "The engine's CUDA graphs are unknown. If they are for one length a step, set "
                "controller.equal_lengths and controller.captured_lengths."
            )
    lost = [
        f"{policy['policy']} {cells.percent(1.0 - policy['graph_steps'])}"
        for policy in policies
        if policy["graph_steps"] is not None and policy["graph_steps"] < 0.995
    ]
    if lost:
        graphs = f"one length a step{f', {lengths}' if lengths else ''}"
        notes.append(f"CUDA graphs are for {graphs}. Steps without prefill that lose the graph: {', '.join(lost)}.")
        notes.append("Such a step costs more than shown, unless the log has similar ones.")
    return notes


def _ms(seconds: float | None) -> str:
    return cells.number(None if seconds is None else 1e3 * seconds, 2)


def _speed(value: Any) -> str:
    return cells.number(value, 0 if isinstance(value, int | float) and value >= 1000 else 1)


def _interval(speed: Document | None) -> str:
    if speed is None or speed["low"] is None:
        return cells.NOTHING
    return f"{_speed(speed['low'])}–{_speed(speed['high'])}"


def _lengths(row: Document) -> tuple[str, str]:
    return cells.number(row["acceptance_length"], 3), cells.number(row["draft_tokens_per_round"], 2)


def _named(policies: tuple[str, ...], num_spec_tokens: int) -> list[str]:
    every = [f"static:{k}" for k in range(num_spec_tokens + 1)]
    named = [name for text in policies or ("static", "goodput") for name in (every if text == "static" else [text])]
    return list(dict.fromkeys(named))


def _engine(database: Path, wanted: str) -> tuple[str, EngineHello | None]:
    """Find the selected engine and its hello message."""
    import msgspec

    from honed.adapt.protocol.wire import EngineHello

    with _opened(database) as conn:
        names = [row[0] for row in conn.execute("SELECT DISTINCT engine_id FROM batches ORDER BY 1")]
        said = "SELECT engine_id, hello FROM boots WHERE hello IS NOT NULL ORDER BY last_seen_unix_ns"
        hellos = {row[0]: row[1] for row in conn.execute(said)}
    if not names:
        raise ReplayError("no engine has logged anything yet", cure="`honed engines` shows which have attached.")
    if wanted and wanted not in names:
        raise ReplayError(f"no engine {wanted!r} in the log: there is {', '.join(names)}")
    if not wanted and len(names) > 1:
        several = f"the log has {len(names)} engines: {', '.join(names)}"
        raise ReplayError(several, cure="Name one with --engine.", exit_code=EXIT_USAGE)
    engine_id = wanted or names[0]
    hello = hellos.get(engine_id)
    return engine_id, msgspec.json.decode(hello, type=EngineHello) if hello else None


@contextmanager
def _opened(database: Path) -> Iterator[Any]:
    """Yield a read-only connection; SQLite errors become ReplayError."""
    import pysqlite3

    from honed.daemon.store.database import connect, reader_cure

    if is_missing(database):
        cure = "Name the daemon's state folder with --state-dir."
        raise ReplayError(f"there is no database at {database}", cure=cure)
    try:
        connection = connect(database, read_only=True)
        try:
            yield connection.conn
        finally:
            connection.close()
    except pysqlite3.Error as error:
        raise ReplayError(f"{database} can't be read: {error}", cure=reader_cure(error)) from error


def _start(database: Path, engine_id: str, question: Question, until_s: float) -> tuple[float | None, int]:
    """Start of the replay (None: the first round), and the number of older rounds left out.

    Raises:
        ReplayError: the requested span has too many rounds.
    """
    with _opened(database) as conn:
        rounds = _rounds_by_time(conn, engine_id, question.since_s, until_s)
    total = sum(count for _, count in rounds)
    if question.since_s is None:
        if total <= DEFAULT_ROUNDS:
            return None, 0
        start_s = _start_of_latest(rounds, DEFAULT_ROUNDS)
        return start_s, sum(count for bucket_s, count in rounds if bucket_s < start_s)
    if total <= MOST_ROUNDS:
        return question.since_s, 0
    start_s = _start_of_latest(rounds, MOST_ROUNDS * 9 // 10)  # traffic may be denser when the command is run again
    shorter = f"--last {duration_text(max(int(time.time()) - start_s, 1))}"
    if question.until_s is not None:
        shorter = f"--since {dt.datetime.fromtimestamp(start_s).isoformat()} with this --until"
    raise _too_many(f"{total:,}", shorter)


def _too_many(rounds: str, shorter: str) -> ReplayError:
    message = f"that span has {rounds} verify rounds, more than the {MOST_ROUNDS:,} that can be replayed at once"
    return ReplayError(message, cure=f"Take a shorter one: {shorter} fits.", exit_code=EXIT_USAGE)


def _rounds_by_time(conn: Any, engine_id: str, since_s: float | None, until_s: float) -> list[tuple[int, int]]:
    """Unix second and number of a span's verify rounds, latest first: by second; older ones by minute."""
    oldest = conn.execute("SELECT sent_unix_ns FROM batches WHERE engine_id = ? ORDER BY id LIMIT 1", (engine_id,)).fetchone()
    first_s = max(since_s or 0.0, oldest[0] / 1e9 - 1.0 if oldest else 0.0)  # sums are kept for longer than batches
    by_second = conn.execute("SELECT min(bucket_s) FROM rollups WHERE resolution_s = 1").fetchone()[0]
    edge_s = 1 << 62 if by_second is None else by_second
    rounds: list[tuple[int, int]] = []
    for resolution_s, low_s, high_s in ((1, edge_s, 1 << 62), (60, 0, edge_s)):
        if first_s >= high_s:
            continue
        rounds += conn.execute(
            "SELECT bucket_s, sum(rounds + plain_rounds) FROM rollups WHERE resolution_s = ? AND bucket_s >= ? AND bucket_s < ?"
            " AND engine_id = ? GROUP BY bucket_s ORDER BY bucket_s DESC",
            (resolution_s, max(low_s, int(first_s) // resolution_s * resolution_s), min(high_s, until_s), engine_id),
        ).fetchall()
    # The minute at the boundary has its last seconds in the sums by second.
    counted = conn.execute(
        "SELECT coalesce(sum(rounds + plain_rounds), 0) FROM rollups WHERE resolution_s = 1 AND bucket_s < ? AND engine_id = ?",
        (-(-edge_s // 60) * 60, engine_id),
    ).fetchone()[0]
    parts = ((bucket_s, count - counted * (bucket_s < edge_s < bucket_s + 60)) for bucket_s, count in rounds)
    return [(bucket_s, count) for bucket_s, count in parts if count > 0]


def _start_of_latest(rounds: list[tuple[int, int]], most: int) -> int:
    """Earliest Unix second with at most `most` rounds after it, unless the latest bucket alone has more."""
    start_s, total = rounds[0][0], 0
    for bucket_s, count in rounds:
        total += count
        if total > most:
            break
        start_s = bucket_s
    return start_s


def _read(database: Path, engine_id: str, since_s: float | None, until_s: float) -> tuple[Log, tuple[int, int], int]:
    """Read the span's batches: log, ends of its first and last step, and number of unreadable batches.

    Raises:
        ReplayError: there are too many rounds, or none, or trees.
    """
    from honed.adapt.replay.log import LogBuilder
    from honed.daemon.store import export

    builder = LogBuilder(float("-inf") if since_s is None else since_s * 1e9, until_s * 1e9)
    tally = export.Tally()
    try:
        last_ns = 0
        for batch in export.batches(database, export.Chosen(engine=engine_id, since_s=since_s, until_s=until_s), tally):
            try:
                builder.add(batch)
            except ValueError:
                tally.unreadable_batches += 1
            if builder.num_rounds > MOST_ROUNDS:  # not checked before if sums are kept for less time than batches
                until = dt.datetime.fromtimestamp(last_ns // 10**9).isoformat()
                raise _too_many(f"{builder.num_rounds:,} and more", f"--until {until}")
            last_ns = builder.last_unix_ns
    except HonedError as error:
        raise ReplayError(str(error), cure=error.cure, exit_code=exit_code_of(error)) from error
    log = builder.log()
    if not len(log.step):
        cure = "Take a longer span: --last 1d, or neither --since nor --until."
        raise ReplayError(f"engine {engine_id} has logged no verify round in that time", cure=cure)
    if builder.num_trees:
        since = dt.datetime.fromtimestamp(builder.first_tree_unix_ns / 1e9).isoformat(timespec="seconds")
        raise ReplayError(
            f"{builder.num_trees:,} rounds of that time verified draft trees, and a replay follows chains only",
            cure=f"Take a span without: the first tree is of {since} (--until), or name another engine (--engine).",
        )
    return log, (builder.first_unix_ns, builder.last_unix_ns), tally.unreadable_batches


def _mask(log: Log, workload: str) -> Any:
    """Mask of a workload's rounds; None for all."""
    import numpy as np

    if not workload:
        return None
    mine = np.array([name == workload for name, _ in log.cells])[log.cell[log.request]]
    if not mine.any():
        names = sorted({log.cells[cell][0] for cell in np.unique(log.cell)})
        raise ReplayError(f"no workload {workload!r} in that time: there is {', '.join(names)}")
    return mine
