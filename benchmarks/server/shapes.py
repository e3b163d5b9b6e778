"""Models of real servers' sizes: a target's config.json without weights, and a drafter for it with random ones.

Nothing can be downloaded where benchmarks run, and a step's cost doesn't depend on the weights' values. The drafter's shape is
that of z-lab's for these targets: five layers like the target's own, blocks of 16.

Source: the config.json of Qwen3-8B and Qwen3-32B; `honed.recalib.drafter.new_drafter` for the drafter's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from honed.recalib.config.drafter import DrafterConfig
from honed.recalib.drafter.dflash import DFlashDrafter
from honed.recalib.drafter.drafter import Vocabulary
from honed.recalib.drafter.new_drafter import drafter_config

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "initializer_range": 0.02,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 36,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "use_cache": True,
}
_SIZES = {
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "small": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 1024,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
SHAPES = tuple(_SIZES)
"""Their names; "small" is for trying a benchmark on a CPU."""
STD = 0.02


def target_config(shape: str) -> dict[str, Any]:
    """Make the target's config.json."""
    return {**_QWEN3, **_SIZES[shape]}


def drafter_json(shape: str) -> dict[str, Any]:
    """Make the drafter's config.json."""
    target = target_config(shape)
    return drafter_config(target, unused_token_id=int(target["vocab_size"]) - 1)


def write_target(folder: Path, shape: str) -> Path:
    """Write a folder that vLLM loads with `load_format="dummy"` and `skip_tokenizer_init=True`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(target_config(shape), indent=2) + "\n")
    return folder


def write_drafter(folder: Path, shape: str, device: torch.device, seed: int = 0) -> Path:
    """Write a drafter's checkpoint in bfloat16."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(drafter_json(shape), indent=2) + "\n")
    with torch.device("meta"):
        names = {name: p.shape for name, p in DFlashDrafter(*_parts(shape, torch.device("meta"))).named_parameters()}
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {name: _random(size, generator, device).to(torch.bfloat16).cpu() for name, size in names.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_drafters(
    shape: str, device: torch.device, shared_dtype: torch.dtype, count: int = 1, seed: int = 0
) -> list[DFlashDrafter]:
    """Make the same as float32 modules on a device, with one embedding and one head of that type for all of them."""
    config, _ = _parts(shape, torch.device("meta"))
    generator = torch.Generator(device).manual_seed(seed)
    size = torch.Size((config.vocab_size, config.hidden_size))
    vocabulary = Vocabulary(*(_random(size, generator, device).to(shared_dtype) for _ in range(2)))
    made = []
    for _ in range(count):
        with device:
            made.append(DFlashDrafter(config, vocabulary))
        with torch.no_grad():
            for parameter in made[-1].parameters():
                parameter.copy_(_random(parameter.shape, generator, device))
    return made


def _parts(shape: str, device: torch.device) -> tuple[DrafterConfig, Vocabulary]:
    config = DrafterConfig.from_json(drafter_json(shape))
    size = (config.vocab_size, config.hidden_size)
    return config, Vocabulary(torch.empty(size, device=device), torch.empty(size, device=device))


def _random(size: torch.Size, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, device=device)
    return STD * torch.randn(size, generator=generator, device=device)
