"""The daemon's storage on disk: SQLite in WAL mode, one writer thread, batched commits.

Guarantees: a batch reported as committed survives a killed process and a power cut (synchronous=FULL: the log is synced
before COMMIT returns). One transaction stores a batch and counts it in the roll-ups. The same (engine, boot, seq) is
never stored twice. While the disk refuses, or a file of the database is gone, batches wait in memory up to `queue_bytes`
and are retried; without room `put` returns False and the engine keeps them. Engines take turns, so that one that floods the
daemon doesn't delay the others' acknowledgements. States (`keep`) wait and are retried, too: the latest of each is stored once
the disk takes it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pysqlite3 as sqlite3
import structlog
from sqlite_utils import Database

from honed.daemon.errors import StartError, StoreError
from honed.daemon.settings.sections import StoreSettings
from honed.daemon.store import batch_tables, pruning
from honed.daemon.store.age import AgeClock, uptime_s
from honed.daemon.store.batch_tables import StoredBatch
from honed.daemon.store.database import DatabaseFiles, Reader, check_sqlite_version, connect, why_not
from honed.daemon.store.fair_queue import FairQueue
from honed.daemon.store.histogram import Histogram
from honed.daemon.store.migrations import check_known, migrations
from honed.daemon.store.pruning import Pruning
from honed.daemon.store.rollups import BatchCounts

T = TypeVar("T")
log = structlog.get_logger("honed.store")

MAX_GROUP_BYTES = 16 << 20
"""A transaction ends with the batch that reaches it."""
LEAST_GROUP, MOST_GROUP, MOST_TRANSACTION_S = 8, 2000, 0.5
"""Bounds of a transaction's batches, and time above which the next one gets half as many. It stores as many as take as long as
the end of the transaction does, at most twice those of the last one: a slow sync is asked for seldom, others wait little."""
RETRY_S = 0.5
LOG_EVERY_S = 10.0
COMMIT_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class _Job(NamedTuple):
    run: Callable[[Database], Any]
    future: Future[Any]
    state: Hashable = None
    """What it stores the present state of; None: it isn't retried."""


