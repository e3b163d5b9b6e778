"""Units fit the budget on a machine whose costs nobody told."""

import numpy as np
import pytest

from honed.recalib.training.pace import SHARE, Pace


def work(pace, wanted, fixed_s, block_s, noise=0.0, steps=200):
    """Units of a machine with these costs; their blocks and seconds."""
    rng, done = np.random.default_rng(0), []
    for _ in range(steps):
        blocks = pace.blocks(wanted)
        seconds = (fixed_s + block_s * blocks) * (1.0 + noise * rng.random())
        pace.observe(blocks, seconds)
        done.append((blocks, seconds))
    return done


def test_the_first_unit_is_as_small_as_can_be_and_growth_is_bounded():
    pace = Pace(0.05)
    blocks = [n for n, _ in work(pace, 64, 0.001, 0.0001)]
    assert blocks[0] == 1
    assert all(later <= 2 * max(blocks[: i + 1]) for i, later in enumerate(blocks[1:]))
    assert blocks[-1] == 64


@pytest.mark.parametrize(("fixed_s", "block_s"), [(0.002, 0.001), (0.010, 0.0005), (0.0, 0.004)])
def test_units_fill_the_budget_and_no_more(fixed_s, block_s):
    units = work(Pace(0.05), 256, fixed_s, block_s, noise=0.2)
    assert max(seconds for _, seconds in units) <= 0.05
    assert np.mean([seconds for _, seconds in units[50:]]) >= 0.5 * SHARE * 0.05


def test_a_machine_that_becomes_slower_gets_smaller_units():
    pace = Pace(0.05)
    before = work(pace, 256, 0.002, 0.001)[-1][0]
    after = work(pace, 256, 0.002, 0.004)[-1][0]
    assert after < before / 2


@pytest.mark.parametrize(
    ("fixed_s", "block_s", "least"),
    [(0.2, 0.001, 0.45), (0.04, 0.0001, 0.19), (0.06, 0.02, 0.35)],  # of 256 blocks, of 0.01 s, of whole blocks
)
def test_units_do_more_than_their_fixed_part_and_take_at_most_twice_the_least(fixed_s, block_s, least):
    """A GPU's small units had one block each, and spent all of their time on launching kernels."""
    units = work(Pace(0.05), 256, fixed_s, block_s)[20:]
    assert max(seconds for _, seconds in units) <= max(0.05, 2.0 * (fixed_s + block_s))
    assert sum(n for n, _ in units) * block_s >= least * sum(seconds for _, seconds in units)


def test_compiling_is_not_taken_for_work():
    """The first unit took 20 s on a GPU, and all of the training after it had units of one block."""
    pace = Pace(0.05)
    pace.observe(pace.blocks(256), 20.0)
    blocks = [n for n, _ in work(pace, 256, 0.01, 0.001, steps=12)]
    assert blocks[-1] in (19, 20)
    pace.observe(20, 15.0)  # another kernel
    assert min(n for n, _ in work(pace, 256, 0.01, 0.001, steps=150)) >= 19


def test_a_machine_that_becomes_much_slower_at_once_is_believed():
    pace = Pace(0.05)
    work(pace, 256, 0.002, 0.001)
    units = work(pace, 256, 0.002, 0.02)
    assert all(seconds <= 0.05 for _, seconds in units[8:])


def test_without_a_budget_everything_is_one_unit():
    pace = Pace(0.0)
    assert pace.blocks(256) == 256
    pace.observe(256, 10.0)
    assert pace.blocks(256) == 256
