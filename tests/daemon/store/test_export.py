"""Exported rows are what was stored: every round once, at its time, with its own token ids."""

import json
import math
import os
import zlib
from pathlib import Path

import pysqlite3
import pytest
from sqlite_utils import Database

from honed.adapt.protocol import wire
from honed.daemon.client.client import EXIT_FAILED, EXIT_USAGE, exit_code_of
from honed.daemon.errors import RequestError, UnknownError
from honed.daemon.store import export
from honed.daemon.store.export import Chosen, ExportError
from honed.daemon.store.migrations import migrations
from tests.shut_out import shut_out

SENT_NS = 1_790_000_000_000_000_000
ROUNDS = (("a", 3, 2), ("b", 0, 0), ("b", 2, 0))
"""Workload, drafted, accepted; the last two share a step."""


def batch(seq: int, *, engine_id: str = "engine-0", with_ids: bool = True) -> wire.EventBatch:
    """Three rounds in two steps, the first of which ended 2 s, the second 1 s before sending."""
    emitted = [accepted + 1 for _, _, accepted in ROUNDS]
    drafted = [k for _, k, _ in ROUNDS]
    return wire.EventBatch(
        engine_id=engine_id,
        boot_id="boot",
        seq=seq,
        sent_unix_ns=SENT_NS + seq * 10**9,
        sent_mono_ns=50 * 10**9,
        drafter_version="v0001-aa",
        workloads=["b", "a"],
        steps=wire.StepColumns(
            step=[10, 11],
            end_ns=[48 * 10**9, 49 * 10**9],
            duration_us=[1000, 2000],
            num_requests=[1, 2],
            num_tokens=[4, 4],
            num_prefill_tokens=[0, 0],
            num_draft_tokens=[3, 2],
            context_tokens=[100, 300],
            num_drafting=[3, 2],
            decision=["policy", "override"],
        ),
        rounds=wire.RoundColumns(
            step=[10, 11, 11],
            request=[2**64 - 1, 5, 6],
            workload=[1, 0, 0],
            position=[99, 10, 20],
            num_draft_tokens=drafted,
            num_accepted_tokens=[accepted for *_, accepted in ROUNDS],
            num_invalid_tokens=[0, 0, 0],
            temperature=[0.0, 0.5, 0.5],
            num_emitted=emitted,
            emitted=list(range(sum(emitted))) if with_ids else [],
            draft=list(range(100, 100 + sum(drafted))) if with_ids else [],
        ),
    )


def store(path: Path, frames: list[tuple[wire.EventBatch, bytes, str]]) -> None:
    """A database in the daemon's own layout, WAL as the daemon's is."""
    database = Database(pysqlite3.connect(str(path)))
    database.conn.execute("PRAGMA journal_mode=WAL")
    migrations.apply(database)
    for b, frame, malformed in frames:
        database["batches"].insert(
            {
                "engine_id": b.engine_id,
                "boot_id": b.boot_id,
                "seq": b.seq,
                "received_unix_ns": b.sent_unix_ns,
                "stored_s": 0,
                "sent_unix_ns": b.sent_unix_ns,
                "drafter_version": b.drafter_version,
                "steps": 2,
                "rounds": 3,
                "draft_tokens": 5,
                "accepted_tokens": 2,
                "malformed": malformed,
                "bytes": len(frame),
                "frame_bytes": len(frame),
                "frame": frame,
            }
        )
    database.conn.commit()
    database.conn.close()


def stored(b: wire.EventBatch) -> tuple[wire.EventBatch, bytes, str]:
    return b, zlib.compress(wire.encode(b)), ""


def exported(database: Path, chosen: Chosen | None = None) -> list[dict[str, object]]:
    out = database.parent / "out.jsonl"
    export.export(database, str(out), "jsonl", chosen or Chosen())
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "honed.db"
    store(path, [stored(batch(1)), stored(batch(2, engine_id="engine-1", with_ids=False))])
    return path


