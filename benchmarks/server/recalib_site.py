"""One engine with its registry and the trainer's view of its ring, for `benchmarks.recalib`."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.server import recalib_engine
from benchmarks.server.client_load import Prompt
from benchmarks.server.recalib_engine import Engine, Rounds
from honed.adapt.protocol import wire
from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.gate.gate import GateSettings
from honed.recalib.process.recalibration import Recalibration
from honed.recalib.registry.registry import Registry
from honed.recalib.samples.hold_out import HoldOut
from honed.recalib.samples.traffic import Traffic

Document = dict[str, Any]

BOOTSTRAPS = 4000


@dataclass(frozen=True)
class Plan:
    """Amount of measurement."""

    heldout: int = 160
    traffic_a: int = 192
    traffic_b: int = 320
    steps: int = 1600
    """Micro-steps of every recalibration."""
    fine_tune_steps: int = 48
    threads: int = max(1, (os.cpu_count() or 1) // 2)
    """Threads of the training, as in the trainer: the engine's threads spin beside it."""


SHORT = Plan(heldout=32, traffic_a=64, traffic_b=96, steps=200, fine_tune_steps=8)


class Site:
    """One engine with its registry and the trainer's view of its ring."""

    def __init__(self, folder: Path, engine: Engine, plan: Plan, drafter: Path) -> None:
        self.engine, self.plan = engine, plan
        self.settings = TrainerSettings(max_steps=plan.steps)
        self.gate = GateSettings()
        self.registry = Registry(folder / "registry")
        self.parent = self.registry.import_checkpoint(drafter, target_path=str(engine.target))
        self.traffic = Traffic(folder / "run", self.settings, HoldOut(b"recalib benchmark"[:16]))

    def play(self, workload: str, prompts: Sequence[Prompt], temperature: float = 0.0) -> None:
        """Play live traffic, which is captured."""
        self.engine.capture(True, self.parent.version)
        for i in range(0, len(prompts), recalib_engine.CONCURRENCY):
            self.engine.generate(prompts[i : i + recalib_engine.CONCURRENCY], temperature, workload, seed=i)
            self.traffic.discover()
            while self.traffic.poll():
                pass
        self.engine.capture(False, self.parent.version)

    def recalibrate(self, workload: str, scope: str) -> Document:
        """Run one operation as the trainer process does, from the request to a version in the registry, and into the engine."""
        (feed,) = self.traffic.feeds
        assert feed.reader.lost_records == 0, "the ring was too small: some traffic was lost"
        request = wire.TrainRequest(
            operation_id=scope,
            capture_paths=[str(self.engine.ring)],
            target_path=str(self.engine.target),
            parent_version=self.parent.version,
            scope=scope,
            workloads=[workload],
            max_seconds=1e6,
            num_draft_tokens=self.engine.num_draft_tokens,
        )
        torch.set_num_threads(self.plan.threads)
        began_s = time.monotonic()
        operation = Recalibration(request, self.settings, self.gate, self.registry, feed)
        while operation.result is None:
            operation.advance()
        result = operation.result
        if not result.ok:
            raise RuntimeError(f"{scope}: {result.error}")
        told: Document = {
            "seconds": round(time.monotonic() - began_s, 1),
            "train_seconds": round(result.train_seconds, 1),
            "tokens": result.tokens,
            "micro_steps": result.steps,
            "refused": result.error,
            "gate": {g.workload: round(g.candidate / g.parent, 4) for g in result.gate},
        }
        if result.version:
            told["version"] = result.version
            told["copy_ms"] = round(self.engine.swap(result.version, self.registry.path(result.version)), 2)
        return told

    def go_on_from(self, version: str) -> None:
        """Train from this version from now on."""
        self.parent = self.registry.get(version)

    def swap_back(self) -> None:
        """Swap back to the original drafter, for the next recalibration."""
        self.engine.swap(self.parent.version, self.registry.path(self.parent.version))


def compare(before: Rounds, after: Rounds) -> Document:
    """Compute after / before with its interval: the same parts are drawn on both sides."""
    rng = random.Random(0)
    pairs = list(zip(before.parts, after.parts, strict=True))
    ratios = []
    for _ in range(BOOTSTRAPS):
        drawn = rng.choices(pairs, k=len(pairs))
        old, new = (Rounds(tuple(pair[side] for pair in drawn)).acceptance_length for side in (0, 1))
        ratios.append(new / old)
    ratios.sort()
    return {
        "before": round(before.acceptance_length, 4),
        "after": round(after.acceptance_length, 4),
        "ratio": round(after.acceptance_length / before.acceptance_length, 4),
        "low": round(ratios[int(0.025 * BOOTSTRAPS)], 4),
        "high": round(ratios[int(0.975 * BOOTSTRAPS)], 4),
    }
