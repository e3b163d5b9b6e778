import msgspec
import pytest

from honed.adapt.acceptance.estimate import reached_and_accepted
from honed.adapt.acceptance.rounds import rounds_by_workload
from tests.adapt.simulate import make_batch


def test_rounds_come_apart_by_workload_without_those_that_verified_nothing():
    batch = make_batch([3, 0, 2, 4], [1, 0, 2, 0], requests=[1, 2, 3, 2**64 - 1])
    rounds = msgspec.structs.replace(batch.rounds, workload=[0, 0, 1, 1], num_invalid_tokens=[0, 0, 0, 4])
    found = dict(rounds_by_workload(msgspec.structs.replace(batch, workloads=["a", "b", "idle"], rounds=rounds)))
    assert list(found) == ["a", "b"]
    assert found["a"].num_draft_tokens.tolist() == [3]
    assert found["b"].num_accepted_tokens.tolist() == [2]  # the last round's drafts were all struck out
    assert found["b"].request.tolist() == [3]


def test_drafts_that_vllm_trimmed_were_never_verified():
    batch = make_batch([3, 3, 2], [1, 0, 2], requests=[1, 2, 3])
    rounds = msgspec.structs.replace(batch.rounds, num_invalid_tokens=[1, 1, 0], num_trimmed_tokens=[0, 2, 0])
    ((_, found),) = rounds_by_workload(msgspec.structs.replace(batch, rounds=rounds))
    assert found.num_draft_tokens.tolist() == [3, 2]
    assert found.num_invalid_tokens.tolist() == [1, 0]
    with pytest.raises(ValueError, match="num_trimmed_tokens has 1 entries"):
        list(rounds_by_workload(msgspec.structs.replace(batch, rounds=msgspec.structs.replace(rounds, num_trimmed_tokens=[1]))))


@pytest.mark.fault("drafts struck by a grammar that counted as never tried")
def test_drafts_that_a_grammar_struck_were_tried_and_refused():
    batch = make_batch([3, 2, 0, 4, 0], [1, 2, 0, 1, 0], requests=[1, 2, 3, 4, 5])
    rounds = msgspec.structs.replace(
        batch.rounds,
        num_invalid_tokens=[2, 0, 0, 2, 0],  # the first was scheduled before the grammar saw it, as was the fourth
        num_struck_tokens=[2, 1, 3, 1, 0],  # one token of the fourth was padding
    )
    ((_, found),) = rounds_by_workload(msgspec.structs.replace(batch, rounds=rounds))
    columns = found.num_draft_tokens, found.num_accepted_tokens, 4, found.num_invalid_tokens
    reached, accepted = reached_and_accepted(*columns)
    assert (reached.tolist(), accepted.tolist()) == ([2, 3, 1, 2], [1, 2, 0, 1])
    with pytest.raises(ValueError, match="num_struck_tokens has 1 entries"):
        list(rounds_by_workload(msgspec.structs.replace(batch, rounds=msgspec.structs.replace(rounds, num_struck_tokens=[1]))))


@pytest.mark.fault("tokens past a request's end that counted as gain")
def test_what_follows_a_requests_end_teaches_nothing():
    batch = make_batch([3, 3, 3], [3, 2, 1], requests=[1, 2, 3])
    rounds = msgspec.structs.replace(batch.rounds, num_delivered=[1, 3, 2], num_invalid_tokens=[0, 1, 0])
    ((_, found),) = rounds_by_workload(msgspec.structs.replace(batch, rounds=rounds))
    assert found.num_draft_tokens.tolist() == [1, 3, 3]  # the first ended with its first draft, which was accepted
    assert found.num_accepted_tokens.tolist() == [1, 2, 1]
    assert found.num_invalid_tokens.tolist() == [0, 1, 0]


def tree_batch(**changes):
    batch = make_batch([7, 3, 5, 0], [2, 1, 3, 0], requests=[1, 2, 3, 4])
    columns = {"chain_tokens": [4, 0, 2, 0], "chain_accepted": [1, 0, 2, 0], "nodes": [0, 5, 0, 1, 3]} | changes
    return msgspec.structs.replace(batch, rounds=msgspec.structs.replace(batch.rounds, **columns))


def test_a_tree_counts_as_the_chain_in_it():
    ((_, found),) = rounds_by_workload(tree_batch())
    assert found.num_draft_tokens.tolist() == [4, 3, 2]
    assert found.num_accepted_tokens.tolist() == [1, 1, 2]
    assert found.trees.num_nodes.tolist() == [7, 5]
    assert found.trees.nodes.tolist() == [[0, 5, -1], [0, 1, 3]]


def test_a_tree_in_whose_round_the_request_ended_tells_of_all_its_nodes():
    ((_, found),) = rounds_by_workload(tree_batch(num_delivered=[1, 2, 4, 1]))
    assert found.trees.nodes.tolist() == [[0, 5, -1], [0, 1, 3]]
    assert found.trees.is_whole.tolist() == [False, True]
    assert found.num_draft_tokens.tolist() == [1, 3, 2]  # the first request ended with the chain's first token
    assert found.num_accepted_tokens.tolist() == [1, 1, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": [0, 5, 0, 1]},
        {"nodes": [0, 7, 0, 1, 3]},
        {"nodes": [5, 0, 0, 1, 3]},
        {"chain_tokens": [8, 0, 2, 0]},
        {"chain_accepted": [3, 0, 2, 0]},
        {"chain_tokens": [4, 0, 2]},
        {"chain_tokens": []},
    ],
)
def test_trees_that_do_not_fit_are_refused(changes):
    with pytest.raises(ValueError, match=r"chain_tokens|nodes"):
        list(rounds_by_workload(tree_batch(**changes)))