def test_every_round_is_a_row_with_its_steps_figures(database: Path) -> None:
    rows = exported(database)
    assert len(rows) == 6
    assert [(r["workload"], r["num_draft_tokens"], r["num_accepted_tokens"]) for r in rows[:3]] == list(ROUNDS)
    assert [r["decision"] for r in rows[:3]] == ["policy", "override", "override"]
    assert [r["step_context_tokens"] for r in rows[:3]] == [100, 300, 300]
    assert rows[0]["request"] == 2**64 - 1
    assert all(list(row) == list(export.COLUMNS) for row in rows)


def test_token_ids_belong_to_their_round_and_are_null_where_not_logged(database: Path) -> None:
    rows = exported(database)
    assert [r["emitted"] for r in rows[:3]] == [[0, 1, 2], [3], [4]]
    assert [r["draft"] for r in rows[:3]] == [[100, 101, 102], [], [103, 104]]
    assert all(r["emitted"] is None and r["draft"] is None for r in rows[3:])


def test_a_rounds_time_is_the_end_of_its_step_in_wall_time(database: Path) -> None:
    sent_ns = SENT_NS + 10**9
    assert [r["t_unix_ns"] for r in exported(database)[:3]] == [sent_ns - 2 * 10**9, sent_ns - 10**9, sent_ns - 10**9]


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        (Chosen(engine="engine-1"), 3),
        (Chosen(workload="a"), 2),
        (Chosen(engine="engine-0", workload="b"), 2),
        (Chosen(since_s=SENT_NS / 1e9), 5),  # the first batch's first step lies one second before
        (Chosen(until_s=SENT_NS / 1e9), 1),
        (Chosen(since_s=SENT_NS / 1e9, until_s=SENT_NS / 1e9 + 0.5), 3),
        (Chosen(since_s=-1e12, until_s=253402214400.0), 6),
        (Chosen(since_s=-math.inf, until_s=math.inf), 6),
        (Chosen(since_s=1e12), 0),
    ],
)
def test_what_is_chosen(database: Path, chosen: Chosen, count: int) -> None:
    assert len(exported(database, chosen)) == count


def test_an_engine_that_never_attached_is_refused(database: Path) -> None:
    out = database.parent / "out.jsonl"
    with pytest.raises(UnknownError, match="no engine 'nobody' has ever attached") as caught:
        export.export(database, str(out), "jsonl", Chosen(engine="nobody"))
    assert exit_code_of(caught.value) == EXIT_FAILED
    assert not list(database.parent.glob("out*"))


