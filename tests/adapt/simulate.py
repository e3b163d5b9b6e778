"""Made-up verify rounds with known acceptance, for the tests of this folder; also runs the long simulations by hand.

`python tests/adapt/simulate.py --runs 10000` prints the drift monitor's error rates at any scale.
"""

from __future__ import annotations

import argparse

import numpy as np

from honed.adapt.monitor.drift import DriftMonitor, DriftSettings
from honed.adapt.protocol.wire import EventBatch, RoundColumns, StepColumns


def simulate_rounds(rng, acceptance, drafted):
    """Draw the accepted counts of rounds with `drafted` tokens each from per-position conditional acceptance."""
    drafted = np.asarray(drafted, dtype=np.int64)
    passed = rng.random((len(drafted), len(acceptance))) < np.asarray(acceptance)
    return np.minimum(np.cumprod(passed, axis=1).sum(axis=1), drafted)


def make_batch(drafted, accepted, workload="default", version="v1", requests=None, steps=None, seq=1, boot_id="boot"):
    """Wrap the rounds of one workload in the message that an engine would send."""
    count = len(drafted)
    rounds = RoundColumns(
        step=[1] * count,
        request=list(range(count)) if requests is None else [int(r) for r in requests],
        workload=[0] * count,
        position=[0] * count,
        num_draft_tokens=[int(k) for k in drafted],
        num_accepted_tokens=[int(n) for n in accepted],
        num_invalid_tokens=[0] * count,
        temperature=[0.0] * count,
        num_emitted=[int(n) + 1 for n in accepted],
    )
    return EventBatch(
        engine_id="engine-0",
        boot_id=boot_id,
        seq=seq,
        sent_unix_ns=0,
        sent_mono_ns=0,
        drafter_version=version,
        workloads=[workload],
        steps=steps or StepColumns(),
        rounds=rounds,
    )


def run_drift(rng, acceptance, batches, settings=None, batch_rounds=60, monitor=None):
    """Feed batches of one workload; return the batch number of the first alarm (−1: none) and the monitor."""
    monitor = monitor or DriftMonitor(len(acceptance), settings or DriftSettings())
    for number in range(batches):
        lengths = rng.integers(1, len(acceptance) + 1, size=batch_rounds)
        if monitor.observe("default", lengths, simulate_rounds(rng, acceptance, lengths)):
            return number, monitor
    return -1, monitor


def main():
    """Print error rates and detection times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    runs = parser.parse_args().runs
    curves = {"high": [0.85, 0.82, 0.8, 0.8, 0.78, 0.78, 0.77], "low": [0.55, 0.5, 0.5, 0.5, 0.45, 0.45, 0.45]}
    for name, before in curves.items():
        rng = np.random.default_rng(1)
        repeats = max(runs // 10, 1)
        false = sum(run_drift(rng, before, 400)[0] >= 0 for _ in range(repeats))
        delays = []
        for _ in range(repeats):
            _, monitor = run_drift(rng, before, 80)
            delays.append(run_drift(rng, np.array(before) * 0.85, 200, monitor=monitor)[0] * 60)
        print(f"drift, {name} acceptance: {false} false alarms in {repeats} runs of 24,000 rounds")
        print(f"drift, {name} acceptance: 15 % loss seen after q95 {np.quantile(delays, 0.95):.0f} rounds")


if __name__ == "__main__":
    main()
