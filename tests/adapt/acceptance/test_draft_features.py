import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.acceptance.draft_features import FeatureRegression
from honed.adapt.lengths.decider import Decider
from honed.adapt.protocol.wire import Policy, RoundColumns, WorkloadPrior
from honed.adapt.steps.step_time import StepTimeModel

K = 7
CURVE = np.full(K, 0.7)
STEP_SECONDS = list(StepTimeModel.of(base=5e-3, per_token=3e-4, drafting=5e-4, per_block_token=1e-4).parameters)


def make_policy(weight=1.0, mean=0.5):
    prior = WorkloadPrior(workload="", acceptance=[0.7] * K, feature_mean=mean, feature_weight=weight)
    return Policy(
        generation=1,
        ttl_s=10.0,
        kind="goodput",
        static_k=4,
        max_k=K,
        step_seconds=STEP_SECONDS,
        priors=[prior],
        explore_share=0.0,
        hysteresis=0.0,
    )


def make_decider(size, **figures):
    decider = Decider(K, size)
    decider.set_policy(make_policy(**figures), 0.0)
    return decider


def rounds(num_requests, informativeness, seed=0, num_rounds=12):
    """Requests that differ (standard deviation 1 of the log-odds), and features that tell so with noise, or don't."""
    rng = np.random.default_rng(seed)
    own = rng.standard_normal(num_requests)
    request = np.tile(np.arange(1, num_requests + 1, dtype=np.uint64), num_rounds) + np.uint64(1000 * seed)
    level = np.tile(own, num_rounds)
    a = 1.0 / (1.0 + np.exp(-(0.85 + level)))
    accepted = (rng.random((len(level), K)) < a[:, None]).cumprod(axis=1).sum(axis=1)
    features = 3.0 + informativeness * level + 0.5 * rng.standard_normal(len(level))
    return request, features, np.minimum(accepted + 1, K), accepted


def test_a_weight_is_learned_where_features_tell_something_and_stays_0_where_they_do_not():
    weights = []
    for informativeness in (0.0, 0.5, 2.0):
        regression = FeatureRegression(4000.0)
        for seed in range(8):
            regression.observe(*rounds(200, informativeness, seed), CURVE, 3.0)
        weights.append(regression.weight * max(informativeness, 1e-9))
        assert regression.mean == pytest.approx(3.0, abs=0.3)
    assert weights[0] < 1e-9
    assert 0.3 < weights[1] <= 1.5
    assert 0.6 < weights[2] <= 1.5


def test_only_earlier_rounds_of_the_same_request_count():
    request = np.array([5, 9, 5, 5, 9], dtype=np.uint64)
    features = np.array([1.0, 10.0, 2.0, 4.0, 20.0])
    once, twice = FeatureRegression(4000.0), FeatureRegression(4000.0)
    assert once._earlier(request, features).tolist() == [[0, 0], [0, 0], [1, 1], [3, 2], [10, 1]]
    split = [twice._earlier(request[part], features[part]) for part in (slice(0, 2), slice(2, 5))]
    assert np.concatenate(split).tolist() == [[0, 0], [0, 0], [1, 1], [3, 2], [10, 1]]


def test_rounds_of_unknown_features_teach_nothing():
    one, other = FeatureRegression(4000.0), FeatureRegression(4000.0)
    request, features, reached, accepted = rounds(50, 1.0)
    hidden = np.arange(len(request)) % 3 == 0
    broken = np.where(hidden, np.where(np.arange(len(request)) % 2, np.nan, np.inf), features)
    one.observe(request, broken, reached, accepted, CURVE)
    other.observe(request[~hidden], features[~hidden], reached[~hidden], accepted[~hidden], CURVE)
    assert (one.mean, one.weight, one._weight) == (other.mean, other.weight, other._weight)
    one.observe(request[:2], np.array([np.nan, -np.inf]), reached[:2], accepted[:2], CURVE)
    assert one._weight == other._weight


@given(
    st.integers(1, 100),
    st.lists(st.floats(), max_size=120),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(allow_nan=True, allow_infinity=True),
)
def test_any_features_and_any_weights_give_usable_lengths(count, features, weight, mean):
    decider = make_decider(count, weight=weight, mean=mean)
    ids = [str(i) for i in range(count)]
    decider.observe(ids, [3] * count, [1] * count, features)
    lengths = decider.decide(ids, 100, 0, 0.0).num_draft_tokens
    assert len(lengths) == count
    assert all(0 <= k <= K for k in lengths)


@given(st.integers(1, 100), st.lists(st.floats(-50, 50), min_size=100, max_size=100))
def test_without_a_weight_features_change_nothing(count, features):
    blind, told = make_decider(count), make_decider(count, weight=0.0)
    ids = [str(i) for i in range(count)]
    accepted = [i % 4 for i in range(count)]
    blind.set_policy(make_policy(weight=0.0), 0.0)
    blind.observe(ids, [3] * count, accepted)
    told.observe(ids, [3] * count, accepted, features[:count])
    assert blind.decide(ids, 100, 0, 0.0) == told.decide(ids, 100, 0, 0.0)


@pytest.mark.parametrize("count", [2, 90])
def test_requests_whose_drafts_show_more_get_more(count):
    decider = make_decider(count)
    ids = [str(i) for i in range(count)]
    for request_id in ids:
        decider.start(request_id)
    features = [4.0 if i % 2 else -3.0 for i in range(count)]
    decider.observe(ids, [0] * count, [0] * count, features)
    lengths = decider.decide(ids, 100, 0, 0.0).num_draft_tokens
    assert min(lengths[1::2]) > max(lengths[0::2])
    decider.finish("1")
    decider.start("1")  # the slot is taken over, what was shown isn't
    assert decider.decide(ids, 100, 0, 0.0).num_draft_tokens[1] < lengths[1]


def test_features_survive_the_wire_and_old_peers_send_none():
    columns = RoundColumns(step=[1, 1], feature=[1.5, math.nan])
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(columns), type=RoundColumns)
    assert back.feature[0] == 1.5
    assert math.isnan(back.feature[1])
    assert RoundColumns(step=[1]).feature == []
