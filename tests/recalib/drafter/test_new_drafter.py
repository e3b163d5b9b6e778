"""An untrained drafter: of the target's shape, with the family's figures, loadable, and refused where it can't be made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from honed.adapt.models.trainable import drafter_reasons
from honed.recalib.drafter.checkpoint import CheckpointError, load_drafter, read_tensors, stored_names
from honed.recalib.drafter.new_drafter import drafter_config, is_alike, unused_token_id, write
from tests.tools import ROOT

TINY = ROOT / "benchmarks" / "tiny" / "target"
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def test_a_known_family_s_drafter_has_the_published_figures() -> None:
    raw = drafter_config(QWEN3_8B, None)
    assert (raw["block_size"], raw["dflash_config"]) == (
        16,
        {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    )
    assert (raw["num_hidden_layers"], raw["num_target_layers"], raw["rope_parameters"]["rope_theta"]) == (5, 36, 1e6)
    assert drafter_reasons(raw) == []


def test_another_target_gets_the_rule_of_the_paper_and_an_unused_token() -> None:
    raw = drafter_config(QWEN3_8B | {"num_hidden_layers": 30}, 151700, num_layers=3)
    assert raw["dflash_config"] == {"mask_token_id": 151700, "target_layer_ids": [1, 14, 27]}
    assert raw["block_size"] == 16


def test_a_multimodal_target_is_read_by_its_text_config() -> None:
    nested = {"architectures": ["X"], "text_config": QWEN3_8B, "tie_word_embeddings": False}
    assert drafter_config(nested, None) == drafter_config(QWEN3_8B, None)


def test_without_an_unused_token_one_must_be_named() -> None:
    other = QWEN3_8B | {"num_hidden_layers": 30}
    with pytest.raises(ValueError, match="--mask-token-id"):
        drafter_config(other, None)
    assert drafter_config(other, None, mask_token_id=7)["dflash_config"]["mask_token_id"] == 7


def test_more_layers_than_the_target_has_to_read_are_refused_with_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^5 of 6 target layers can't be read .*: use --layers 3$"):
        write(tmp_path / "new", TINY)
    shallow = QWEN3_8B | {"num_hidden_layers": 6}
    assert drafter_config(shallow, 151700, num_layers=3)["dflash_config"]["target_layer_ids"] == [1, 2, 3]
    with pytest.raises(ValueError, match=r"1 of 3 target layers .*: the target has too few"):
        drafter_config(QWEN3_8B | {"num_hidden_layers": 3}, 151700, num_layers=1)


def test_a_target_of_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="'intermediate_size'"):
        drafter_config({k: v for k, v in QWEN3_8B.items() if k != "intermediate_size"}, 1)


@pytest.mark.parametrize(
    ("added", "vocabulary", "size", "unused"),
    [
        ([{"id": 4, "content": "<|mask|>"}], {"a": 0, "b": 1}, 8, 4),
        ([{"id": 4, "content": "<|end|>"}], {"a": 0, "b": 1}, 8, 5),
        ([], [["a", 0.0], ["b", -1.0]], 8, 2),
        ([], {"a": 0, "b": 1}, 2, None),
    ],
)
def test_the_unused_token(tmp_path: Path, added: Any, vocabulary: Any, size: int, unused: int | None) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": vocabulary}}))
    assert unused_token_id(tmp_path, size) == unused


def test_without_a_tokenizer_none_is_known(tmp_path: Path) -> None:
    assert unused_token_id(tmp_path, 8) is None


def test_what_is_written_loads_beside_the_target_and_shares_its_embedding(tmp_path: Path) -> None:
    config = write(tmp_path / "new", TINY, num_layers=3, block_size=8)
    assert (config.mask_token_id, config.target_layer_ids) == (1, (1, 2, 3))
    drafter = load_drafter(tmp_path / "new", TINY)
    assert not {"embed_tokens.weight", "lm_head.weight"} & stored_names(tmp_path / "new").keys()
    features = torch.randn(20, config.feature_size)
    logits = drafter(drafter.fuse(features), torch.arange(20), torch.arange(20), torch.tensor([5, 9]))
    assert logits.shape == (2, 7, config.vocab_size)
    assert logits.isfinite().all()


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    files = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write(tmp_path / name, TINY, num_layers=1, seed=seed)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


def test_it_begins_with_the_target_s_last_layers(tmp_path: Path) -> None:
    config = write(tmp_path / "new", TINY, num_layers=3)
    drafter, width = load_drafter(tmp_path / "new", TINY).state_dict(), config.hidden_size
    for ours, theirs in (("layers.0.mlp.up_proj", "3.mlp.up_proj"), ("layers.2.self_attn.k_norm", "5.self_attn.k_norm")):
        name = f"model.layers.{theirs}.weight"
        assert torch.equal(drafter[f"{ours}.weight"], read_tensors(TINY, [name])[name])
    assert torch.equal(drafter["norm.weight"], read_tensors(TINY, ["model.norm.weight"])["model.norm.weight"])
    deepest = drafter["fc.weight"][:, -width:]
    assert (deepest.diagonal().mean() - 1.0).abs() < 0.02
    assert (deepest - torch.eye(width)).std() == pytest.approx(0.02, rel=0.1)


def test_layers_of_another_kind_are_not_taken() -> None:
    assert is_alike({"model_type": "qwen3"})
    assert not is_alike({"model_type": "gemma3"})
    assert not is_alike({"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}})


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="not an empty folder"):
        write(tmp_path, TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_program_says_in_one_line_why_it_wrote_nothing(tmp_path: Path) -> None:
    asked = [
        sys.executable,
        "-m",
        "honed.recalib.drafter.new_drafter",
        str(tmp_path / "new"),
        "--target",
        str(tmp_path / "none"),
    ]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "config.json is missing" in done.stderr
    assert not (tmp_path / "new").exists()
