"""`honed replay` on the daemon's own store: the table, the JSON, and one clear line for what can't be answered."""

from __future__ import annotations

import json
import os
import random
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result
from typer.testing import CliRunner

from honed.adapt.protocol import wire
from honed.daemon.commands import replay
from honed.daemon.commands.main import app
from honed.daemon.settings.sections import StoreSettings
from honed.daemon.store.batch_tables import StoredBatch, save_hello
from honed.daemon.store.rollups import count_batch
from honed.daemon.store.store import Store
from tests.daemon.fake_engine import make_batch
from tests.shut_out import shut_out
from tests.tools import ROOT

Run = Callable[..., Result]
NOW_NS = 1_790_000_000_000_000_000
STEPS, REQUESTS = 40, 4
STEP_MS = 10


def engine_batch(seq: int, engine_id: str = "engine-0", workload: str = "chat") -> wire.EventBatch:
    """Forty steps of four requests, 10 ms each and 1 ms more a draft token; drafts are right with 70 %. Then it is idle."""
    draw = random.Random(seq)
    steps: dict[str, list[Any]] = {name: [] for name in wire.StepColumns.__struct_fields__}
    rounds: dict[str, list[Any]] = {name: [] for name in wire.RoundColumns.__struct_fields__}
    end_ns = seq * 10**9
    for number in range(STEPS):
        k, step = draw.choice((0, 1, 2, 3)), seq * 1000 + number
        end_ns += (STEP_MS + k) * 10**6
        row = (step, end_ns, (STEP_MS + k) * 1000, REQUESTS, REQUESTS * (k + 1), 0, REQUESTS * k, 400, k, "policy")
        for name, value in zip(steps, row, strict=True):
            steps[name].append(value)
        for request in range(REQUESTS):
            accepted = next((i for i in range(k) if draw.random() > 0.7), k)
            values = (step, seq * 10 + request, 0, number, k, accepted, 0, 0.0, accepted + 1)
            for name, value in zip(rounds, values, strict=False):
                rounds[name].append(value)
    return wire.EventBatch(
        engine_id=engine_id,
        boot_id="boot",
        seq=seq,
        sent_unix_ns=NOW_NS + seq * 10**9,
        sent_mono_ns=end_ns,
        drafter_version="",
        workloads=[workload],
        steps=wire.StepColumns(**steps),
        rounds=wire.RoundColumns(**rounds),
    )


def put(store: Store, *batches: wire.EventBatch) -> None:
    for one in batches:
        assert store.put(StoredBatch.of(one, wire.encode(one), one.sent_unix_ns, count_batch(one, one.sent_unix_ns)))
    assert store.drain(20.0)


