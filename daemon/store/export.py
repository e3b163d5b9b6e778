"""Export of the event log: one row for each stored verify round, as JSON lines or Parquet.

It reads the database itself, read-only, so it works with or without a running daemon. A read transaction lasts for one
page of batches at most, since a long one would keep SQLite from recycling its write-ahead log. Memory stays bounded: one
page of batches and one row group at a time.

A regular file appears under its name only when complete; a link to one is followed. A pipe or a device is written to directly.

A round's time is its step's end on the engine's monotonic clock, converted to wall time by the batch's pair of clock
readings: t = sent_unix − (sent_mono − end).
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import msgspec

from honed.adapt.protocol import wire
from honed.daemon.errors import HonedError, RequestError, UnknownError, there_are
from honed.daemon.store.batch_tables import read_frame
from honed.daemon.store.database import reader_cure
from honed.recalib.registry.durable import is_missing

if TYPE_CHECKING:
    import pyarrow

PAGE_BATCHES = 64
LATEST_S = 60.0
"""A batch sent so long after a round does not hold it."""
ROW_GROUP_ROWS = 65_536

COLUMNS = {
    "engine_id": "text",
    "boot_id": "text",
    "seq": "int64",
    "t_unix_ns": "int64",
    "step": "int64",
    "request": "uint64",
    "workload": "text",
    "drafter_version": "text",
    "position": "int32",
    "num_draft_tokens": "int32",
    "num_accepted_tokens": "int32",
    "num_invalid_tokens": "int32",
    "num_trimmed_tokens": "int32",
    "num_struck_tokens": "int32",
    "num_emitted": "int32",
    "num_delivered": "int32",
    "chain_tokens": "int32",
    "chain_accepted": "int32",
    "temperature": "float32",
    "step_duration_us": "int64",
    "step_requests": "int32",
    "step_tokens": "int32",
    "step_prefill_tokens": "int32",
    "step_context_tokens": "int64",
    "step_drafting": "int32",
    "decision": "text",
    "emitted": "ids",
    "draft": "ids",
    "nodes": "ids",
}
"""A row's columns, in order, and their types. `request` is a keyed hash: equal within a boot, meaningless outside."""

Row = dict[str, Any]


class ExportError(HonedError, RuntimeError):
    """The database can't be read, or the file can't be written."""


@dataclass(frozen=True)
class Chosen:
    """Selection of rounds; empty and None select all. `since_s` is included, `until_s` is not."""

    engine: str = ""
    workload: str = ""
    since_s: float | None = None
    until_s: float | None = None

    def holds(self, t_unix_ns: int) -> bool:
        """True if a moment is in the span."""
        return (self.since_s is None or t_unix_ns >= self.since_s * 1e9) and (
            self.until_s is None or t_unix_ns < self.until_s * 1e9
        )


@dataclass
class Tally:
    """Counts of an export."""

    rounds: int = 0
    batches: int = 0
    unreadable_batches: int = 0


class _Sink(Protocol):
    def write(self, rows: list[Row]) -> None: ...

    def close(self) -> None: ...


def export(database: Path, out: str, format: str, chosen: Chosen) -> dict[str, int]:
    """Write the chosen rounds to `out` ("-": stdout) and return their counts. Parquet needs a regular file.

    Raises:
        RequestError: an unknown format, Parquet for something else than a regular file, or a missing library.
        UnknownError: there is no database, or no such engine in it.
        ExportError: the database can't be read, or the file can't be written.
    """
    if format not in ("jsonl", "parquet"):
        raise RequestError(f"unknown format {format!r}", cure="Use jsonl or parquet.")
    is_file = out != "-" and (os.path.isfile(out) or not os.path.exists(out))
    if format == "parquet" and not is_file:
        raise RequestError(f"parquet needs a regular file, and {out} isn't one", cure="Give --out a file name, or use jsonl.")
    tally, path, part = Tally(), Path(os.path.realpath(out)), None
    try:
        if is_file:
            part = _new_part(path.parent)
        sink = _Parquet(part) if part and format == "parquet" else _JsonLines(_open_text(part or out))
        try:
            for batch in batches(database, chosen, tally):
                try:
                    rows = list(rounds(batch, chosen))
                except (IndexError, KeyError):  # columns of unequal length: all rows are unreliable
                    tally.unreadable_batches += 1
                    continue
                tally.batches += 1
                tally.rounds += len(rows)
                sink.write(rows)
        finally:
            sink.close()
        if part:
            os.replace(part, path)
    except BrokenPipeError:
        raise
    except OSError as error:
        cure = "Give --out a file name in a folder that you may write to and that has space."
        raise ExportError(f"{out} can't be written: {error.strerror or error}", cure=cure) from error
    finally:
        if part:
            part.unlink(missing_ok=True)
    return {"rounds": tally.rounds, "batches": tally.batches, "unreadable_batches": tally.unreadable_batches}


