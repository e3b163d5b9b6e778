"""step_page: an engine's GPUs. What it says of steps is in tests/recalib/process/test_busy_flags.py."""

from __future__ import annotations

from uuid import UUID

import pytest

from honed.adapt.protocol.step_page import GPUS_OFFSET, MOST_GPUS, NUM_BYTES, pack_gpus, unpack_gpus

GPUS = {str(UUID(int=i << 64 | 7)): i << 30 for i in range(MOST_GPUS)}


def page(packed: bytes) -> bytes:
    return bytes(GPUS_OFFSET) + packed.ljust(NUM_BYTES - GPUS_OFFSET, b"\0")


@pytest.mark.parametrize("count", [0, 1, 8, MOST_GPUS])
def test_gpus_are_read_as_they_were_told(count: int) -> None:
    told = dict(list(GPUS.items())[:count])
    assert len(pack_gpus(told)) == NUM_BYTES - GPUS_OFFSET
    assert unpack_gpus(page(pack_gpus(told))) == told


def test_what_is_not_told_is_told_from_none() -> None:
    assert unpack_gpus(page(b"")) is None
    assert unpack_gpus(b"") is None
    assert unpack_gpus(bytes(GPUS_OFFSET)) is None, "a page that is cut off"
    assert pack_gpus(GPUS | {str(UUID(int=1)): 0}) == b"", "more than there is room for"


def test_a_page_that_is_being_written_is_not_believed() -> None:
    old, new = (page(pack_gpus({gpu: reserve})) for gpu, reserve in list(GPUS.items())[1:3])
    mixed = [new[:at] + old[at:] for at in range(GPUS_OFFSET + 9, GPUS_OFFSET + 33)]
    assert any(unpack_gpus(one) is None for one in mixed)
    assert all(unpack_gpus(new[:at] + old[at:]) in (None, unpack_gpus(old), unpack_gpus(new)) for at in range(NUM_BYTES + 1))
