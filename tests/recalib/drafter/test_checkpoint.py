"""Checkpoints come back as they were written, and every bad one is refused in one line with cause and cure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from honed.recalib.drafter.checkpoint import (
    CheckpointError,
    load_drafter,
    load_target_head,
    read_drafter_config,
    save_drafter,
    tensor_files,
)
from tests.shut_out import shut_out


def edit_config(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        (raw["dflash_config"] if name in raw.get("dflash_config", {}) else raw)[name] = value
    (folder / "config.json").write_text(json.dumps(raw))


def test_weights_come_back_as_they_were(drafter_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    drafter = load_drafter(drafter_dir, target_dir)
    save_drafter(drafter, tmp_path / "copy", drafter_dir, dtype=torch.float32)
    again = load_drafter(tmp_path / "copy", target_dir)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert (tmp_path / "copy" / "config.json").read_bytes() == (drafter_dir / "config.json").read_bytes()


def test_names_are_those_vllm_reads_and_nothing_of_the_target_is_written(drafter_dir: Path) -> None:
    with safe_open(drafter_dir / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.k_norm.weight"} <= names
    assert len(names) == 3 + 2 * 11
    assert not [name for name in names if "embed_tokens" in name or "lm_head" in name]


def test_served_in_bfloat16_trained_in_float32(drafter_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    path = save_drafter(load_drafter(drafter_dir, target_dir), tmp_path / "served", drafter_dir)
    assert {tensor.dtype for tensor in load_file(path).values()} == {torch.bfloat16}
    assert {p.dtype for p in load_drafter(path.parent, target_dir).parameters()} == {torch.float32}


@pytest.mark.fault("files that are cut off while they are in use")
def test_a_checkpoint_that_is_cut_off_after_it_was_read_ends_nobody(drafter_dir: Path, target_dir: Path) -> None:
    """Float32 tensors used to stay in a map of their file: writing it anew ended the trainer with SIGBUS."""
    script = f"""
import os
from pathlib import Path
from honed.recalib.drafter.checkpoint import load_target_head, read_tensors
target, drafter = Path({str(target_dir)!r}), Path({str(drafter_dir)!r})
head, fc = load_target_head(target), read_tensors(drafter, ["fc.weight"])["fc.weight"]
expected = float(head.embed_tokens.sum() + fc.sum())
for folder in (target, drafter):
    for path in folder.glob("*.safetensors"):
        os.truncate(path, 0)
assert float(head.embed_tokens.sum() + fc.sum()) == expected
assert str(target) not in Path("/proc/self/maps").read_text()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_no_part_file_is_left(drafter_dir: Path) -> None:
    assert sorted(path.name for path in drafter_dir.iterdir()) == ["config.json", "model.safetensors"]


def test_a_tied_head_is_the_embedding(target_dir: Path) -> None:
    head = load_target_head(target_dir)
    assert head.lm_head is head.embed_tokens
    assert head.num_hidden_layers == 3


