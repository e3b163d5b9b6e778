"""A saved training comes back as it was, or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from honed.recalib.training.training_state import TrainingState

TENSORS = {"weights/a": torch.arange(6.0).view(2, 3), "generator": torch.Generator().get_state()}
FACTS = {"steps": 7, "loss": 0.1, "big": 2**100}


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    TrainingState(tmp_path / "new", "op-1", {"seed": 1}).save(TENSORS, FACTS)
    found = TrainingState(tmp_path / "new", "op-1", {"seed": 1}).load()
    assert found is not None
    tensors, facts = found
    assert facts == FACTS
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_is_its_owner_s_alone_and_no_part_file_is_left(tmp_path: Path) -> None:
    TrainingState(tmp_path, "op-1", {}).save(TENSORS, FACTS)
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_another_training_does_not_take_it_up(tmp_path: Path) -> None:
    TrainingState(tmp_path, "op-1", {"seed": 1}).save(TENSORS, FACTS)
    assert TrainingState(tmp_path, "op-1", {"seed": 2}).load() is None
    assert TrainingState(tmp_path, "op-2", {"seed": 1}).load() is None


@pytest.mark.parametrize("length", [0, 9, 200])
def test_a_damaged_file_is_no_state(tmp_path: Path, length: int) -> None:
    state = TrainingState(tmp_path, "op-1", {})
    state.save(TENSORS, FACTS)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:length])
    assert state.load() is None


def test_only_the_latest_operation_is_kept(tmp_path: Path) -> None:
    TrainingState(tmp_path, "op-1", {}).save(TENSORS, FACTS)
    second = TrainingState(tmp_path, "op-2", {})
    second.save(TENSORS, FACTS)
    assert [path.name for path in tmp_path.iterdir()] == ["op-2.safetensors"]
    second.discard()
    second.discard()
    assert not list(tmp_path.iterdir())


def test_parts_of_a_save_that_was_killed_go(tmp_path: Path) -> None:
    state = TrainingState(tmp_path, "op-2", {})
    for end in (lambda: state.save(TENSORS, FACTS), state.discard):
        for number in (1, 2):
            (tmp_path / f".op-{number}.safetensors.part").write_bytes(b"half")
        end()
        assert not list(tmp_path.glob("*.part"))


def test_an_id_with_slashes_stays_in_the_folder(tmp_path: Path) -> None:
    state = TrainingState(tmp_path / "in", "../../op", {})
    state.save(TENSORS, FACTS)
    assert state.load() is not None
    assert [path.parent for path in tmp_path.rglob("*.safetensors")] == [tmp_path / "in"]
