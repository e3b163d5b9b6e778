"""Make a target with the same output and a higher cost, by stacking layers that change nothing.

A layer whose `o_proj` and `down_proj` are zero adds zero to the residual stream, yet takes its full time and its K/V cache.
With enough such layers, a tiny pair has a real server's ratio of draft to target cost, while every token stays the same. A
drafter's `target_layer_ids` still name the same layers, since the new ones come last.

Widening the MLPs by zeros makes it costly in another way. Their weights no longer fit into the caches, and are read from memory
in every step. So a row costs a smaller part of a step than with many small layers.

    python -m benchmarks.make_tiny.stacked_target benchmarks/tiny/target /tmp/stacked --extra-layers 24
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SILENT = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_WIDENED = {"mlp.gate_proj.weight": 0, "mlp.up_proj.weight": 0, "mlp.down_proj.weight": 1}
"""Dimension of each weight along which an MLP is wide."""


def make_stacked_target(source_dir: Path | str, out_dir: Path | str, extra_layers: int, mlp_width: int = 0) -> Path:
    """Copy a checkpoint and add `extra_layers` layers that add nothing to the residual stream.

    The new layers' other weights are copies of the last real layer's, so their matrix products are real work.

    Args:
        mlp_width: intermediate size of all layers' MLPs, filled up with zeros; 0: as it is.

    Raises:
        ValueError: there is nothing to copy, `extra_layers` is negative, or the MLPs are wider already.
    """
    source, out = Path(source_dir), Path(out_dir)
    if extra_layers < 0:
        raise ValueError(f"extra_layers is {extra_layers}; it must be 0 or more")
    tensors = read_all(source)
    config = json.loads((source / "config.json").read_text())
    first = int(config["num_hidden_layers"])
    prefix = f"model.layers.{first - 1}."
    last_layer = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if not set(SILENT) <= set(last_layer):
        raise ValueError(f"{source} has no {prefix}{SILENT[0]}; only Llama-like checkpoints can be stacked")
    for layer in range(first, first + extra_layers):
        for name, tensor in last_layer.items():
            tensors[f"model.layers.{layer}.{name}"] = torch.zeros_like(tensor) if name in SILENT else tensor.clone()
    config["num_hidden_layers"] = first + extra_layers
    if mlp_width:
        tensors = {name: _widened(name, tensor, mlp_width) for name, tensor in tensors.items()}
        config["intermediate_size"] = mlp_width
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"] + config["layer_types"][-1:] * extra_layers
    write(source, out, config, tensors)
    return out


def _widened(name: str, tensor: Tensor, width: int) -> Tensor:
    """Fill a weight of an MLP up with zeros; others stay."""
    dimension = _WIDENED.get(".".join(name.split(".")[-3:]))
    if dimension is None:
        return tensor
    missing = width - tensor.shape[dimension]
    if missing < 0:
        raise ValueError(f"{name} is {tensor.shape[dimension]} wide already, more than {width}")
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing) if dimension == 0 else (0, missing)).contiguous()


def read_all(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of a safetensors checkpoint."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} has no *.safetensors")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    return tensors


def write(source: Path, out: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    """Copy the other files, write the new config, and all tensors in one file."""
    out.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in (INDEX_NAME, "config.json"):
            shutil.copyfile(path, out / path.name)
    (out / INDEX_NAME).unlink(missing_ok=True)
    for old in out.glob("*.safetensors"):
        old.unlink()
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Stack layers that change nothing onto a target.")
    parser.add_argument("source_dir", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--extra-layers", type=int, default=24)
    parser.add_argument("--mlp-width", type=int, default=0)
    given = parser.parse_args()
    print(make_stacked_target(given.source_dir, given.out_dir, given.extra_layers, given.mlp_width))


if __name__ == "__main__":
    main()
