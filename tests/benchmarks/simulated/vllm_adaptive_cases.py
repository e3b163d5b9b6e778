"""Cases of `test_vllm_adaptive.py`: a process of their own, for Triton's interpreter."""

import numpy as np
import pytest
import torch

from benchmarks.simulated.against_scenarios import SCENARIOS
from benchmarks.simulated.engine import simulate
from benchmarks.simulated.traffic import Traffic
from benchmarks.simulated.vllm_adaptive import AdaptiveVerification, Estimator, Manager, OnlineAcceptanceEstimator

K, N = 4, 6


def drawn(rng, informativeness, count):
    part = informativeness * rng.standard_normal((count, K))
    features = 2.0 * (0.5 + part) + 0.5 * rng.standard_normal(part.shape)
    accepted = (rng.random(part.shape) < 1.0 / (1.0 + np.exp(-(0.5 + part)))).cumprod(axis=1).sum(axis=1)
    drafted = rng.integers(0, K + 1, count)
    return features, drafted, np.minimum(accepted, drafted)


def test_grading_once_per_refit_is_grading_every_step():
    rng, estimator = np.random.default_rng(1), Estimator(K)
    theirs = OnlineAcceptanceEstimator(N, K, torch.device("cpu"))
    for _ in range(theirs.REFIT_INTERVAL):
        features, drafted, accepted = drawn(rng, 1.0, N)
        predicted = estimator.predict(features)
        estimator.observe(features, predicted, drafted, accepted)
        theirs.features, theirs.predictions = torch.from_numpy(features).float(), torch.from_numpy(predicted).float()
        theirs.step(torch.arange(N), torch.from_numpy(accepted) + 1, torch.from_numpy(drafted - accepted))
    assert theirs._refits == estimator.vllm._refits == 1
    assert estimator.slope != 0.5
    torch.testing.assert_close(estimator.vllm.slope, theirs.slope, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(estimator.vllm.intercepts, theirs.intercepts, rtol=1e-3, atol=1e-4)


def test_predictions_are_vllms():
    logits = torch.randn(N * K, 9)
    top = logits.softmax(dim=1).amax(dim=1).double()
    estimator, confidences = Estimator(K), torch.zeros(N, K)
    estimator.vllm.features, estimator.vllm.predictions = torch.zeros(N, K), torch.zeros(N, K)
    mapping, depth = torch.arange(N).repeat_interleave(K), torch.arange(K).repeat(N)
    estimator.vllm.predict(logits, mapping, depth, confidences, torch.ones(N))
    ours = estimator.predict((top / (1.0 - top)).log().view(N, K).numpy())
    np.testing.assert_allclose(ours, confidences.numpy(), rtol=1e-3)


def test_its_slope_grows_with_what_features_tell():
    slopes = []
    for informativeness in (0.0, 1.0, 2.0):
        rng, estimator = np.random.default_rng(2), Estimator(K)
        for _ in range(4 * estimator.vllm.REFIT_INTERVAL):
            features, drafted, accepted = drawn(rng, informativeness, 16)
            estimator.observe(features, estimator.predict(features), drafted, accepted)
        slopes.append(estimator.slope)
    assert slopes[0] == pytest.approx(0.0, abs=0.05)
    assert slopes[0] + 0.2 < slopes[1] < slopes[2] - 0.03


def test_budgets_come_from_the_drafts_before():
    manager = Manager(K, N, 512)
    manager.set_cost_curves([(1, 1.0), (N, 1.0)], [(1, 1.0), (4, 1.2), (8, 1.5), (16, 2.0), (512, 60.0)])
    slots = np.arange(N)
    manager.req_states.req_id_to_index.update({str(i): i for i in range(N)})
    tokens, drafts = {str(i): 1 + K for i in range(N)}, {str(i): [0] * K for i in range(N)}

    def budget(confidence):
        manager.record(np.full((N, K), confidence), slots)
        manager.get_num_tokens(tokens, drafts)
        return manager._batch_budget[2]

    first = budget(0.01)
    assert budget(0.99) == 2 < first  # newcomers count as certain; then what a padded batch of 8 takes for nothing
    assert budget(0.99) == first


def test_the_rule_cuts_what_it_sees_and_keeps_to_its_budget():
    traffic = Traffic(next(one.trace for one in SCENARIOS if one.trace.name == "holds-16"))
    trace = traffic.trace
    object.__setattr__(trace, "num_tokens", 4000)
    outcome = simulate(traffic, AdaptiveVerification(traffic))
    assert (outcome.block == trace.num_spec_tokens).sum() >= len(outcome.block) - 1
    assert (outcome.num_draft_tokens <= trace.num_spec_tokens * outcome.num_requests).all()
    assert outcome.num_draft_tokens.sum() > 0
