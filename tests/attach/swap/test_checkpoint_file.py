"""A checkpoint file read without `safetensors`' own reader holds what that finds in it, and is refused when it is damaged."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file

from honed.attach.swap.checkpoint_file import DTYPES, load_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = torch.Generator().manual_seed(1)
    tensors = {f"of_{name}": (10.0 * torch.randn(3, 5, generator=made)).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "odd": torch.ones(3, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def test_it_holds_what_was_saved(file: Path) -> None:
    found, tensors = load_file(file)
    assert found == hashlib.sha256(file.read_bytes()).hexdigest()
    expected = load_safetensors(file)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(
            tensors[name].view(torch.uint8) if tensor.ndim else tensors[name],
            tensor.view(torch.uint8) if tensor.ndim else tensor,
        ), name


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_one_that_was_cut_off_is_refused(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.safetensors isn't a sound safetensors file"):
        load_file(file)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b'{"a": {"shape": [1]}}',
        b"\xff\xfe",
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 64)
    with pytest.raises(ValueError, match="isn't a sound safetensors file"):
        load_file(file)


def test_a_type_that_no_drafter_has_is_named(tmp_path: Path) -> None:
    header = b'{"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}'
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(ValueError, match="a is of type 'F4'"):
        load_file(file)


@pytest.mark.fault("a pipe in place of a checkpoint")
@pytest.mark.timeout(60)
def test_a_pipe_in_its_place_is_refused(tmp_path: Path) -> None:
    """It would block the engine for ever."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="isn't a sound safetensors file"):
        load_file(tmp_path / "model.safetensors")
