import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.adapt.steps.step_time import PARAMETERS
from honed.adapt.trees.candidate_log import CandidateRequest
from honed.adapt.trees.costs import TREE_COSTS, parse_cost
from honed.adapt.trees.draft_tree import build_tree
from honed.adapt.trees.policies import Round, parse_tree_policy, text_path
from honed.adapt.trees.replay import predict, speed_ratio

P = len(PARAMETERS)

GPU, CPU = TREE_COSTS["gpu"], TREE_COSTS["cpu"]
POLICIES = ("none", "chain:2", "tree:4", "tree:16", "calibrated:8", "caddtree", "shared", "honed")


def make_requests(seed=0, count=4, tokens=20, depths=4, width=3, over=0.0, every=1, workload="chat"):
    """Texts that take candidate r with the probability that the drafter says, less `over` of its log-odds."""
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(count):
        starts = np.arange(0, tokens, every)
        text = rng.integers(100, 200, tokens)
        candidates = rng.integers(200, 300, (len(starts), depths, 1)) + 1000 * np.arange(width)
        said = np.sort(rng.dirichlet(np.full(width + 1, 0.4), (len(starts), depths)) + 1e-9, axis=2)[:, :, ::-1][:, :, :width]
        true = 1.0 / (1.0 + (1.0 / np.minimum(said, 1 - 1e-9) - 1.0) * np.exp(over))
        rank = (rng.random((len(starts), depths, 1)) > np.cumsum(true, axis=2)).sum(axis=2)
        for row, start in enumerate(starts.tolist()):  # each position's depths agree with the text as drawn
            for depth in range(min(depths, tokens - start)):
                if rank[row, depth] < width:
                    candidates[row, depth, rank[row, depth]] = text[start + depth]
        log_probs = np.minimum(np.log(said), 0.0)
        requests.append(CandidateRequest(f"{number:x}", workload, 0.8, text, starts, candidates, log_probs, 10))
    return requests


def accepted_by_hand(request, row, num_nodes):
    """The longest stretch of the text that the tree of so many nodes holds, by comparing tokens."""
    tree = build_tree(request.log_probs[row], num_nodes)
    start, best = int(request.starts[row]), 0
    for path in tree.ancestors():
        drafted = [int(request.candidates[row, depth, tree.rank[node]]) for depth, node in enumerate(path)]
        if drafted == request.tokens[start : start + len(path)].tolist():
            best = max(best, len(path))
    return best


@given(st.integers(0, 2**32 - 1), st.integers(1, 20))
def test_the_walk_accepts_what_text_and_tree_have_in_common(seed, num_nodes):
    request = make_requests(seed, count=1)[0]
    policy = parse_tree_policy(f"tree:{num_nodes}", 4, GPU)
    plans = policy.plan([Round(request, row, 0) for row in range(len(request.starts))], GPU)
    for row, plan in enumerate(plans):
        assert plan.num_accepted_tokens == accepted_by_hand(request, row, num_nodes)


@given(st.integers(0, 2**32 - 1))
def test_a_chain_is_the_tree_of_first_candidates(seed):
    request = make_requests(seed, count=1)[0]
    chain = parse_tree_policy("chain:4", 4, GPU).plan([Round(request, 0, 0)], GPU)[0]
    tree = build_tree(request.log_probs[0], 4, is_chain_first=True)
    assert chain.path == [node for node in text_path(tree, request.taken[0]) if node < 4]
    assert np.allclose(chain.gains, np.exp(tree.score))


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from(POLICIES), st.integers(1, 9), st.sampled_from([GPU, CPU]))
def test_every_policy_emits_the_whole_text(seed, policy, batch, model):
    requests = make_requests(seed, count=5)
    told = predict(requests, policy, model, batch)
    assert told.sums[:, 0].tolist() == [20.0] * 5
    assert (told.sums[:, 1] > 0.0).all()
    assert told.exact_rounds == 1.0
    assert told.tokens_per_s.low <= told.tokens_per_s.value <= told.tokens_per_s.high
    assert told.acceptance_length.value == pytest.approx(100.0 / told.sums[:, 2].sum())


def test_without_drafts_the_rate_is_the_models():
    requests = make_requests(count=6, tokens=1)
    for batch in (1, 3):
        told = predict(requests, "none", GPU, batch)
        assert told.tokens_per_s.value * GPU.seconds(batch, batch, 10 * batch, 0, 0) == pytest.approx(1.0 * batch)


def test_positions_that_were_not_logged_show():
    told = predict(make_requests(every=3), "tree:4", GPU)
    assert 0.0 < told.exact_rounds < 1.0


def test_calibration_is_learned_where_the_drafter_is_too_sure():
    told = predict(make_requests(count=60, tokens=60, over=1.5), "calibrated:8", GPU)
    assert told.calibration_error < 0.4 * told.calibration_error_before
    assert predict(make_requests(), "chain:2", GPU).calibration_error is None


def test_a_policy_compared_with_itself_is_as_fast():
    told = predict(make_requests(count=5), "tree:4", GPU)
    ratio = speed_ratio(told, told)
    assert (ratio.value, ratio.low, ratio.high) == (1.0, 1.0, 1.0)


def test_of_few_requests_there_is_no_interval():
    told = predict(make_requests(count=4), "tree:4", GPU)
    for figure in (told.tokens_per_s, told.acceptance_length, speed_ratio(told, told)):
        assert figure.value > 0.0
        assert (figure.low, figure.high) == (None, None)


def test_where_a_token_costs_much_and_drafts_are_bad_the_drafter_is_skipped():
    requests = make_requests(count=40, tokens=40, over=4.0)
    ours, none = predict(requests, "honed", CPU, 4), predict(requests, "none", CPU, 4)
    assert ours.tokens_per_s.value > 0.85 * none.tokens_per_s.value
    assert predict(requests, "tree:8", CPU, 4).tokens_per_s.value < 0.5 * none.tokens_per_s.value


def test_one_request_many_and_none():
    assert predict(make_requests(count=1), "honed", GPU, 1).num_requests == 1
    many = predict(make_requests(count=3, tokens=3), "honed", GPU, 1024)
    assert many.sums[:, 0].tolist() == [3.0] * 3
    with pytest.raises(ValueError, match="at least one request"):
        predict([], "honed", GPU)


@pytest.mark.parametrize("name", ["", "best", "chain", "chain:0", "chain:5", "tree:0", "tree:x", "honed:3", "none:1"])
def test_an_unknown_policy_is_answered_with_those_there_are(name):
    with pytest.raises(ValueError, match=r"chain:1 … chain:4"):
        parse_tree_policy(name, 4, GPU)


def test_costs_by_name_or_by_figures():
    assert parse_cost("cpu") is CPU
    assert parse_cost(",".join(["1e-3", "0", "2e-5", *["0"] * (P - 3)])).parameters[2] == 2e-5
    for text in ("tpu", "1,2,3", ",".join(["nan", *["0"] * (P - 1)]), ",".join(["0"] * P), ",".join(["-1"] * P)):
        with pytest.raises(ValueError, match=f"{P} figures"):
            parse_cost(text)
