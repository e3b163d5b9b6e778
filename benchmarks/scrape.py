"""Cost of observing the daemon: a scrape of /metrics, and the status page's document, small, large and at their bounds.

A real service has received five minutes of verify rounds from its engines, so it has all estimates that it reports. Three
sizes: one engine with four workloads; eight engines; and as many engines and combinations of labels as a scrape shows at most.
For each: milliseconds of a scrape, and of its part with the lock that engines' events need; samples and bytes; milliseconds to
make the page's document (it is made at most every two seconds). Median and quartiles. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.server.measured import commit, hardware
from honed.adapt.protocol import wire
from honed.daemon.control.live_rounds import MOST_CELLS
from honed.daemon.metrics import acceptance
from honed.daemon.metrics.labels import MOST_ENGINES
from honed.daemon.metrics.render import GROUPS, render
from honed.daemon.page import document
from honed.daemon.page.document import WINDOWS
from honed.daemon.service import Service
from honed.daemon.settings.settings import load

K = 15
SECONDS = 300
MOST_BATCHES = 10_000
"""Limit for all engines together: with many of them each sends less often."""
SIZES = {"small": (1, 4), "large": (8, 4), "bound": (MOST_ENGINES, MOST_CELLS // MOST_ENGINES)}
"""Engines, and workloads of each."""


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None, help="also write the result to this file")
    arguments = parser.parse_args()
    rows = {name: measure(engines, workloads, arguments.repeats) for name, (engines, workloads) in SIZES.items()}
    for name, row in rows.items():
        pages = ", ".join(f"{window} {row['page_ms'][window][1]:.0f} ms" for window in WINDOWS)
        print(
            f"{name}: scrape {row['scrape_ms'][1]:.1f} ms, {row['locked_ms'][1]:.1f} ms locked, {row['samples']} samples, "
            f"{row['bytes'] / 1024:.0f} KiB; page {pages}",
            flush=True,
        )
    result = {"sizes": rows, "num_spec_tokens": K, "hardware": hardware(), "commit": commit()}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def measure(engines: int, workloads: int, repeats: int) -> dict[str, Any]:
    """Measure one size; times are (lower quartile, median, upper quartile) in milliseconds."""
    with filled(engines, workloads) as service:
        text = render(service)
        return {
            "engines": engines,
            "workloads": workloads,
            "samples": sum(not line.startswith(b"#") for line in text.splitlines()),
            "bytes": len(text),
            "scrape_ms": timed(lambda: render(service), repeats),
            "locked_ms": timed(lambda: read_locked(service), repeats),
            "page_ms": {name: timed(lambda name=name: document.document(service, name), repeats) for name in WINDOWS},  # type: ignore[misc]
        }


def read_locked(service: Service) -> None:
    """Do the part of a scrape that holds the service's lock."""
    with service.lock:
        for group in GROUPS:
            list(group.families(service))
        acceptance.read(service.engines, service.live)


def timed(work: Callable[[], object], repeats: int) -> list[float]:
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        taken.append((time.perf_counter() - began) * 1e3)
    return [round(float(value), 3) for value in np.quantile(taken, (0.25, 0.5, 0.75))]


@contextmanager
def filled(engines: int, workloads: int) -> Iterator[Service]:
    """Make a service that has received five minutes of every engine's rounds, a batch a second."""
    with tempfile.TemporaryDirectory(prefix="honed-scrape-") as name:
        folder = Path(name)
        paths = {"state_dir": folder / "state", "runtime_dir": folder / "run"}
        for path in paths.values():
            path.mkdir()
        service = Service(load(None, {"paths": paths, "http": {"metrics_listen": ""}}, env={}), daemon_id="benchmark")
        service.store.start()
        rng = np.random.default_rng(0)
        step = max(1, engines * SECONDS // MOST_BATCHES)
        for engine in range(engines):
            hello = hello_of(engine)
            service.on_frame(b"%d" % engine, wire.encode(hello))
            for seq in range(1, SECONDS // step + 1):
                service.on_frame(b"%d" % engine, wire.encode(batch(hello, seq, SECONDS - seq * step, workloads, rng)))
                service.steering.observe()
            service.on_frame(b"%d" % engine, wire.encode(status_of(hello)))
        assert service.store.drain(60.0)
        try:
            yield service
        finally:
            service.stop()


def hello_of(engine: int) -> wire.EngineHello:
    return wire.EngineHello(
        wire_version=wire.WIRE_VERSION,
        engine_id=f"engine-{engine}",
        boot_id="boot",
        model_name="model",
        target_path="/model",
        drafter_path="",
        drafter_version="v0001-00000000",
        vllm_version="0.32.0",
        honed_version="0.1.0",
        runner="v2",
        method="dflash",
        num_spec_tokens=K,
        max_num_seqs=256,
        capabilities=["events", "draft_length"],
    )


def status_of(hello: wire.EngineHello) -> wire.EngineStatus:
    return wire.EngineStatus(
        engine_id=hello.engine_id,
        boot_id=hello.boot_id,
        num_running=8,
        num_waiting=0,
        policy_generation=1,
        policy_age_s=0.1,
        fallback="",
        drafter_version=hello.drafter_version,
        drafter_generation=0,
        queue_bytes=0,
        errors=0,
    )


def batch(
    hello: wire.EngineHello, seq: int, ago_s: int, workloads: int, rng: np.random.Generator, steps: int = 1, requests: int = 8
) -> wire.EventBatch:
    """Make a batch of steps, each of so many requests, `ago_s` seconds ago."""
    rounds = steps * requests
    numbers = range((seq - 1) * steps + 1, seq * steps + 1)
    drafted = rng.integers(1, K + 1, rounds)
    accepted = np.minimum(rng.geometric(0.35, rounds) - 1, drafted)
    drafts = drafted.reshape(steps, requests).sum(1)
    mono, ago_ns = time.monotonic_ns(), ago_s * 10**9
    return wire.EventBatch(
        engine_id=hello.engine_id,
        boot_id=hello.boot_id,
        seq=seq,
        sent_unix_ns=time.time_ns() - ago_ns,
        sent_mono_ns=mono,
        drafter_version=hello.drafter_version,
        workloads=[f"workload-{i}" for i in range(workloads)],
        steps=wire.StepColumns(
            step=list(numbers),
            end_ns=[mono - ago_ns] * steps,
            duration_us=(5000 + 20 * drafts).tolist(),
            num_requests=[requests] * steps,
            num_tokens=(drafts + requests).tolist(),
            num_prefill_tokens=[0] * steps,
            num_draft_tokens=drafts.tolist(),
            context_tokens=[500 * requests] * steps,
            num_drafting=[K] * steps,
            decision=["policy"] * steps,
        ),
        rounds=wire.RoundColumns(
            step=np.repeat(numbers, requests).tolist(),
            request=list(range(requests)) * steps,
            workload=[i % workloads for i in range(requests)] * steps,
            position=[500] * rounds,
            num_draft_tokens=drafted.tolist(),
            num_accepted_tokens=accepted.tolist(),
            num_invalid_tokens=[0] * rounds,
            temperature=[0.0] * rounds,
            num_emitted=(accepted + 1).tolist(),
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
