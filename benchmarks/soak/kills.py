"""Part "kills": the daemon is killed with SIGKILL again and again, at random moments of its start and its work."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.server.measured import percentile
from benchmarks.server.processes import ProcessError, Processes
from benchmarks.soak.daemon import START_S, Daemon
from benchmarks.soak.fleet import Fleet
from honed.daemon.store.database import connect

NUM_ENGINES = 4
EVERY_S = 0.05
STEPS, REQUESTS = 1, 16
MOST_WORK_S = 0.5
"""A working daemon is killed within this time of its first acknowledgements."""
AT_START_SHARE = 0.1
"""Share of kills during the start."""
DRAIN_S = 120.0


class Rows:
    """The raw batches in the database so far: engine -> numbers."""

    def __init__(self) -> None:
        self.numbers: dict[str, set[int]] = defaultdict(set)
        self.duplicates = self.rounds = 0
        self._last_id = 0
        self._checked: dict[str, int] = defaultdict(int)

    def read(self, path: Path) -> None:
        """Add the rows behind the last one."""
        database = connect(path, read_only=True)
        try:
            found = database.conn.execute(
                "SELECT id, engine_id, seq, rounds FROM batches WHERE id > ? ORDER BY id", (self._last_id,)
            ).fetchall()
        finally:
            database.close()
        for self._last_id, engine_id, seq, rounds in found:
            if seq in self.numbers[engine_id]:
                self.duplicates += 1
            else:
                self.numbers[engine_id].add(seq)
                self.rounds += rounds

    def count_lost(self, fleet: Fleet) -> int:
        """Count the numbers acknowledged since the last call that aren't in the database."""
        lost = 0
        for engine in fleet.engines:
            name, acked = engine.hello.engine_id, engine.acked
            lost += sum(number not in self.numbers[name] for number in range(self._checked[name] + 1, acked + 1))
            self._checked[name] = acked
        return lost


def run(processes: Processes, folder: Path, cycles: int) -> dict[str, Any]:
    """Return the part's figures."""
    daemon, chance, rows = Daemon(processes, folder), random.Random(0), Rows()
    lost = 0
    starts_s: list[float] = []
    began_s = time.monotonic()
    with Fleet(daemon.engine_socket, NUM_ENGINES, EVERY_S) as fleet:
        for cycle in range(cycles):
            daemon.start()
            if starts_s and chance.random() < AT_START_SHARE:
                fleet.pump(chance.random() * percentile(starts_s, 0.5), STEPS, REQUESTS)
            else:
                starts_s.append(wait_acknowledged(daemon, fleet))
                fleet.pump(chance.random() * MOST_WORK_S, STEPS, REQUESTS)
            daemon.child.check()
            daemon.kill()
            rows.read(daemon.database)
            lost += rows.count_lost(fleet)
            if cycle % 100 == 99:
                print(f"kills: {cycle + 1}, {lost} acknowledged rows lost, {rows.duplicates} duplicates", flush=True)
        seconds = time.monotonic() - began_s
        daemon.start()
        is_drained = fleet.drain(DRAIN_S)
        daemon.stop()
        rows.read(daemon.database)
        lost += rows.count_lost(fleet)
        made, declared = fleet.rounds, sum(engine.lost.rounds for engine in fleet.engines)
    stored, unhandled = daemon.stored(), daemon.unhandled()
    twice = rows.duplicates + abs(stored["rounds"] - rows.rounds) + abs(stored["rollup_rounds"] - rows.rounds)
    return {
        "passed": not (lost or twice or declared or unhandled) and is_drained and rows.rounds == made and cycles > 0,
        "cycles": cycles,
        "acked_rows_lost": lost,
        "duplicates": twice,
        "rounds": made,
        "rounds_stored": rows.rounds,
        "seconds_per_cycle": round(seconds / cycles, 2),
        "start_s_p50": round(percentile(starts_s, 0.5), 2),
        "unhandled": len(unhandled),
        "first_unhandled": unhandled[:3],
    }


def wait_acknowledged(daemon: Daemon, fleet: Fleet) -> float:
    """Wait until each engine has got an acknowledgement from this process; return the seconds. Raises ProcessError."""
    began_s, before = time.monotonic(), [engine.acked for engine in fleet.engines]
    while any(engine.acked <= acked for engine, acked in zip(fleet.engines, before, strict=True)):
        fleet.pump(0.01, STEPS, REQUESTS)
        daemon.child.check()
        if time.monotonic() - began_s > START_S:
            raise ProcessError(f"no acknowledgement {START_S:g} s after the daemon's start; see {daemon.child.log}")
    return time.monotonic() - began_s
