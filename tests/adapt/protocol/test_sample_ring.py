import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.protocol import sample_ring as ring

u32, u64, i64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1)
headers = st.builds(
    ring.RingHeader,
    capacity_bytes=u64,
    reserved=u64,
    written=u64,
    num_records=u64,
    feature_size=u32,
    feature_dtype=st.sampled_from(sorted(ring.FEATURE_DTYPES)),
    feature_kind=st.sampled_from(sorted(ring.FEATURE_KINDS)),
    generation=u64,
    created_unix_ns=u64,
)
records = st.builds(
    ring.RecordHeader,
    kind=st.integers(0, 255),
    flags=st.integers(0, 2**24 - 1),
    seq=u64,
    payload_bytes=u32,
    crc32=u32,
    num_rows=u32,
    head_bytes=u32,
    first_position=i64,
    feature_size=u32,
    feature_dtype=u32,
    temperature_milli=u32,
)
labels = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)


@given(headers)
def test_a_header_survives_the_way_through_the_file(header):
    data = ring.pack_header(header)
    assert len(data) <= ring.HEADER_BYTES
    assert ring.unpack_header(data + b"\0" * 8) == header


@given(headers)
def test_the_moving_offsets_lie_where_the_layout_says(header):
    at = ring.RESERVED_OFFSET
    assert struct.unpack_from("<QQQ", ring.pack_header(header), at) == (
        header.reserved,
        header.written,
        header.num_records,
    )
    assert at % 8 == 0


@given(records)
def test_a_record_survives_the_way_through_the_file(record):
    data = ring.pack_record(record)
    assert len(data) == ring.RECORD_BYTES
    assert ring.unpack_record(data) == record


def test_records_start_8_byte_aligned_after_one_another():
    assert ring.RECORD_BYTES % 8 == 0
    assert ring.HEADER_BYTES % 8 == 0


@given(labels, labels, labels)
def test_labels_survive_and_are_padded(request_key, workload, version):
    head = ring.pack_rows_head(request_key, workload, version)
    assert len(head) % 8 == 0
    assert ring.unpack_rows_head(head) == (request_key, workload, version)


def test_a_nul_in_a_label_does_not_shift_the_others():
    assert ring.unpack_rows_head(ring.pack_rows_head("a\0b", "w", "")) == ("ab", "w", "")


@given(st.binary(max_size=200))
def test_garbage_is_a_value_error_or_a_value(data):
    for unpack in (ring.unpack_header, ring.unpack_record, ring.unpack_rows_head):
        with contextlib.suppress(ValueError):
            unpack(data)


@given(headers, st.integers(0, 87))
def test_a_file_cut_off_in_its_header_is_refused(header, length):
    with pytest.raises(ValueError, match="cut off"):
        ring.unpack_header(ring.pack_header(header)[: min(length, len(ring.pack_header(header)) - 1)])


@given(records, st.integers(0, ring.RECORD_BYTES - 1))
def test_a_record_cut_off_is_refused(record, length):
    with pytest.raises(ValueError, match="cut off"):
        ring.unpack_record(ring.pack_record(record)[:length])


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [(0, 7, "magic"), (8, 99, "layout 99"), (12, 512, "layout"), (52, 9, "dtype 9"), (56, 9, "kind 9")],
)
def test_another_files_header_is_refused_by_name(offset, value, message):
    header = ring.RingHeader(4096, 0, 0, 0, 64, 1, 1, 0, 0)
    data = bytearray(ring.pack_header(header))
    struct.pack_into("<I", data, offset, value)
    with pytest.raises(ValueError, match=message):
        ring.unpack_header(bytes(data))


def test_what_lies_where_no_record_starts_is_refused():
    with pytest.raises(ValueError, match="magic"):
        ring.unpack_record(b"\0" * ring.RECORD_BYTES)
    with pytest.raises(ValueError, match="labels"):
        ring.unpack_rows_head(b"\0\0\0"[:2])
