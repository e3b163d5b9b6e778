"""What Python puts on the desk lies where compiled code looks for it."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from honed.adapt.lengths.desk import DESK, TABLES, Desk, address_of


def record_of(desk: Desk) -> dict[str, float]:
    return {name: desk._record[name][0].item() for name in DESK.names or ()}


def test_every_figure_of_a_call_has_its_place() -> None:
    desk, slots, contexts = Desk(), array("q", [3, 1, 2]), array("q", [40, 50])
    desk.call(slots, contexts, 1, 2, 700, 9, True, (0.25, 4, 0.02))
    desk.learn(slots, contexts)
    found = record_of(desk)
    assert found == dict.fromkeys(DESK.names or (), 0) | {
        "count": 3,
        "slots": slots.buffer_info()[0],
        "contexts": contexts.buffer_info()[0],
        "num_contexts": 2,
        "first": 1,
        "every": 2,
        "context_tokens": 700,
        "num_prefill_tokens": 9,
        "are_contexts_known": 1,
        "hold_cap": 4,
        "hold_threshold": 0.25,
        "hold_hysteresis": 0.02,
        "drafted": slots.buffer_info()[0],
        "accepted": contexts.buffer_info()[0],
    }


def test_what_was_found_is_read_where_it_was_put() -> None:
    desk = Desk()
    for name, value in (("longest", 5), ("cap", 6), ("threshold", 0.125), ("margin", -0.25)):
        desk._record[name] = value
    assert desk.found() == (5, 6, 0.125, -0.25)


def test_tables_are_laid_out_by_name() -> None:
    desk, table = Desk(), np.zeros((2, 3))
    desk.put(gains=table, num_curves=2, depth=3)
    assert record_of(desk) == dict.fromkeys(DESK.names or (), 0) | {"gains": address_of(table), "num_curves": 2, "depth": 3}
    assert {"lengths", "num_totals"} <= set(TABLES)
    for name in ("count", "threshold", "gain"):
        with pytest.raises(KeyError, match=name):
            desk.put(**{name: 1})


def test_an_array_in_pieces_has_no_address() -> None:
    table = np.zeros((4, 4))
    assert address_of(table[1:]) == address_of(table) + 4 * 8
    with pytest.raises(ValueError, match="pieces"):
        address_of(table[:, 1:])
