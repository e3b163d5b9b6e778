"""A saved training comes back as it was, or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from honed.recalib.training import training_state
from honed.recalib.training.training_state import TrainingState
from tests.full_tmpfs import run_on_tmpfs

TENSORS = {"weights/a": torch.arange(6.0).view(2, 3), "generator": torch.Generator().get_state()}
FACTS = {"steps": 7, "loss": 0.1, "big": 2**100}


def save(state: TrainingState) -> None:
    for _ in state.save(TENSORS, FACTS):
        pass


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    save(TrainingState(tmp_path / "new", "op-1", {"seed": 1}))
    found = TrainingState(tmp_path / "new", "op-1", {"seed": 1}).load()
    assert found is not None
    tensors, facts = found
    assert facts == FACTS
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_is_written_in_parts_and_given_up_amid_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_state, "PART_BYTES", 100)
    tensors = {"a": torch.arange(90.0).bfloat16(), "b": torch.arange(7), "c": torch.tensor(3.0), "d": torch.zeros(0, 4)}
    state = TrainingState(tmp_path, "op-1", {})
    num_parts = sum(1 for _ in state.save(tensors, FACTS))
    (path,) = tmp_path.iterdir()
    assert num_parts > 1
    found = state.load()
    assert found is not None
    assert all(torch.equal(found[0][name], tensor) and found[0][name].dtype == tensor.dtype for name, tensor in tensors.items())
    before = path.read_bytes()
    parts = state.save(TENSORS, FACTS)
    next(parts)
    parts.close()
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (before, [path])


@pytest.mark.fault("a saved training that fills the disk")
def test_others_on_a_small_disk_can_always_write(tmp_path: Path) -> None:
    """A second state doesn't fit beside the first: it isn't begun, and the first is kept."""
    script = """
import errno, sys, torch
from pathlib import Path
from honed.recalib.training import training_state
training_state.LEFT_FREE_BYTES = training_state.PART_BYTES = 1 << 20
folder, refused = Path(sys.argv[1]), []
state = training_state.TrainingState(folder / "training", "op-1", {})
for number in range(3):
    try:
        for _ in state.save({"a": torch.full((5 << 20,), float(number))}, {}):
            (folder / "neighbour").write_bytes(bytes(500_000))
    except OSError as error:
        refused.append(error.errno == errno.ENOSPC)
    (folder / "neighbour").write_bytes(bytes(500_000))
tensors, _ = state.load()
print(refused, float(tensors["a"][0]), sorted(path.name for path in (folder / "training").iterdir()))
"""
    assert run_on_tmpfs(tmp_path, "32m", script, str(tmp_path)).splitlines()[-1] == "[True, True] 0.0 ['op-1.safetensors']"


def test_is_its_owner_s_alone_and_no_part_file_is_left(tmp_path: Path) -> None:
    save(TrainingState(tmp_path, "op-1", {}))
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_another_training_does_not_take_it_up(tmp_path: Path) -> None:
    save(TrainingState(tmp_path, "op-1", {"seed": 1}))
    assert TrainingState(tmp_path, "op-1", {"seed": 2}).load() is None
    assert TrainingState(tmp_path, "op-2", {"seed": 1}).load() is None


@pytest.mark.parametrize("length", [0, 9, 200])
def test_a_damaged_file_is_no_state(tmp_path: Path, length: int) -> None:
    state = TrainingState(tmp_path, "op-1", {})
    save(state)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:length])
    assert state.load() is None


def test_only_the_latest_operation_is_kept(tmp_path: Path) -> None:
    save(TrainingState(tmp_path, "op-1", {}))
    second = TrainingState(tmp_path, "op-2", {})
    save(second)
    assert [path.name for path in tmp_path.iterdir()] == ["op-2.safetensors"]
    second.discard()
    second.discard()
    assert not list(tmp_path.iterdir())


def test_parts_of_a_save_that_was_killed_go(tmp_path: Path) -> None:
    state = TrainingState(tmp_path, "op-2", {})
    for end in (lambda: save(state), state.discard):
        for number in (1, 2):
            (tmp_path / f".op-{number}.safetensors.part").write_bytes(b"half")
        end()
        assert not list(tmp_path.glob("*.part"))


def test_an_id_with_slashes_stays_in_the_folder(tmp_path: Path) -> None:
    state = TrainingState(tmp_path / "in", "../../op", {})
    save(state)
    assert state.load() is not None
    assert [path.parent for path in tmp_path.rglob("*.safetensors")] == [tmp_path / "in"]
