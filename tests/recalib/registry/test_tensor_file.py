"""A safetensors header is believed only where it agrees with itself and with the file."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from honed.recalib.registry.tensor_file import MAX_HEADER_BYTES, read_tensor_entries, sha256_tensors

np = pytest.importorskip("numpy")


def _file(tmp_path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def test_reads_what_the_reference_library_writes(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(save({"b.weight": np.ones((2, 3), np.float32), "a": np.zeros(5, np.float16)}, {"format": "pt"}))
    entries = read_tensor_entries(path)
    assert {(e.name, e.dtype, e.shape, e.end - e.begin) for e in entries} == {
        ("b.weight", "F32", (2, 3), 24),
        ("a", "F16", (5,), 10),
    }


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        (b"{", b"", "not JSON"),
        (b"[]", b"", "not JSON"),
        ({}, b"", "no tensors"),
        ({"a": 1}, b"", "described wrongly"),
        ({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, b"0000", "described wrongly"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"0000", "can't lie in"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, b"0000", "can't lie in"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"00000000", "begins at"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"000", "cut off"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"00000", "appended"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, b"0000", "can't lie in"),
    ],
)
def test_names_what_is_wrong(tmp_path, header, data, reason):
    with pytest.raises(ValueError, match=reason):
        read_tensor_entries(_file(tmp_path, header, data))


@pytest.mark.parametrize("length", [3, 2**63, 200_000_000])
def test_refuses_a_header_length_beyond_the_file(tmp_path, length):
    path = _file(tmp_path, b"{}", length=length)
    with pytest.raises(ValueError, match=r"claims|not JSON"):
        read_tensor_entries(path)


@given(st.binary(max_size=200))
def test_any_bytes_give_entries_or_value_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(data)
    try:
        entries = read_tensor_entries(path)
    except ValueError:
        return
    assert entries[-1].end == len(data)


def test_digest_of_chosen_tensors_ignores_the_others_and_their_place(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    first.write_bytes(save({"fc.weight": np.arange(4, dtype=np.float32), "norm": np.ones(1, np.float32)}))
    second.write_bytes(save({"fc.weight": np.arange(4, dtype=np.float32), "a": np.zeros(9, np.float64)}))
    digests = {sha256_tensors(path, read_tensor_entries(path), lambda name: name.startswith("fc")) for path in (first, second)}
    assert len(digests) == 1
    assert sha256_tensors(first, read_tensor_entries(first), lambda name: False) == ""


@pytest.mark.fault("headers and manifests without end")
def test_a_header_without_end_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}")
    os.truncate(path, 1 << 30)
    with pytest.raises(ValueError, match=f"its header claims {MAX_HEADER_BYTES + 1} bytes"):
        read_tensor_entries(path)


@pytest.mark.fault("a pipe in place of a checkpoint")
@pytest.mark.timeout(60)
def test_only_a_regular_file_is_read(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(OSError, match="not a regular file"):
        read_tensor_entries(tmp_path / "x.safetensors")
