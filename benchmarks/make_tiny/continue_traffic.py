"""Continue the tiny drafter's training with domain B's live traffic, as the trainer process would, and measure gain and loss.

python -m benchmarks.make_tiny.continue_traffic benchmarks/tiny --seconds 180 --learning-rate 5e-4
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from benchmarks.make_tiny.prompts import read_prompts, samples_of
from honed.recalib.drafter.checkpoint import load_drafter, save_drafter
from honed.recalib.drafter.dflash import DFlashDrafter
from honed.recalib.gate.evaluate import expected_acceptance_length
from honed.recalib.samples.sample import TrainingSample
from honed.recalib.training.micro_step import MicroTrainer, TrainingSettings


@dataclass(frozen=True)
class Material:
    """Samples for training and for judging, of both domains."""

    traffic: dict[str, list[TrainingSample]]
    heldout: list[TrainingSample]


def gather(folder: Path, drafter: DFlashDrafter) -> Material:
    """Collect the target's answers to the prompts in `folder`."""
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    model = Qwen3ForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    traffic, heldout = {}, []
    for domain in "ab":
        traffic[domain] = samples_of(model, drafter, read_prompts(folder / f"traffic_{domain}.jsonl", tokenizer), domain)
        heldout += samples_of(model, drafter, read_prompts(folder / f"prompts_{domain}.jsonl", tokenizer), domain)
    return Material(traffic, heldout)


def train_on(
    drafter: DFlashDrafter, material: Material, settings: TrainingSettings, seconds: float, replay_share: float
) -> dict[str, float]:
    """Do micro-steps on single samples until time is over; `replay_share` of them, of the old domain, hold to the parent."""
    rng = random.Random(settings.seed)
    trainer = MicroTrainer(drafter, settings, parent=copy.deepcopy(drafter))
    began_s = time.monotonic()
    num_steps = num_tokens = 0
    slowest_s = 0.0
    while (remaining := 1.0 - (time.monotonic() - began_s) / seconds) > 0:
        domain = "a" if rng.random() < replay_share else "b"
        sample = rng.choice(material.traffic[domain])
        step_began_s = time.monotonic()
        figures = trainer.step([sample], kept=[domain == "a"], remaining=remaining)
        num_steps, num_tokens = num_steps + 1, num_tokens + figures.num_tokens
        slowest_s = max(slowest_s, time.monotonic() - step_began_s) if num_steps > 1 else 0.0
    mean_ms = 1000 * (time.monotonic() - began_s) / num_steps
    return {
        "updates": trainer.num_updates,
        "micro_steps": num_steps,
        "label_tokens": num_tokens,
        "mean_step_ms": round(mean_ms, 1),
        "slowest_step_ms": round(1000 * slowest_s, 1),
    }


def judge(drafter: DFlashDrafter, material: Material) -> dict[str, float]:
    """Measure the acceptance length on the held-out prompts of each domain."""
    result = expected_acceptance_length(drafter, material.heldout)
    return {domain: round(result.acceptance_length(domain), 4) for domain in "ab"}


def main() -> None:
    """Command line: one line of JSON before, one after."""
    parser = argparse.ArgumentParser(description="Continue the tiny drafter's training on domain B.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--learning-rate", type=float, default=TrainingSettings.learning_rate)
    parser.add_argument("--anchors", type=int, default=TrainingSettings.anchors_per_micro_step)
    parser.add_argument("--micro-steps-per-update", type=int, default=TrainingSettings.micro_steps_per_update)
    parser.add_argument("--replay-share", type=float, default=0.5)
    parser.add_argument("--out", type=Path, help="write the trained drafter here")
    given = parser.parse_args()
    drafter = load_drafter(given.folder / "drafter", given.folder / "target")
    material = gather(given.folder, drafter)
    before = judge(drafter, material)
    settings = replace(
        TrainingSettings(),
        learning_rate=given.learning_rate,
        anchors_per_micro_step=given.anchors,
        micro_steps_per_update=given.micro_steps_per_update,
    )
    print(json.dumps({"before": before, "traffic": {d: len(s) for d, s in material.traffic.items()}}), flush=True)
    figures = train_on(drafter, material, settings, given.seconds, given.replay_share)
    print(json.dumps({"after": judge(drafter, material)} | figures), flush=True)
    if given.out is not None:
        save_drafter(drafter, given.out, given.folder / "drafter")


if __name__ == "__main__":
    main()
