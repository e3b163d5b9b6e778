from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulated.dictated import Dictated
from benchmarks.simulated.engine import simulate
from benchmarks.simulated.features import DraftFeatures, Feature
from benchmarks.simulated.oracle import run_oracle
from benchmarks.simulated.traffic import Cost, Load, Trace, Traffic, Workload, linear

K = 5
COST = Cost(5e-3, linear(4e-4), 1e-5, 1e-8, 1e-6, 0.6e-3)


def make_trace(feature, num_tokens=3000, requests=4, **changes):
    workload = Workload("chat", (0.8, 0.7, 0.6, 0.5), output_tokens=(10, 60), prompt_tokens=(5, 50), feature=feature)
    load = Load(concurrency=((0.0, requests),))
    trace = Trace("featured", 7, K, 8, num_tokens, (workload,), load, ((0.0, COST),), is_block_shortened=False)
    return replace(trace, **changes)


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0, 2.5])
def test_marginal_acceptance_is_what_the_trace_says(sigma):
    features = DraftFeatures([Feature(sigma)], 3, 400_000)
    at = np.arange(400_000).reshape(80_000, K)
    log_odds = np.broadcast_to(np.array([-3.0, -1.0, 0.0, 1.5, 4.0]), at.shape)
    workload = np.zeros(len(at), dtype=np.int64)
    drafts = features.drafts(at, workload, features.centre(log_odds, workload), log_odds, log_odds)
    assert drafts.acceptance.mean(axis=0) == pytest.approx(1.0 / (1.0 + np.exp(-log_odds[0])), abs=0.006)
    survival = np.cumprod(drafts.acceptance, axis=1).mean(axis=0)
    assert survival == pytest.approx(np.cumprod(1.0 / (1.0 + np.exp(-log_odds[0]))), abs=0.006)


def test_features_change_nothing_that_was_drawn_without_them():
    plain, featured = Traffic(make_trace(None)), Traffic(make_trace(Feature()))
    assert plain.draft_features is None
    for name in ("luck", "log_odds", "output_tokens", "prompt_tokens", "workload", "hashes"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(featured, name))
    flat = Traffic(make_trace(Feature(informativeness=0.0)))
    assert run_oracle(plain).tokens.tolist() == run_oracle(flat).tokens.tolist()


def test_fixed_lengths_emit_as_much_with_features_as_without():
    def tokens_per_round(feature):
        outcome = simulate(Traffic(make_trace(feature, 60_000, 8)), Dictated(K, K))
        return outcome.tokens.sum() / outcome.num_requests.sum()

    assert tokens_per_round(Feature(1.5)) == pytest.approx(tokens_per_round(None), rel=0.02)
