"""A target's digest tells copies from others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from honed.recalib.registry import target_digest
from honed.recalib.registry.target_digest import digest_of_target, stamp_of_target


def write(folder: Path, tensors: dict[str, float], num_files: int = 1) -> Path:
    """A target whose tensors are filled with these values."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    names = sorted(tensors)
    weight_map = {name: f"model-{i % num_files}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        held = {name: np.full(500, tensors[name], np.float32) for name in names if weight_map[name] == file}
        save_file(held, folder / file)
    if num_files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


TENSORS = {f"model.layers.{i}.weight": float(i) for i in range(7)}


@pytest.mark.parametrize("num_files", [1, 3])
def test_a_copy_has_the_same_and_a_tuned_one_another(tmp_path: Path, num_files: int) -> None:
    made = digest_of_target(str(write(tmp_path / "a", TENSORS, num_files)))
    assert len(made) == 64
    assert digest_of_target(str(write(tmp_path / "b" / "c", TENSORS, num_files))) == made
    for i, name in enumerate(TENSORS):
        tuned = write(tmp_path / f"tuned-{i}", TENSORS | {name: TENSORS[name] + 0.5}, num_files)
        assert digest_of_target(str(tuned)) != made, name


def test_its_configuration_and_its_names_count(tmp_path: Path) -> None:
    made = digest_of_target(str(write(tmp_path / "a", TENSORS)))
    other = write(tmp_path / "b", TENSORS)
    (other / "config.json").write_text('{"model_type": "qwen2"}')
    assert digest_of_target(str(other)) != made
    assert digest_of_target(str(write(tmp_path / "c", {f"{name}.x": value for name, value in TENSORS.items()}))) != made


def test_a_snapshot_of_links_is_its_content(tmp_path: Path) -> None:
    """As in the cache of the Hugging Face hub: a new commit is a new folder, even if only its text has changed."""
    real = write(tmp_path / "blobs", TENSORS, 3)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in real.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert digest_of_target(str(snapshot)) == digest_of_target(str(real))


def test_of_many_tensors_some_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_digest, "MOST_SAMPLES", 3)
    folder = write(tmp_path / "a", TENSORS)
    assert digest_of_target(str(folder)) == digest_of_target(str(write(tmp_path / "b", TENSORS)))
    first = next(iter(TENSORS))
    assert digest_of_target(str(write(tmp_path / "c", TENSORS | {first: 9.0}))) != digest_of_target(str(folder))


@pytest.mark.fault("a pipe in place of a checkpoint")
@pytest.mark.parametrize(
    "what", ["nothing", "a name", "no weights", "a cut file", "a broken index", "a pipe", "a NUL", "a pipe as config"]
)
def test_what_cannot_be_read_has_none(tmp_path: Path, what: str) -> None:
    """No exception and no wait: any engine may name any path."""
    folder = write(tmp_path / "a", TENSORS)
    path = {"nothing": "", "a name": "Qwen/Qwen3-8B", "a NUL": f"{folder}\0"}.get(what, str(folder))
    file = folder / "model-0.safetensors"
    if what == "no weights":
        file.unlink()
    elif what == "a cut file":
        file.write_bytes(file.read_bytes()[:-1])
    elif what == "a broken index":
        (folder / "model.safetensors.index.json").write_text("[]")
    elif what == "a pipe":
        file.unlink()
        os.mkfifo(file)
    elif what == "a pipe as config":
        (folder / "config.json").unlink()
        os.mkfifo(folder / "config.json")
    assert digest_of_target(path) == ""


def test_a_stamp_changes_with_the_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", TENSORS, 3)
    before = stamp_of_target(str(folder))
    assert before == stamp_of_target(str(folder)) is not None
    (folder / "config.json").write_text("{}")
    assert stamp_of_target(str(folder)) != before
    assert stamp_of_target(str(tmp_path / "nowhere")) is None
    assert stamp_of_target("a\0b") is None
