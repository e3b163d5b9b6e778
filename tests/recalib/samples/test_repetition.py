"""Loops are found whatever their period; ordinary text isn't touched."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.recalib.samples.repetition import longest_varied_stretch, loop_rows

TEXT = np.random.default_rng(0).integers(0, 4000, 400).astype(np.int32)


@pytest.mark.parametrize("period", [1, 2, 7, 16])
def test_loop_in_the_middle_is_cut_out(period):
    loop = np.tile(np.arange(5000, 5000 + period, dtype=np.int32), 200 // period)
    ids = np.concatenate([TEXT[:150], loop, TEXT[150:]])
    is_loop = loop_rows(ids, 16, 32)
    assert is_loop[150 + period : 150 + len(loop)].all()
    assert not is_loop[: 150 + period].any()  # said once, it is text
    assert not is_loop[150 + len(loop) :].any()
    assert longest_varied_stretch(ids, 0, 16, 32) == slice(150 + len(loop), len(ids))


def test_only_what_follows_counts():
    ids = np.concatenate([TEXT[:300], np.full(60, 9, np.int32), TEXT[:40]])
    assert longest_varied_stretch(ids, 310, 16, 32) == slice(360, 400)
    assert longest_varied_stretch(ids, 400, 16, 32) == slice(400, 400)


def test_text_without_loops_stays_whole():
    assert longest_varied_stretch(TEXT, 0, 16, 32) == slice(0, 400)


def test_short_repeats_are_text():
    ids = np.concatenate([TEXT[:50], np.full(20, 9, np.int32), TEXT[50:100]])
    assert longest_varied_stretch(ids, 0, 16, 32) == slice(0, 120)


def test_nothing_but_a_loop_leaves_one_period():
    assert longest_varied_stretch(np.tile(np.arange(3, dtype=np.int32), 100), 0, 16, 32) == slice(0, 3)


def test_a_longer_period_than_looked_for_is_text():
    assert not loop_rows(np.tile(np.arange(17, dtype=np.int32), 20), 16, 32).any()


@given(st.lists(st.integers(0, 2), max_size=200), st.integers(1, 20), st.integers(1, 40))
def test_what_is_left_holds_no_loop(ids, max_period, min_rows):
    array = np.array(ids, np.int32)
    is_loop = loop_rows(array, max_period, min_rows)
    stretch = longest_varied_stretch(array, 0, max_period, min_rows)
    assert not is_loop[stretch].any()
    assert stretch.stop - stretch.start <= (~is_loop).sum()
