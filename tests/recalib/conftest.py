"""A drafter of a few thousand parameters, samples for it, and checkpoints of it and of its target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from honed.recalib.drafter.checkpoint import save_drafter
from honed.recalib.drafter.dflash import DFlashDrafter, DrafterConfig
from honed.recalib.drafter.drafter import Vocabulary
from honed.recalib.samples.sample import TrainingSample

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "block_size": 4,
    "num_target_layers": 3,
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2]},
}

MakeDrafter = Callable[..., DFlashDrafter]
MakeSample = Callable[..., TrainingSample]


@pytest.fixture
def make_drafter() -> MakeDrafter:
    """A drafter with random weights, the same for the same seed; changes are of its config.json."""

    def make(seed: int = 0, **changes: object) -> DFlashDrafter:
        torch.manual_seed(seed)
        config = DrafterConfig.from_json(SMALL | changes)
        embed_tokens, lm_head = torch.randn(50, 16), torch.randn(50, 16)
        words = None
        if config.draft_vocab_size:
            words = torch.randperm(50, generator=torch.Generator().manual_seed(seed))[: config.draft_vocab_size].sort().values
            lm_head = lm_head[words]
        drafter = DFlashDrafter(config, Vocabulary(embed_tokens, lm_head, words))
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return drafter

    return make


@pytest.fixture
def make_sample() -> MakeSample:
    """A sample of random tokens and features, the same for the same seed."""

    def make(
        num_tokens: int = 30,
        seed: int = 0,
        session: str = "s",
        workload: str = "w",
        is_fused: bool = True,
        first_position: int = 0,
        break_positions: tuple[int, ...] = (),
        num_prompt_tokens: int = 0,
    ) -> TrainingSample:
        generator = torch.Generator().manual_seed(seed)
        return TrainingSample(
            features=torch.randn(num_tokens, 16 if is_fused else 32, generator=generator),
            token_ids=torch.randint(2, 50, (num_tokens,), generator=generator),
            positions=first_position + torch.arange(num_tokens),
            session=session,
            workload=workload,
            break_positions=break_positions,
            num_prompt_tokens=num_prompt_tokens,
            is_fused=is_fused,
        )

    return make


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    """A target's checkpoint: only the tensors a drafter shares, in two files with an index."""
    folder = tmp_path / "target"
    folder.mkdir()
    config = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(5)
    save_file({"model.embed_tokens.weight": torch.randn(50, 16)}, folder / "one.safetensors")
    save_file({"model.norm.weight": torch.ones(16)}, folder / "two.safetensors")
    weight_map = {"model.embed_tokens.weight": "one.safetensors", "model.norm.weight": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def drafter_dir(tmp_path: Path, make_drafter: MakeDrafter) -> Path:
    """A drafter's checkpoint."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    save_drafter(make_drafter(), folder, folder, dtype=torch.float32)
    return folder