def batches(database: Path, chosen: Chosen, tally: Tally) -> Iterator[wire.EventBatch]:
    """Yield stored batches in order of arrival; count and skip unreadable ones.

    Raises:
        UnknownError: there is no database, or no such engine in it.
        ExportError: it can't be read.
    """
    import pysqlite3

    if is_missing(database):
        cure = "Name the daemon's state folder with --state-dir."
        raise UnknownError(f"there is no database at {database}", cure=cure)
    since_ns = _nanoseconds(chosen.since_s or 0.0)
    until_ns = _nanoseconds(math.inf if chosen.until_s is None else chosen.until_s + LATEST_S)
    after = 0
    try:
        connection = pysqlite3.connect(f"file:{_uri_path(database)}?mode=ro", uri=True, timeout=10.0)
        try:
            _check_engine(connection, chosen.engine)
            while page := connection.execute(
                "SELECT id, malformed, frame FROM batches"
                " WHERE id > ? AND sent_unix_ns BETWEEN ? AND ? AND (? = '' OR engine_id = ?) ORDER BY id LIMIT ?",
                (after, since_ns, until_ns, chosen.engine, chosen.engine, PAGE_BATCHES),
            ).fetchall():
                after = page[-1][0]
                for _, malformed, frame in page:
                    batch = None if malformed else read_frame(frame)
                    if batch is None:
                        tally.unreadable_batches += 1
                    else:
                        yield batch
        finally:
            connection.close()
    except pysqlite3.Error as error:
        raise ExportError(f"{database} can't be read: {error}", cure=reader_cure(error)) from error


def _nanoseconds(unix_s: float) -> int:
    """The moment as SQLite holds it; the first or last one that it can hold for those beyond."""
    most, found = (1 << 63) - 1, unix_s * 1e9
    return int(found) if abs(found) < most else most if found > 0 else -most


def _check_engine(connection: Any, engine_id: str) -> None:
    """Raise UnknownError for an engine that never attached; "" is all."""
    known = "SELECT EXISTS (SELECT 1 FROM boots WHERE engine_id = ?1) OR EXISTS (SELECT 1 FROM batches WHERE engine_id = ?1)"
    if engine_id and not connection.execute(known, (engine_id,)).fetchone()[0]:
        names = [row[0] for row in connection.execute("SELECT DISTINCT engine_id FROM boots ORDER BY last_seen_unix_ns")]
        raise UnknownError(f"no engine {engine_id!r} has ever attached; {there_are(names)}")