def say_hello(store: Store, *, num_spec_tokens: int = 3, runner: str = "v1", **graphs: list[int]) -> None:
    hello = wire.EngineHello(
        wire_version=1,
        engine_id="engine-0",
        boot_id="boot",
        model_name="m",
        target_path="",
        drafter_path="",
        drafter_version="",
        vllm_version="",
        honed_version="",
        runner=runner,
        method="dflash",
        max_num_seqs=8,
        num_spec_tokens=num_spec_tokens,
        **graphs,
    )
    store.write(lambda db: save_hello(db, "engine-0", "boot", msgspec.json.encode(hello).decode(), NOW_NS))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in [name for name in os.environ if name.startswith("HONED_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HONED_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments: CliRunner().invoke(app, ["replay", *(str(a) for a in arguments)])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Open, as the running daemon has it, while the command reads."""
    opened = Store(tmp_path / "honed.db", StoreSettings(commit_interval_s=0.0), clock=lambda: NOW_NS / 1e9)
    opened.start()
    yield opened
    opened.close()


@pytest.fixture
def filled(store: Store) -> Store:
    put(store, *(engine_batch(seq) for seq in range(1, 9)))
    return store


def answer(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_table_of_what_each_policy_would_have_given(run: Run, filled: Store) -> None:
    result = run("static", "latency", "table:2=3,8=1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "engine-0" in lines[0]
    assert "320 steps" in lines[0]
    names = [line.split()[0] for line in lines if line.split()[:1] and line.split()[0][0] in "(slt"]
    assert names[:7] == ["(logged)", "static:0", "static:1", "static:2", "static:3", "latency", "table:2=3,8=1"]
    assert max(map(len, lines)) <= 100


def test_json_has_the_truth_within_its_intervals(run: Run, filled: Store) -> None:
    document = answer(run("static:0", "static:3", "--json"))
    assert document["engine_id"] == "engine-0"
    assert document["num_spec_tokens"] == 3
    assert document["logged"]["steps"] == 8 * STEPS
    assert document["logged"]["rounds"] == 8 * STEPS * REQUESTS
    none, three = document["policies"]
    assert [none["policy"], three["policy"]] == ["static:0", "static:3"]
    assert none["tokens_per_s"]["value"] == pytest.approx(REQUESTS / 0.010, rel=0.03)
    tokens = 1 + 0.7 + 0.7**2 + 0.7**3
    assert three["acceptance_length"] == pytest.approx(tokens, rel=0.05)
    assert three["tokens_per_s"]["low"] < REQUESTS * tokens / 0.013 < three["tokens_per_s"]["high"]
    assert three["ratio"]["value"] == pytest.approx(
        three["tokens_per_s"]["value"] / document["logged"]["tokens_per_s"], rel=1e-6
    )
    assert 0.3 < three["exact_rounds"] < 1.0
    assert three["exact_seconds"] > 0.9


def test_without_a_policy_all_static_ones_and_our_own_are_asked(run: Run, filled: Store) -> None:
    names = [policy["policy"] for policy in answer(run("--json"))["policies"]]
    assert names == ["static:0", "static:1", "static:2", "static:3", "goodput"]


def test_goodput_and_latency_stand_side_by_side(run: Run, filled: Store) -> None:
    goodput, latency = answer(run("goodput", "latency", "--json"))["policies"]
    assert [goodput["policy"], latency["policy"]] == ["goodput", "latency"]
    assert 0.0 < latency["tpot_s"]["low"] < latency["tpot_s"]["value"] < latency["tpot_p95_s"]
    assert "ms/token" in run("goodput", "latency").stdout


def test_a_table_without_rows_is_the_settings_one(run: Run, filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = run("table")
    assert (failed.exit_code, "table:4=3,16=2" in failed.stderr) == (2, True)
    monkeypatch.setenv("HONED_CONTROLLER__TABLE", "[[2, 3], [8, 1]]")
    assert answer(run("table", "--json"))["policies"][0]["draft_tokens_per_round"] == 1.0


def test_off_is_answered_with_what_stands_for_it(run: Run, filled: Store) -> None:
    failed = run("off")
    assert failed.exit_code == 2
    assert "vLLM, which drafts static:3" in " ".join(failed.stderr.split())


def test_only_the_span_counts(run: Run, filled: Store) -> None:
    since, until = NOW_NS // 10**9 + 2, NOW_NS // 10**9 + 5
    document = answer(run("static:1", "--since", since, "--until", until, "--json"))
    assert document["logged"]["steps"] == 3 * STEPS  # each batch's steps end within the second before it is sent
    assert since <= document["first_unix_s"] < document["last_unix_s"] < until + 0.01


def test_one_workloads_figures(run: Run, store: Store) -> None:
    put(store, *(engine_batch(seq, workload="ab"[seq % 2]) for seq in range(1, 7)))
    document = answer(run("static:1", "--workload", "a", "--json"))
    assert document["logged"]["rounds"] == 3 * STEPS * REQUESTS
    failed = run("static:1", "--workload", "c")
    assert (failed.exit_code, "there is a, b" in failed.stderr) == (1, True)


def test_of_few_requests_the_interval_is_not_known(run: Run, store: Store) -> None:
    put(store, engine_batch(1))
    speed = answer(run("static:1", "--json"))["policies"][0]["tokens_per_s"]
    assert (speed["value"] > 0.0, speed["low"], speed["high"]) == (True, None, None)
    shown = run("static:1")
    assert shown.exit_code == 0, shown.output
    assert "No interval" in shown.stdout
    put(store, engine_batch(2))
    assert "No interval" not in run("static:1").stdout


def test_what_the_engine_was_configured_for_is_known_from_its_hello(run: Run, filled: Store) -> None:
    say_hello(filled, num_spec_tokens=5)
    document = answer(run("static:5", "--json"))
    assert document["num_spec_tokens"] == 5
    assert document["policies"][0]["exact_rounds"] < 1.0


def test_of_an_engine_that_does_not_speculate_there_is_nothing_to_compare(run: Run, store: Store) -> None:
    batch, none = engine_batch(1), [0] * STEPS * REQUESTS
    rounds = msgspec.structs.replace(batch.rounds, num_draft_tokens=none, num_accepted_tokens=none)
    steps = msgspec.structs.replace(batch.steps, num_draft_tokens=none[:STEPS], num_drafting=none[:STEPS])
    put(store, msgspec.structs.replace(batch, rounds=rounds, steps=steps))
    failed = run("--json")
    assert failed.exit_code == 1
    assert "doesn't speculate; there is no length to compare" in " ".join(failed.stderr.split())


def test_the_engines_graphs_bind_what_honed_would_have_chosen(run: Run, filled: Store) -> None:
    unknown = run("goodput", "static:1")
    assert "any mix of lengths" in unknown.stdout
    assert "CUDA graphs are unknown" in unknown.stdout
    say_hello(filled, runner="v2", captured_tokens=[4, 8, 16], captured_lengths=[0, 3])
    document = answer(run("goodput", "static:1", "--json"))
    assert (document["steered_by"]["equal_lengths"], document["steered_by"]["captured_lengths"]) == (True, [0, 3])
    assert [policy["graph_steps"] for policy in document["policies"]] == [1.0, 0.0]
    shown = " ".join(run("goodput", "static:1").stdout.split())
    assert "one length a step (0 or 3, or none)" in shown
    assert "static:1 100.0 %" in shown
    assert "CUDA graphs are unknown" not in shown


def documented() -> list[str]:
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("operate.md", "replay.md"))
    commands = re.findall(r"honed replay ([^`\n]+)", pages)
    assert len(commands) >= 2
    return commands


@pytest.mark.parametrize("arguments", documented())
def test_what_the_docs_say_to_run_runs(run: Run, store: Store, arguments: str) -> None:
    put(store, *(msgspec.structs.replace(engine_batch(seq), sent_unix_ns=time.time_ns()) for seq in range(1, 5)))
    say_hello(store, num_spec_tokens=7)
    result = run(*arguments.split())
    assert result.exit_code == 0, result.output
    asked = [word for word in arguments.split() if word not in ("--last", "2h")]
    assert [line.split()[0] for line in result.stdout.splitlines() if line.split()[0] in asked] == asked


def test_several_engines_have_to_be_told_apart(run: Run, filled: Store) -> None:
    put(filled, engine_batch(1, "engine-1"))
    failed = run("static:1")
    assert failed.exit_code == 2
    assert "engine-0, engine-1" in failed.stderr
    assert "--engine" in failed.stderr
    assert answer(run("static:1", "--engine", "engine-1", "--json"))["logged"]["steps"] == STEPS
    assert run("static:1", "--engine", "engine-7").exit_code == 1


def test_an_unknown_policy_is_answered_with_those_there_are(run: Run, filled: Store) -> None:
    failed = run("static:9")
    assert failed.exit_code == 2
    assert "static:0 … static:3" in " ".join(failed.stderr.split())
    assert "latency" in failed.stderr


@pytest.mark.parametrize("span", [("--last", "1s"), ("--until", "1000000000"), ("--since", "2099-01-01")])
def test_an_empty_span_ends_with_1(run: Run, filled: Store, span: tuple[str, str]) -> None:
    failed = run("static:1", *span)
    assert failed.exit_code == 1
    assert "no verify round" in failed.stderr
    assert "→" in failed.stderr


def test_a_span_with_trees_is_refused(run: Run, store: Store) -> None:
    batch = engine_batch(1)
    count = len(batch.rounds.step)
    trees = [min(k, 1) for k in batch.rounds.num_draft_tokens]
    nodes = [node for n in batch.rounds.num_accepted_tokens for node in range(n)]
    rounds = msgspec.structs.replace(batch.rounds, chain_tokens=trees, chain_accepted=[0] * count, nodes=nodes)
    put(store, msgspec.structs.replace(batch, rounds=rounds))
    result = run()
    assert result.exit_code == 1
    assert f"{sum(trees):,} rounds of that time verified draft trees" in result.stderr
    assert "--until" in result.stderr


def test_an_empty_store_ends_with_1(run: Run, store: Store) -> None:
    failed = run("static:1")
    assert failed.exit_code == 1
    assert "no engine has logged" in failed.stderr


def test_a_store_that_this_user_may_not_look_for_is_not_called_missing(run: Run, store: Store, tmp_path: Path) -> None:
    run("static:1")  # imports all
    with shut_out(tmp_path):
        failed = run("static:1")
    assert failed.exit_code == 1
    assert "the right to read it" in failed.stderr


def test_no_store_ends_with_1_and_makes_none(run: Run, tmp_path: Path) -> None:
    failed = run("static:1")
    assert failed.exit_code == 1
    assert "no database" in failed.stderr
    assert "--state-dir" in failed.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("a damaged database blamed on permissions")
def test_a_file_that_is_no_database_ends_with_1(run: Run, tmp_path: Path) -> None:
    (tmp_path / "honed.db").write_bytes(b"x" * 4096)
    failed = run("static:1")
    assert failed.exit_code == 1
    assert "can't be read" in failed.stderr
    assert "The file is damaged" in failed.stderr


@pytest.mark.fault("rounds dated later than now")
def test_what_a_wrong_clock_dated_later_than_now_is_left_out(run: Run, filled: Store) -> None:
    right = answer(run("static:1", "--json"))
    ten_years_later_ns = NOW_NS + 10 * 365 * 86400 * 10**9
    put(filled, msgspec.structs.replace(engine_batch(99), sent_unix_ns=ten_years_later_ns), engine_batch(100))
    found = answer(run("static:1", "--json"))
    assert found["logged"]["rounds"] == right["logged"]["rounds"] + STEPS * REQUESTS
    assert found["last_unix_s"] < NOW_NS / 1e9 + 200.0


def test_without_a_span_only_the_latest_rounds_are_read(run: Run, filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "DEFAULT_ROUNDS", 3 * STEPS * REQUESTS + 1)
    every = 8 * STEPS * REQUESTS
    latest = answer(run("static:1", "--json"))
    assert 2 * STEPS * REQUESTS < latest["logged"]["rounds"] <= replay.DEFAULT_ROUNDS
    assert latest["last_unix_s"] == NOW_NS / 1e9 + 8
    assert latest["logged"]["rounds"] + latest["older_rounds_left_out"] == every
    assert f"{latest['older_rounds_left_out']} older rounds are left out" in run("static:1").stdout
    before = answer(run("static:1", "--until", NOW_NS // 10**9 + 6, "--json"))
    assert 2 * STEPS * REQUESTS < before["logged"]["rounds"] <= replay.DEFAULT_ROUNDS
    assert NOW_NS // 10**9 + 5 < before["last_unix_s"] < NOW_NS // 10**9 + 6
    assert answer(run("static:1", "--since", NOW_NS // 10**9, "--json"))["older_rounds_left_out"] == 0
    monkeypatch.setattr(replay, "DEFAULT_ROUNDS", every)
    whole = answer(run("static:1", "--json"))
    assert (whole["logged"]["rounds"], whole["older_rounds_left_out"]) == (every, 0)


def test_rounds_are_counted_by_the_minute_where_sums_by_second_are_gone(
    run: Run, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seq in range(1, 9):
        put(store, msgspec.structs.replace(engine_batch(seq), sent_unix_ns=NOW_NS + 60 * seq * 10**9))
    store.write(lambda db: db.conn.execute("DELETE FROM rollups WHERE resolution_s = 1"))
    monkeypatch.setattr(replay, "DEFAULT_ROUNDS", 3 * STEPS * REQUESTS)
    document = answer(run("static:1", "--json"))
    assert document["logged"]["rounds"] == 3 * STEPS * REQUESTS
    assert document["older_rounds_left_out"] == 5 * STEPS * REQUESTS


def test_the_minute_that_sums_by_second_begin_in_is_counted_whole(
    run: Run, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 40, 50, …, 110 s; sums by second are kept from second 85, amid a minute."""
    second = NOW_NS // 10**9 // 60 * 60
    for seq in range(1, 9):
        put(store, msgspec.structs.replace(engine_batch(seq), sent_unix_ns=(second + 30 + 10 * seq) * 10**9))
    store.write(lambda db: db.conn.execute(f"DELETE FROM rollups WHERE resolution_s = 1 AND bucket_s < {second + 85}"))
    monkeypatch.setattr(replay, "DEFAULT_ROUNDS", 4 * STEPS * REQUESTS)
    document = answer(run("static:1", "--json"))
    every = document["logged"]["rounds"] + document["older_rounds_left_out"]
    assert (document["logged"]["rounds"], every) == (3 * STEPS * REQUESTS, 8 * STEPS * REQUESTS)
    monkeypatch.setattr(replay, "MOST_ROUNDS", 3 * STEPS * REQUESTS)
    assert run("static:1", "--since", second + 89).exit_code == 0
    in_time = 5 * STEPS * REQUESTS + REQUESTS  # of the batch of 60 s the last step only
    assert f"{in_time:,} verify rounds" in run("static:1", "--since", second + 60).stderr


def test_rounds_that_nobody_counted_are_no_more_than_can_be_replayed(
    run: Run, filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where sums by minute are kept for less long than batches."""
    filled.write(lambda db: db.conn.execute("DELETE FROM rollups"))
    monkeypatch.setattr(replay, "MOST_ROUNDS", 4 * STEPS * REQUESTS)
    for span in ((), ("--since", NOW_NS // 10**9)):
        failed = run("static:1", *span)
        assert failed.exit_code == 2
        assert "800 and more verify rounds, more than the 640" in " ".join(failed.stderr.split())
        fitting = re.search(r"--until (\S+)", failed.stderr)
        assert fitting is not None
        document = answer(run("static:1", *span, "--until", fitting[1], "--json"))
        assert 2 * STEPS * REQUESTS <= document["logged"]["rounds"] <= 4 * STEPS * REQUESTS


def test_what_came_long_after_the_span_is_not_read(run: Run, filled: Store, tmp_path: Path) -> None:
    put(filled, *(msgspec.structs.replace(engine_batch(seq), sent_unix_ns=NOW_NS + 100 * 10**9) for seq in (9, 10)))
    with sqlite3.connect(tmp_path / "honed.db") as database:
        database.execute("UPDATE batches SET frame = x'00' WHERE seq = 10")
    database.close()
    assert answer(run("static:1", "--json"))["unreadable_batches"] == 1
    document = answer(run("static:1", "--until", NOW_NS // 10**9 + 9, "--json"))
    assert (document["logged"]["steps"], document["unreadable_batches"]) == (8 * STEPS, 0)


def test_a_span_of_too_many_rounds_is_refused_with_one_that_fits(
    run: Run, filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MOST_ROUNDS", 4 * STEPS * REQUESTS)
    since, until = NOW_NS // 10**9, NOW_NS // 10**9 + 9
    failed = run("static:1", "--since", since)
    assert failed.exit_code == 2
    assert "1,280 verify rounds" in failed.stderr
    assert "--last" in failed.stderr
    failed = run("static:1", "--since", since, "--until", until)
    fitting = re.search(r"--since (\S+)", failed.stderr)
    assert fitting is not None
    document = answer(run("static:1", "--since", fitting[1], "--until", until, "--json"))
    assert 0 < document["logged"]["rounds"] <= 4 * STEPS * REQUESTS


def test_the_shorter_last_that_is_named_fits(run: Run, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches sent 90, 80, …, 20 s ago."""
    now_ns = time.time_ns()
    for seq in range(1, 9):
        put(store, msgspec.structs.replace(engine_batch(seq), sent_unix_ns=now_ns - (100 - 10 * seq) * 10**9))
    monkeypatch.setattr(replay, "MOST_ROUNDS", 4 * STEPS * REQUESTS)
    failed = run("static:1", "--last", "1d")
    fitting = re.search(r"--last (\S+)", failed.stderr)
    assert fitting is not None
    document = answer(run("static:1", "--last", fitting[1], "--json"))
    assert 2 * STEPS * REQUESTS <= document["logged"]["rounds"] <= 4 * STEPS * REQUESTS


def test_last_and_since_exclude_each_other(run: Run, filled: Store) -> None:
    assert run("static:1", "--last", "1h", "--since", "1h").exit_code == 2


@pytest.mark.parametrize("arguments", [("--seed", -1), ("--cost", "cpu"), ("--batch", 3)])
def test_options_that_make_no_sense_here_end_with_2(run: Run, filled: Store, arguments: tuple[str, Any]) -> None:
    failed = run("static:1", *arguments)
    assert failed.exit_code == 2
    assert arguments[0] in failed.stderr
    assert "Traceback" not in failed.output


def test_batches_that_cannot_be_read_are_counted_and_left_out(run: Run, filled: Store, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "honed.db") as database:
        database.execute("UPDATE batches SET frame = x'00' WHERE seq = 3")
    database.close()
    result = run("static:1")
    assert "1 batches could not be read" in result.stdout
    assert "280 steps" in result.stdout


def test_one_draft_length_gives_acceptance_but_no_speed(run: Run, store: Store) -> None:
    put(store, *(make_batch(seq, unix_ns=NOW_NS + seq * 10**7) for seq in range(1, 30)))
    document = answer(run("static:1", "static:3", "--json"))
    one, three = document["policies"]
    assert one["tokens_per_s"] is None
    assert one["acceptance_length"] > 1.0
    assert three["tokens_per_s"]["value"] == pytest.approx(document["logged"]["tokens_per_s"])
    assert "explore_share" in run("static:1").stdout