def test_parquet_holds_the_same_rows(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(export, "ROW_GROUP_ROWS", 2)
    out = database.parent / "out.parquet"
    assert export.export(database, str(out), "parquet", Chosen())["rounds"] == 6
    assert parquet.ParquetFile(out).num_row_groups == 2
    rows = parquet.read_table(out).to_pylist()
    for row, line in zip(rows, exported(database), strict=True):
        assert row == line


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_nobody_else_reads_what_was_exported(database: Path, format: str) -> None:
    out = database.parent / "out"
    before = os.umask(0)
    try:
        export.export(database, str(out), format, Chosen())
    finally:
        os.umask(before)
    assert out.stat().st_mode & 0o777 == 0o600


def test_more_batches_than_a_page_come_once_each_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "honed.db"
    count = 2 * export.PAGE_BATCHES + 3
    store(path, [stored(batch(seq)) for seq in range(1, count + 1)])
    assert [r["seq"] for r in exported(path)][::3] == list(range(1, count + 1))


def test_what_cannot_be_read_is_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "honed.db"
    short = wire.EventBatch(**{f: getattr(batch(4), f) for f in batch(4).__struct_fields__} | {"workloads": ["b"]})
    hello = zlib.compress(wire.encode(wire.Ack(boot_id="x", seq=1)))
    frames = [stored(batch(1)), (batch(2), b"not zlib", ""), (batch(3), hello, ""), stored(short)]
    frames.append((batch(5), stored(batch(5))[1], "columns contradict each other"))
    store(path, frames)
    out = tmp_path / "out.jsonl"
    assert export.export(path, str(out), "jsonl", Chosen()) == {"rounds": 3, "batches": 1, "unreadable_batches": 4}


def test_a_missing_database_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(UnknownError, match="no database") as caught:
        export.export(tmp_path / "honed.db", str(tmp_path / "x"), "jsonl", Chosen())
    assert exit_code_of(caught.value) == EXIT_FAILED
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_this_user_may_not_look_for_is_not_called_missing(database: Path) -> None:
    with shut_out(database.parent), pytest.raises(ExportError, match="unable to open") as caught:
        export.export(database, "-", "jsonl", Chosen())
    assert "the right to read it" in caught.value.cure


@pytest.mark.fault("a damaged database blamed on permissions")
def test_a_file_that_is_no_database_leaves_no_output(tmp_path: Path) -> None:
    path = tmp_path / "honed.db"
    path.write_bytes(b"x" * 4096)
    with pytest.raises(ExportError, match="can't be read") as caught:
        export.export(path, str(tmp_path / "out"), "jsonl", Chosen())
    assert "damaged" in caught.value.cure
    assert [p.name for p in tmp_path.iterdir()] == ["honed.db"]


@pytest.mark.fault("a damaged database blamed on permissions")
def test_a_damaged_database_is_not_called_unreadable_for_want_of_rights(database: Path, tmp_path: Path) -> None:
    with database.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (database.stat().st_size - 4096))
    with pytest.raises(ExportError, match="malformed") as caught:
        export.export(database, str(tmp_path / "out"), "jsonl", Chosen())
    assert "damaged" in caught.value.cure
    assert "right" not in caught.value.cure


def test_an_unwritable_target_is_one_clear_error(database: Path) -> None:
    with pytest.raises(ExportError, match="can't be written"):
        export.export(database, str(database.parent / "no" / "such" / "x"), "jsonl", Chosen())


@pytest.mark.fault("an export that replaces what isn't its file")
def test_a_pipe_is_written_to_and_stays(database: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        export.export(database, str(pipe), "jsonl", Chosen())
        assert len(os.read(reader, 1 << 16).splitlines()) == 6
    finally:
        os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.fault("an export that replaces what isn't its file")
def test_parquet_for_a_pipe_is_refused_with_a_cure(database: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RequestError, match="pipe isn't one") as caught:
        export.export(database, str(pipe), "parquet", Chosen())
    assert "--out" in caught.value.cure
    assert pipe.is_fifo()


@pytest.mark.fault("an export that replaces what isn't its file")
def test_a_folder_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="Is a directory"):
        export.export(tmp_path / "honed.db", str(tmp_path), "jsonl", Chosen())


@pytest.mark.fault("an export that replaces what isn't its file")
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed(database: Path, tmp_path: Path, exists: bool) -> None:
    link, file = tmp_path / "link", tmp_path / "elsewhere" / "rounds"
    file.parent.mkdir()
    if exists:
        file.write_text("old")
    link.symlink_to(file)
    export.export(database, str(link), "jsonl", Chosen())
    assert link.is_symlink()
    assert len(file.read_text().splitlines()) == 6
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.fault("an export that replaces what isn't its file")
def test_a_file_that_another_export_might_call_its_part_stays(database: Path, tmp_path: Path) -> None:
    other = tmp_path / "out.jsonl.part"
    other.write_text("mine")
    exported(database)
    assert other.read_text() == "mine"


@pytest.mark.parametrize(("out", "format"), [("-", "parquet"), ("x", "csv")])
def test_formats_that_do_not_exist(database: Path, out: str, format: str) -> None:
    with pytest.raises(RequestError) as caught:
        export.export(database, out, format, Chosen())
    assert exit_code_of(caught.value) == EXIT_USAGE


def test_the_database_is_opened_read_only(database: Path) -> None:
    before = database.read_bytes()
    exported(database)
    assert database.read_bytes() == before