def rounds(batch: wire.EventBatch, chosen: Chosen) -> Iterator[Row]:
    """Yield the batch's verify rounds, each with its step's figures. Token ids are None if not logged."""
    s, r = batch.steps, batch.rounds
    place = {step: index for index, step in enumerate(s.step)}
    has_emitted, has_draft = bool(r.emitted), bool(r.draft)
    emitted_at = draft_at = node_at = 0
    for i, step in enumerate(r.step):
        is_tree = bool(r.chain_tokens and r.chain_tokens[i])
        nodes = r.nodes[node_at : node_at + r.num_accepted_tokens[i]] if is_tree else None
        node_at += len(nodes or ())
        emitted = r.emitted[emitted_at : emitted_at + r.num_emitted[i]] if has_emitted else None
        draft = r.draft[draft_at : draft_at + r.num_draft_tokens[i]] if has_draft else None
        emitted_at += r.num_emitted[i]
        draft_at += r.num_draft_tokens[i]
        at = place[step]
        t_unix_ns = batch.sent_unix_ns - (batch.sent_mono_ns - s.end_ns[at])
        workload = batch.workloads[r.workload[i]]
        if (chosen.workload and workload != chosen.workload) or not chosen.holds(t_unix_ns):
            continue
        yield {
            "engine_id": batch.engine_id,
            "boot_id": batch.boot_id,
            "seq": batch.seq,
            "t_unix_ns": t_unix_ns,
            "step": step,
            "request": r.request[i],
            "workload": workload,
            "drafter_version": batch.drafter_version,
            "position": r.position[i],
            "num_draft_tokens": r.num_draft_tokens[i],
            "num_accepted_tokens": r.num_accepted_tokens[i],
            "num_invalid_tokens": r.num_invalid_tokens[i],
            "num_trimmed_tokens": r.num_trimmed_tokens[i] if r.num_trimmed_tokens else 0,
            "num_struck_tokens": r.num_struck_tokens[i] if r.num_struck_tokens else 0,
            "num_emitted": r.num_emitted[i],
            "num_delivered": r.num_delivered[i] if r.num_delivered else r.num_emitted[i],
            "chain_tokens": r.chain_tokens[i] if r.chain_tokens else 0,
            "chain_accepted": r.chain_accepted[i] if r.chain_accepted else 0,
            "temperature": r.temperature[i],
            "step_duration_us": s.duration_us[at],
            "step_requests": s.num_requests[at],
            "step_tokens": s.num_tokens[at],
            "step_prefill_tokens": s.num_prefill_tokens[at],
            "step_context_tokens": s.context_tokens[at],
            "step_drafting": s.num_drafting[at],
            "decision": s.decision[at],
            "emitted": emitted,
            "draft": draft,
            "nodes": nodes,
        }


def parquet_schema() -> pyarrow.Schema:
    """Column types of the Parquet file; texts are dictionary-encoded, since few distinct ones occur."""
    import pyarrow as pa

    kinds = {"text": pa.dictionary(pa.int32(), pa.string()), "ids": pa.list_(pa.int32())}
    return pa.schema([(name, kinds.get(kind) or pa.type_for_alias(kind)) for name, kind in COLUMNS.items()])


def _new_part(folder: Path) -> Path:
    """A file of its own for rows that aren't complete yet; only its owner may read it, for it may have token ids."""
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".honed-export.")
    os.close(descriptor)
    return Path(name)


def _open_text(out: str | Path) -> TextIO:
    return sys.stdout if out == "-" else open(out, "w", encoding="utf-8")


def _uri_path(path: Path) -> str:
    return str(path.resolve()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


class _JsonLines:
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()

    def write(self, rows: list[Row]) -> None:
        self._file.write(self._encoder.encode_lines(rows).decode())

    def close(self) -> None:
        self._file.flush()
        if self._file is not sys.stdout:
            self._file.close()


class _Parquet:
    """Row groups of about ROW_GROUP_ROWS, the most rows held in memory."""

    def __init__(self, part: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            cure = "pip install '/path/to/honed[export]', or use --format jsonl."
            raise RequestError("parquet needs pyarrow", cure=cure) from error
        self._arrow = pyarrow
        self._schema = parquet_schema()
        self._writer = pyarrow.parquet.ParquetWriter(part, self._schema, compression="zstd")
        self._pending: list[Row] = []

    def write(self, rows: list[Row]) -> None:
        self._pending += rows
        if len(self._pending) >= ROW_GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._pending:
            self._writer.write_table(self._arrow.Table.from_pylist(self._pending, schema=self._schema))
            self._pending = []