class Store:
    """One database, its writer thread and its reading connections."""

    def __init__(
        self,
        path: Path,
        settings: StoreSettings,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        uptime: Callable[[], float] = uptime_s,
        on_commit: Callable[[list[StoredBatch]], None] = lambda batches: None,
    ) -> None:
        check_sqlite_version()
        self._path, self._settings, self._monotonic, self._on_commit = path, settings, monotonic, on_commit
        try:
            self._db = connect(path, settings.synchronous)
            check_known(self._db, path)
            migrations.apply(self._db)
            self._reader, self._finder = Reader(path), Reader(path)
            self._reader.rows("SELECT count(*) FROM meta")  # the log's files exist from now on
            self._files = DatabaseFiles(path)
            self._age = AgeClock(self._db, wall=clock, uptime=uptime)
        except sqlite3.Error as error:
            raise StartError(f"database {path}: {error}{why_not(error, path)}") from error
        self._changed = threading.Condition()
        self._batches: FairQueue[StoredBatch] = FairQueue()
        self._group: list[StoredBatch] = []
        """Batches of the present transaction, until it is committed."""
        self._most = LEAST_GROUP
        self._jobs: deque[_Job] = deque()
        self._is_closing = False
        self._is_busy = False
        self._pruning = Pruning(settings, self._age, monotonic)
        self.errors = 0
        self.last_error = ""
        self.failed_at_s = float("-inf")
        """Monotonic time of the database's last error."""
        self.is_failing = False
        """True if the disk refused the latest transaction, or batches wait for it."""
        self._logged_s: dict[str, float] = {}
        self.commit_times = Histogram(COMMIT_BOUNDS_S)
        self._thread = threading.Thread(target=self._run, name="honed-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 20.0) -> None:
        """Commit queued batches as far as the disk allows, stop the writer, close the file."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._reader.close()
            self._finder.close()
            self._db.close()

    def drain(self, timeout_s: float) -> bool:
        """Wait until queued batches are committed and `on_commit` was called; False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self.queued_batches or self._jobs or self._is_busy:
                left = deadline - time.monotonic()
                if left <= 0 or not self._thread.is_alive():
                    return False
                self._changed.wait(min(left, 0.1))
        return True

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def queued_batches(self) -> int:
        """Batches that aren't committed yet."""
        return len(self._batches) + len(self._group)

    @property
    def rollup_bytes(self) -> int:
        """Bytes that the sums take on disk, about. Raises StoreError."""
        return int(self.read(pruning.ROLLUP_BYTES)[0]["value"])

    @property
    def size_bytes(self) -> int:
        """Size of database and log on disk."""
        total = 0
        for suffix in ("", "-wal"):
            try:
                total += Path(f"{self._path}{suffix}").stat().st_size
            except OSError:
                continue
        return total

    def put(self, batch: StoredBatch) -> bool:
        """Queue a batch; False if the queue is full, or has less room left than its engine uses. Never blocks."""
        engine_id, size = batch.engine_id, batch.num_bytes
        with self._changed:
            free = self._settings.queue_bytes - self._batches.size - _bytes_of(self._group)
            if self._is_closing or self._batches.size_of(engine_id) + size > free:
                return False
            self._batches.put(engine_id, batch, size)
            if len(self._batches) in (1, self._most):  # what the writer waits for
                self._changed.notify_all()
            return True

    def submit(self, job: Callable[[Database], T]) -> Future[T]:
        """Run `job` in the writer's next transaction; the result is set after its commit."""
        return self._enqueue(job, None)

    def keep(self, state: Hashable, job: Callable[[Database], object]) -> Future[Any]:
        """`submit` what stores the present state of something. It is retried while the disk refuses, unless a newer one waits.

        Args:
            state: names what the state is of, e.g. an operation.
        """
        return self._enqueue(job, state)

    def _enqueue(self, job: Callable[[Database], T], state: Hashable) -> Future[T]:
        future: Future[T] = Future()
        with self._changed:
            if self._is_closing:
                future.set_exception(StoreError("the store is closed", cure="The daemon is stopping: try again in a moment."))
                return future
            self._jobs.append(_Job(job, future, state))
            self._changed.notify_all()
        return future

    def write(self, job: Callable[[Database], T], timeout_s: float = 10.0) -> T:
        """`submit` and wait. Raises StoreError if the database refuses."""
        try:
            return self.submit(job).result(timeout_s)
        except TimeoutError as error:
            raise StoreError(f"the database didn't answer within {timeout_s:g} s") from error

    def read(self, sql: str, parameters: Any = ()) -> list[dict[str, Any]]:
        """Rows of a short query, from the last committed state, also of a file that was deleted. Raises StoreError."""
        return self._rows(self._reader, sql, parameters)

    def find(self, sql: str, parameters: Any = ()) -> list[dict[str, Any]]:
        """Rows of a query by key. It waits for no other reader, so the service's lock may be held. Raises StoreError."""
        return self._rows(self._finder, sql, parameters)

    def _rows(self, reader: Reader, sql: str, parameters: Any) -> list[dict[str, Any]]:
        try:
            return reader.rows(sql, parameters)
        except sqlite3.Error as error:
            self.note_error(error)
            raise StoreError(f"database: {error}") from error

    def scan(self, sql: str, parameters: Any = ()) -> Iterator[dict[str, Any]]:
        """Rows of a query that may take long, one after the other, on a connection of its own. Raises StoreError."""
        try:
            database = connect(self._path, read_only=True)
            try:
                yield from (dict(row) for row in database.conn.execute(sql, parameters))
            finally:
                database.close()
        except sqlite3.Error as error:
            self.note_error(error)
            raise StoreError(f"database: {error}") from error

    def finest_kept(self, span_s: float, finest_s: int) -> int:
        """Resolution in seconds of the sums to read for a time that goes back `span_s`.

        It is the finest one from `finest_s` on that is kept for so long, else the one that is kept longest. Raises StoreError.
        """
        kept = self._settings.max_rollup_age_s
        kept |= {resolution: min(kept[resolution], cut_s) for resolution, cut_s in self.cuts_s().items()}
        long_enough = [resolution for resolution in kept if resolution >= finest_s and kept[resolution] >= span_s]
        return long_enough[0] if long_enough else max(kept, key=lambda resolution: (kept[resolution], resolution))

    def cuts_s(self) -> dict[int, float]:
        """Resolutions in seconds that `max_rollup_bytes` cut, and the seconds that their sums go back. Raises StoreError."""
        now_s, kept = self._age.now_s(), self._settings.max_rollup_age_s
        back = {resolution: now_s - cut_at_s for resolution, cut_at_s in pruning.cut_at_s(self.read(pruning.CUTS)).items()}
        return {resolution: max(back_s, 0.0) for resolution, back_s in back.items() if back_s < kept[resolution]}

    def note_error(self, error: BaseException) -> None:
        self.errors += 1
        self.last_error, self.failed_at_s = str(error), self._monotonic()

    # --- the writer thread ---

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self.queued_batches or self._jobs or self._is_closing):
                    if not self._changed.wait(self._pruning.due_in_s()):
                        break
                if self._is_closing and not self.queued_batches and not self._jobs:
                    return
                self._is_busy = True
            self._run_jobs()
            self._commit_batches()
            self._retain()
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _run_jobs(self) -> None:
        """Run the queued jobs in one transaction, which costs one sync of the disk, each in a savepoint of its own.

        States that the disk refuses wait for the next turn.
        """
        jobs = [self._jobs.popleft() for _ in range(len(self._jobs))]
        if not jobs:
            return
        done: list[tuple[Future[Any], Any]] = []
        refused: dict[Hashable, _Job] = {}
        try:
            with self._transaction():
                for job in jobs:
                    try:
                        with self._db.atomic():
                            done.append((job.future, job.run(self._db)))
                    except Exception as error:
                        if not self._db.conn.in_transaction:  # the error has ended the others' transaction too
                            raise
                        self._refuse(job, error, refused)
        except Exception as error:
            refused = {}
            for job in jobs:
                if not job.future.done():
                    self._refuse(job, error, refused)
        else:
            if not refused:
                self._note_success()
            for future, result in done:
                future.set_result(result)
        if refused:
            self._try_again(refused)

    def _refuse(self, job: _Job, error: Exception, refused: dict[Hashable, _Job]) -> None:
        """Fail a job, or note in `refused` that it has to be tried again."""
        self.is_failing = self.is_failing or _is_of_the_disk(error)
        if job.state is None or not _is_of_the_disk(error) or self._is_closing:
            self._fail(job.future, error)
            return
        self.note_error(error)
        if (older := refused.pop(job.state, None)) is not None:
            older.future.set_result(None)
        refused[job.state] = job

    def _try_again(self, refused: dict[Hashable, _Job]) -> None:
        """Queue states before all else that came since, and give the disk some time."""
        self._log_rarely("states wait in memory until the disk takes them", error=self.last_error, states=len(refused))
        with self._changed:
            newer = {job.state for job in self._jobs}
            for state, job in reversed(refused.items()):
                if state in newer:
                    job.future.set_result(None)
                else:
                    self._jobs.appendleft(job)
            self._rest()

    def _rest(self) -> None:
        """Give the disk some time, whatever is queued meanwhile. Call it with `_changed`."""
        self._changed.wait_for(lambda: self._is_closing, RETRY_S)

    def _note_success(self) -> None:
        self.is_failing = self.is_failing and self.queued_batches > 0

    def _log_rarely(self, event: str, **about: Any) -> None:
        """Log an error once in `LOG_EVERY_S`: it lasts, and is tried again often. All are counted."""
        now_s = self._monotonic()
        if now_s - self._logged_s.get(event, float("-inf")) >= LOG_EVERY_S:
            self._logged_s[event] = now_s
            log.error(event, **about)

    def _fail(self, future: Future[Any], error: Exception) -> None:
        if isinstance(error, sqlite3.Error):
            self.note_error(error)
            failure = StoreError(f"database: {error}")
            failure.__cause__ = error
            error = failure
        future.set_exception(error)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit at the end. What is in a file that is gone doesn't count as committed."""
        self._files.check()
        with self._db.atomic():
            yield
        self._files.check()

    def _commit_batches(self) -> None:
        """Store a group of batches in one transaction; keep them for later if the disk refuses."""
        if not self.queued_batches:
            return
        with self._changed:
            if self._settings.commit_interval_s and not self._group:
                self._changed.wait_for(self._is_in_a_hurry, self._settings.commit_interval_s)
            self._fill_group()
            group = self._group
        try:
            self._store(group)
        except Exception as error:
            self.note_error(error)
            if _is_of_the_disk(error):
                self._wait(error)
                return
            group = self._store_one_by_one(group)
        else:
            self._forget(len(group))
        self._on_commit(group)

    def _is_in_a_hurry(self) -> bool:
        return self._is_closing or bool(self._jobs) or len(self._batches) >= self._most

    def _fill_group(self) -> None:
        num_bytes = _bytes_of(self._group)
        while self._batches and len(self._group) < self._most and num_bytes < MAX_GROUP_BYTES:
            self._group.append(self._batches.take())
            num_bytes += self._group[-1].num_bytes

    def _store(self, group: list[StoredBatch]) -> None:
        started_s = time.perf_counter()
        with self._transaction():
            batch_tables.insert(self._db, group, self._age.now_s())
            inserted_s = time.perf_counter()
        committed_s = time.perf_counter()
        self.commit_times.observe(committed_s - started_s)
        per_batch_s = (inserted_s - started_s) / len(group)
        is_long = committed_s - started_s > MOST_TRANSACTION_S
        most = len(group) // 2 if is_long else min(int((committed_s - inserted_s) / per_batch_s), 2 * self._most, MOST_GROUP)
        self._most = max(most, LEAST_GROUP)
        self.is_failing = False

    def _wait(self, error: Exception) -> None:
        """Keep the batches for later after a disk error, unless the store is closing."""
        self.is_failing = True
        self._log_rarely("commit failed; the batches wait in memory", error=str(error), batches=self.queued_batches)
        with self._changed:
            if self._is_closing:
                self._group, self._batches = [], FairQueue()
            self._rest()

    def _store_one_by_one(self, group: list[StoredBatch]) -> list[StoredBatch]:
        """Find the batch that breaks a transaction, and count it as malformed. Returns the finished ones."""
        settled: list[StoredBatch] = []
        for item in group:
            try:
                self._store([item])
            except Exception as error:
                self.note_error(error)
                if _is_of_the_disk(error):
                    return settled
                log.exception("a batch can't be stored; it is dropped, and counted as malformed", error=str(error))
                item.counts = BatchCounts(malformed=str(error))
                try:
                    with self._transaction():
                        batch_tables.refuse(self._db, item)
                except Exception as refusal:
                    self.note_error(refusal)
                    if _is_of_the_disk(refusal):
                        return settled
            settled.append(item)
            self._forget(1)
        return settled

    def _forget(self, count: int) -> None:
        with self._changed:
            self._group = self._group[count:]

    def _retain(self) -> None:
        """Delete what is too old, if it is time: also a sign of life of the disk while nothing else is stored."""
        if self._pruning.due_in_s():
            return
        try:
            self._pruning.run(self._db)
            self._files.check()
        except sqlite3.Error as error:
            self.note_error(error)
            self.is_failing = True
            self._log_rarely("pruning failed", error=str(error))
        else:
            self._note_success()


def _bytes_of(group: list[StoredBatch]) -> int:
    return sum(one.num_bytes for one in group)


def _is_of_the_disk(error: Exception) -> bool:
    """True if no batch is at fault: the disk is full, fails or is locked, or the database is damaged."""
    of_the_batch = sqlite3.IntegrityError, sqlite3.DataError, sqlite3.ProgrammingError, sqlite3.NotSupportedError
    return isinstance(error, sqlite3.DatabaseError) and not isinstance(error, of_the_batch)
