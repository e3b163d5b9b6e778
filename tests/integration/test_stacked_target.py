"""Stacked layers change the cost of a target and nothing it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.make_tiny.stacked_target import make_stacked_target, read_all
from tests.tools import ROOT

TARGET = ROOT / "benchmarks" / "tiny" / "target"


def logits_of(folder: Path, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """A checkpoint's logits of 40 tokens, and its configuration."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokens = torch.randint(2, 4000, (1, 40), generator=torch.Generator().manual_seed(0))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return model(tokens).logits, model.config


def test_a_stacked_target_gives_the_same_logits(tmp_path: Path) -> None:
    stacked = make_stacked_target(TARGET, tmp_path / "stacked", extra_layers=3)
    logits, config = logits_of(stacked, torch.float32)
    assert config.num_hidden_layers == 9
    assert torch.equal(logits, logits_of(TARGET, torch.float32)[0])


def test_a_widened_target_gives_the_same_logits(tmp_path: Path) -> None:
    wide = make_stacked_target(TARGET, tmp_path / "wide", extra_layers=1, mlp_width=4096)
    logits, config = logits_of(wide, torch.float64)
    assert config.intermediate_size == 4096
    torch.testing.assert_close(logits, logits_of(TARGET, torch.float64)[0], rtol=0, atol=1e-12)


def test_the_tokenizer_comes_along_and_no_old_index(tmp_path: Path) -> None:
    stacked = make_stacked_target(TARGET, tmp_path / "stacked", extra_layers=1)
    names = {path.name for path in stacked.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"} <= names
    assert "model.safetensors.index.json" not in names
    assert len(read_all(stacked)) == len(read_all(TARGET)) + 11


def test_a_checkpoint_without_layers_to_copy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="extra_layers is -1"):
        make_stacked_target(TARGET, tmp_path / "out", extra_layers=-1)
    with pytest.raises(ValueError, match="768 wide already, more than 512"):
        make_stacked_target(TARGET, tmp_path / "out", extra_layers=0, mlp_width=512)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        make_stacked_target(tmp_path / "empty", tmp_path / "out", extra_layers=1)