def test_a_head_of_its_own_is_read(target_dir: Path) -> None:
    edit_config(target_dir, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
        load_target_head(target_dir)


Break = Callable[[Path, Path], None]


def remove_weights(drafter: Path, target: Path) -> None:
    (drafter / "model.safetensors").unlink()


def tear_weights(drafter: Path, target: Path) -> None:
    whole = (drafter / "model.safetensors").read_bytes()
    (drafter / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def drop_tensor(drafter: Path, target: Path) -> None:
    tensors = load_file(drafter / "model.safetensors")
    del tensors["layers.1.self_attn.q_proj.weight"]
    save_file(tensors, drafter / "model.safetensors")


def reshape_tensor(drafter: Path, target: Path) -> None:
    tensors = load_file(drafter / "model.safetensors")
    tensors["fc.weight"] = torch.zeros(16, 48)
    save_file(tensors, drafter / "model.safetensors")


BREAKS: dict[str, tuple[Break, str]] = {
    "no folder": (lambda d, t: (d / "config.json").unlink(), r"config\.json is missing; point to"),
    "bad JSON": (lambda d, t: (d / "config.json").write_text("{") and None, r"cannot be read .* restore it"),
    "no weights": (remove_weights, r"has no \*\.safetensors; convert"),
    "torn weights": (tear_weights, r"cannot be read .* fetch the checkpoint again"),
    "missing tensor": (drop_tensor, r"no tensor layers\.1\.self_attn\.q_proj\.weight"),
    "wrong shape": (reshape_tensor, r"fc\.weight is \[16, 48\], config\.json asks for \[16, 32\]"),
    "other vocabulary": (lambda d, t: edit_config(d, vocab_size=51), r"was not made for .* \(vocab_size 51 against 50\)"),
    "other width": (lambda d, t: edit_config(d, target_hidden_size=32), r"target_hidden_size 32 against 16"),
    "other depth": (lambda d, t: edit_config(d, target_layer_ids=[0, 3]), r"target_layer_ids \[0, 3\] against 3 layers"),
    "mask outside": (lambda d, t: edit_config(d, mask_token_id=50), r"mask_token_id 50 against a vocabulary of 50"),
    "unsupported": (lambda d, t: edit_config(d, logit_scale=0.5), r"logit_scale is not supported"),
    "not for vLLM": (lambda d, t: edit_config(d, hidden_act="gelu"), r"vLLM 0\.32 does not load .* activation gelu"),
    "pickled mask": (lambda d, t: (d / "mask_embedding.pt").touch(), r"mask embedding of its own is pickled"),
    "no target": (lambda d, t: (t / "config.json").unlink(), r"config\.json is missing"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_bad_checkpoint_is_refused_in_one_line(name: str, drafter_dir: Path, target_dir: Path) -> None:
    break_it, message = BREAKS[name]
    break_it(drafter_dir, target_dir)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_drafter(drafter_dir, target_dir)
    assert "\n" not in str(caught.value)


def test_files_that_this_user_may_not_look_for_are_one_error(target_dir: Path) -> None:
    with shut_out(target_dir), pytest.raises(CheckpointError, match="Permission denied"):
        tensor_files(target_dir)


def rename(folder: Path, names: dict[str, str], extra: dict[str, torch.Tensor] | None = None) -> None:
    """Give a checkpoint's tensors the names that another trainer would have given them."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        for plain, other in names.items():
            name = name.replace(plain, other) if name.startswith(plain) else name
        renamed[name] = tensor
    save_file(renamed | (extra or {}), folder / "model.safetensors")


def test_other_names_are_read_and_kept(drafter_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    plain = load_drafter(drafter_dir, target_dir)
    rename(drafter_dir, {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc.", "layers.0.": "midlayer."})
    drafter = load_drafter(drafter_dir, target_dir)
    assert all(torch.equal(t, drafter.state_dict()[name]) for name, t in plain.state_dict().items())
    save_drafter(drafter, tmp_path / "copy", drafter_dir, dtype=torch.float32)
    before, after = load_file(drafter_dir / "model.safetensors"), load_file(tmp_path / "copy" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_embedding_of_its_own_is_used_and_kept_as_it_is(drafter_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    own = {"embed_tokens.weight": torch.randn(50, 16).bfloat16(), "lm_head.weight": torch.randn(50, 16).half()}
    rename(drafter_dir, {}, own)
    drafter = load_drafter(drafter_dir, target_dir)
    assert torch.equal(drafter.embed_tokens, own["embed_tokens.weight"].float())
    assert torch.equal(drafter.lm_head, own["lm_head.weight"].float())
    written = load_file(save_drafter(drafter, tmp_path / "copy", drafter_dir))
    assert all(torch.equal(written[name], tensor) and written[name].dtype == tensor.dtype for name, tensor in own.items())


def test_a_copy_of_the_targets_embedding_is_held_once(drafter_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    """Two more of it, in float32, are gigabytes that no estimate counts."""
    head = load_target_head(target_dir, load_drafter(drafter_dir, target_dir).config, dtype=torch.bfloat16)
    rename(drafter_dir, {}, {"embed_tokens.weight": head.embed_tokens.clone(), "lm_head.weight": head.lm_head.clone()})
    drafter = load_drafter(drafter_dir, target_dir, head)
    assert drafter.embed_tokens is head.embed_tokens
    assert drafter.lm_head is head.lm_head
    written = load_file(save_drafter(drafter, tmp_path / "copy", drafter_dir))
    assert torch.equal(written["embed_tokens.weight"], head.embed_tokens)


def test_speculators_form_is_read_and_kept(drafter_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    drafter = load_drafter(drafter_dir, target_dir)
    raw = json.loads((drafter_dir / "config.json").read_text())
    outside = ("block_size", "dflash_config")
    theirs = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [1, 3],
        "block_size": 4,
        "mask_token_id": 1,
        "transformer_layer_config": {name: value for name, value in raw.items() if name not in outside},
    }
    (drafter_dir / "config.json").write_text(json.dumps(theirs, indent=3))
    again = load_drafter(drafter_dir, target_dir)
    assert again.config == drafter.config
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in drafter.state_dict().items())
    # A version made of it keeps its form, to the byte.
    save_drafter(again, tmp_path / "version", drafter_dir)
    assert (tmp_path / "version" / "config.json").read_bytes() == (drafter_dir / "config.json").read_bytes()


def test_drafters_that_are_compared_share_one_head(drafter_dir: Path, target_dir: Path) -> None:
    head = load_target_head(target_dir)
    one, other = (load_drafter(drafter_dir, target_dir, head) for _ in range(2))
    assert one.embed_tokens is other.embed_tokens
    assert one.lm_head is one.embed_tokens


def reduce(drafter_dir: Path, words: list[int]) -> dict[str, torch.Tensor]:
    """Give a checkpoint a reduced vocabulary; returns its new tensors."""
    tensors = load_file(drafter_dir / "model.safetensors")
    is_word = torch.zeros(50, dtype=torch.bool)
    is_word[words] = True
    own = {"d2t": torch.tensor(words) - torch.arange(len(words)), "t2d": is_word, "lm_head.weight": torch.randn(len(words), 16)}
    save_file(tensors | own, drafter_dir / "model.safetensors")
    edit_config(drafter_dir, draft_vocab_size=len(words))
    return own


def test_a_reduced_vocabulary_comes_back_as_it_was(drafter_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    words = [2, 3, 7, 20, 49]
    own = reduce(drafter_dir, words)
    drafter = load_drafter(drafter_dir, target_dir)
    assert drafter.words is not None
    assert drafter.words.tolist() == words
    assert torch.equal(drafter.lm_head, own["lm_head.weight"])
    saved = load_file(save_drafter(drafter, tmp_path / "version", drafter_dir))
    for name, tensor in own.items():
        assert torch.equal(saved[name], tensor), name


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("d2t", torch.tensor([0, 0, 0, 0, 46]), "outside of the vocabulary"),
        ("d2t", torch.tensor([1, 0, 0, 0, 0]), "two to one"),
        ("d2t", torch.tensor([0, 0]), r"d2t is \[2\], config.json asks for \[5\]"),
        ("lm_head.weight", torch.zeros(6, 16), r"its head is \[6, 16\], config.json asks for \[5, 16\]"),
        ("d2t", None, "no tensor d2t"),
        ("lm_head.weight", None, "its head is"),
    ],
)
def test_a_reduced_vocabulary_that_is_not_sound_is_refused(
    name: str, tensor: torch.Tensor | None, message: str, drafter_dir: Path, target_dir: Path
) -> None:
    reduce(drafter_dir, [2, 3, 7, 20, 49])
    tensors = load_file(drafter_dir / "model.safetensors") | ({name: tensor} if tensor is not None else {})
    if tensor is None:
        del tensors[name]
    save_file(tensors, drafter_dir / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_drafter(drafter_dir, target_dir)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_a_target_inside_another_model_is_read(prefix: str, target_dir: Path) -> None:
    expected = load_target_head(target_dir)
    for path in target_dir.glob("*.safetensors"):
        save_file({name.replace("model.", prefix, 1): tensor for name, tensor in load_file(path).items()}, path)
    index = target_dir / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model.', f'"{prefix}'))
    raw = json.loads((target_dir / "config.json").read_text())
    (target_dir / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": raw}))
    head = load_target_head(target_dir)
    assert torch.equal(head.embed_tokens, expected.embed_tokens)
    assert head.lm_head is head.embed_tokens


def test_a_block_has_as_many_tokens_as_the_engine_drafts(drafter_dir: Path) -> None:
    """VLLM gives it that many rows, and each sees all others; slots for trees beyond its own block are no rows."""
    own = read_drafter_config(drafter_dir).num_draft_tokens
    assert read_drafter_config(drafter_dir, own - 1).num_draft_tokens == own - 1
    assert read_drafter_config(drafter_dir, 40).num_draft_tokens == own
