import contextlib
import dataclasses
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.protocol import sample_ring as ring

u32, u64, i64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1)
headers = st.builds(
    ring.RingHeader,
    capacity_bytes=st.integers(64, ring.MAX_CAPACITY_BYTES // 8).map(lambda words: 8 * words),
    feature_size=st.integers(1, ring.MAX_FEATURE_SIZE),
    feature_dtype=st.sampled_from(sorted(ring.FEATURE_DTYPES)),
    feature_kind=st.sampled_from(sorted(ring.FEATURE_KINDS)),
    created_unix_ns=u64,
    written=st.integers(0, 2**61 - 1).map(lambda words: 8 * words),
    generation=u64,
)
records = st.builds(
    ring.RecordHeader,
    kind=st.integers(0, 255),
    flags=st.integers(0, 2**24 - 1),
    seq=u64,
    offset=u64,
    payload_bytes=u32,
    num_rows=u32,
    head_bytes=u32,
    first_position=i64,
)
labels = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)


def pack_header(header):
    state = ring.pack_state(ring.pack_fixed(header), header.written)
    return state + struct.pack("<Q", header.generation)


@given(headers)
def test_a_header_survives_the_way_through_the_file(header):
    data = pack_header(header)
    assert len(data) <= ring.HEADER_BYTES
    assert struct.unpack_from("<Q", data, ring.GENERATION_OFFSET) == (header.generation,)
    assert ring.unpack_header(data + b"\0" * 8) == header


@given(headers, st.integers(0, ring.GENERATION_OFFSET - 1), st.integers(1, 255))
def test_half_a_header_is_refused(header, place, change):
    """A reader that comes while the writer writes it, or after somebody else did, learns that and reads again."""
    data = bytearray(pack_header(header))
    data[place] ^= change
    if place < ring.GENERATION_OFFSET - 4:  # the rest is padding
        with pytest.raises(ValueError, match=r"damaged|magic|layout"):
            ring.unpack_header(bytes(data))


@given(records, st.binary(max_size=100), st.integers(0), st.integers(1, 255))
def test_a_record_with_any_wrong_byte_is_not_intact(record, payload, place, change):
    fixed = ring.pack_record(record, [payload[:7], payload[7:]])
    assert ring.unpack_record(fixed) == record
    assert len(fixed) == ring.RECORD_BYTES
    assert ring.is_intact(fixed, payload)
    data = bytearray(fixed[:-4] + payload)  # without the padding
    data[place % len(data)] ^= change
    whole = bytes(data[: ring.RECORD_BYTES - 4]) + bytes(4), bytes(data[ring.RECORD_BYTES - 4 :])
    assert not ring.is_intact(*whole)
    assert not ring.is_intact(fixed, payload + b"\0")


def test_records_start_8_byte_aligned_after_one_another():
    assert ring.RECORD_BYTES % 8 == 0
    assert ring.HEADER_BYTES % 8 == 0


@given(labels, labels, labels)
def test_labels_survive_and_are_padded(request_key, workload, version):
    head = ring.pack_rows_head(request_key, workload, version)
    assert len(head) % 8 == 0
    assert ring.unpack_rows_head(head) == (request_key, workload, version)


def test_labels_are_cut_to_what_a_record_has_room_for():
    head = ring.pack_rows_head("\N{ROCKET}" * 1000, "w" * 1000, "v" * 1000, "s" * 1000)
    assert len(head) == ring.MAX_HEAD_BYTES
    request, *others = ring.unpack_rows_head(head)
    assert request.startswith("\N{ROCKET}" * 63)
    assert others == ["w" * 255, "v" * 255]


def test_a_nul_in_a_label_does_not_shift_the_others():
    assert ring.unpack_rows_head(ring.pack_rows_head("a\0b", "w", "")) == ("ab", "w", "")


@given(st.binary(max_size=200))
def test_garbage_is_a_value_error_or_a_value(data):
    for unpack in (ring.unpack_header, ring.unpack_record, ring.unpack_rows_head):
        with contextlib.suppress(ValueError):
            unpack(data)


@given(headers, st.integers(0, ring.GENERATION_OFFSET + 7))
def test_a_file_cut_off_in_its_header_is_refused(header, length):
    with pytest.raises(ValueError, match="cut off"):
        ring.unpack_header(pack_header(header)[:length])


@given(records, st.integers(0, ring.RECORD_BYTES - 1))
def test_a_record_cut_off_is_refused(record, length):
    with pytest.raises(ValueError, match="cut off"):
        ring.unpack_record(ring.pack_record(record, [])[:length])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("feature_dtype", 9, "dtype 9"),
        ("feature_kind", 9, "kind 9"),
        ("feature_size", 0, "rows of 0 values"),
        ("feature_size", ring.MAX_FEATURE_SIZE + 1, "values, which no ring does"),
        ("capacity_bytes", 0, "hold 0 bytes"),
        ("capacity_bytes", 4100, "hold 4100 bytes"),
        ("capacity_bytes", 2**64 - 8, "bytes, which no ring does"),
        ("written", 4, "begins at 4"),
    ],
)
def test_a_header_with_values_that_no_writer_makes_is_refused_by_name(field, value, message):
    header = dataclasses.replace(ring.RingHeader(4096, 64, 1, 1, 0), **{field: value})
    with pytest.raises(ValueError, match=message):
        ring.unpack_header(pack_header(header))


@pytest.mark.parametrize(("offset", "value", "message"), [(0, 7, "magic"), (8, 99, "layout 99"), (12, 512, "layout")])
def test_another_files_header_is_refused_by_name(offset, value, message):
    data = bytearray(pack_header(ring.RingHeader(4096, 64, 1, 1, 0)))
    struct.pack_into("<I", data, offset, value)
    with pytest.raises(ValueError, match=message):
        ring.unpack_header(bytes(data))


def test_what_lies_where_no_record_starts_is_refused():
    with pytest.raises(ValueError, match="magic"):
        ring.unpack_record(b"\0" * ring.RECORD_BYTES)
    with pytest.raises(ValueError, match="labels"):
        ring.unpack_rows_head(b"\0\0\0"[:2])
