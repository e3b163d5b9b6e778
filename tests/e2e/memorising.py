"""Drafters that have learned given answers by heart, so that they draft well and trees have long paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from honed.recalib.drafter.checkpoint import load_drafter, save_drafter
from honed.recalib.samples.sample import TrainingSample
from honed.recalib.training.micro_step import MicroTrainer, TrainingSettings
from tests.e2e.engine import K

NUM_UPDATES = 200


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A target as Transformers computes it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    has_images = "vision_config" in json.loads((folder / "config.json").read_text())
    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=dtype).eval()


def memorised(drafter_dir: Path, target_dir: Path, texts: list[tuple[list[int], list[int]]], model: Any, folder: Path) -> Path:
    """Write a drafter that has learned answers to prompts."""
    drafter, samples = load_drafter(drafter_dir, target_dir, num_draft_tokens=K), []
    for number, (prompt, answer) in enumerate(texts):
        ids = torch.tensor(prompt + answer)
        with torch.inference_mode():
            hidden = model(ids[None], output_hidden_states=True).hidden_states
        features = torch.cat([hidden[layer + 1][0] for layer in drafter.config.target_layer_ids], -1).clone()
        at = torch.arange(len(ids))
        samples.append(TrainingSample(features, ids, at, str(number), "", num_prompt_tokens=len(prompt), is_fused=False))
    settings = TrainingSettings(learning_rate=2e-3, micro_steps_per_update=1, anchors_per_micro_step=48)
    trainer = MicroTrainer(drafter, settings)
    for step in range(NUM_UPDATES):
        trainer.step([samples[step % len(samples)]], remaining=1.0 - step / NUM_UPDATES)
    save_drafter(drafter, folder, drafter_dir, torch.float32)
    return folder
