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


def test_where_the_context_alone_is_too_much_units_have_one_block():
    assert work(Pace(0.05), 256, 0.2, 0.001)[-1][0] <= 2


def test_without_a_budget_everything_is_one_unit():
    pace = Pace(0.0)
    assert pace.blocks(256) == 256
    pace.observe(256, 10.0)
    assert pace.blocks(256) == 256
