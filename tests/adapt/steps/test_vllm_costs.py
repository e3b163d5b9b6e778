"""Curves for vLLM's adaptive verification say what the step-time model says."""

from itertools import pairwise

import pytest

from honed.adapt.steps.step_time import StepTimeModel
from honed.adapt.steps.vllm_costs import are_alike, cost_curves

BATCH = {"num_requests": 10, "context_tokens": 5000, "num_spec_tokens": 7, "max_num_seqs": 48, "max_tokens": 3000}


def model(captured=()):
    return StepTimeModel.of(
        captured, base=2e-3, per_request=1e-5, per_context_token=1e-7, per_token=3e-5, drafting=1e-3, drafting_per_request=2e-5
    )


def test_both_curves_together_are_the_price_of_a_step():
    draft, verify = cost_curves(model(), **BATCH)
    for requests, tokens in (draft[6][0], verify[10][0]), (draft[9][0], verify[15][0]):
        whole = model().seconds(10, tokens, 5000, 0, 7)
        paid = dict(verify)[tokens] + dict(draft)[requests]
        off = 1e3 * 2e-5 * (requests - 10)  # the draft curve is for its own number of requests
        assert paid == pytest.approx(1e3 * whole + off, rel=1e-3)
    for sizes, most in (([n for n, _ in draft], 48), ([t for t, _ in verify], 3000)):
        assert (sizes[0], sizes[-1]) == (1, most)
        assert all(later <= size + max(1, round(0.25 * size)) for size, later in pairwise(sizes))


def test_captured_sizes_are_the_points_and_from_the_next_token_on_there_are_many():
    """vLLM prices what lies between the largest captured size and the first point beyond it like that point."""
    _, verify = cost_curves(model((1, 8, 24)), captured_tokens=(1, 8, 24), **BATCH)
    assert [t for t, _ in verify][:8] == [1, 8, 24, 25, 31, 39, 49, 61]
    assert verify[-1][0] == 3000
    assert [price for _, price in verify] == sorted(price for _, price in verify)


def test_an_empty_batch_is_priced_too():
    draft, verify = cost_curves(model(), **(BATCH | {"num_requests": 0, "context_tokens": 0}))
    assert min(price for _, price in draft + verify) > 0.0


def test_curves_are_news_when_a_price_has_moved():
    curves = cost_curves(model(), **BATCH)
    slower = ([(n, 1.02 * price) for n, price in curves[0]], curves[1])
    slow = ([(n, 1.05 * price) for n, price in curves[0]], curves[1])
    assert are_alike(curves, slower)
    assert not are_alike(curves, slow)
    assert not are_alike(curves, (curves[0], curves[1][:-1]))
