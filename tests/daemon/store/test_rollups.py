from __future__ import annotations

import msgspec
import numpy as np
import pysqlite3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.protocol import wire
from honed.daemon.store.rollups import (
    POSITION_SUMS,
    SUMS,
    Counts,
    MalformedBatchError,
    add_json,
    add_positions,
    count_batch,
)
from tests.daemon.fake_engine import make_batch

NOW_NS = 1_800_000_000 * 10**9

rounds = st.lists(st.integers(0, 6).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), min_size=1, max_size=40)


@given(rounds)
def test_counts_agree_with_counting_one_by_one(pairs: list[tuple[int, int]]) -> None:
    drafted, accepted = [k for k, _ in pairs], [a for _, a in pairs]
    total = count_batch(make_batch(1, rounds=len(pairs), drafted=drafted, accepted=accepted), NOW_NS).total
    drafts = [(k, a) for k, a in pairs if k]
    assert total.rounds == len(drafts)
    assert total.plain_rounds == len(pairs) - len(drafts)
    assert total.draft_tokens == sum(drafted) == total.drafted.sum()
    assert total.accepted_tokens == sum(accepted) == total.accepted.sum()
    assert total.emitted_tokens == total.delivered_tokens == sum(a + 1 for a in accepted)
    width = len(total.drafted)
    assert total.drafted.tolist() == [sum(k > j for k, _ in drafts) for j in range(width)]
    assert total.tried.tolist() == [sum(k > j and a >= j for k, a in drafts) for j in range(width)]
    assert total.accepted.tolist() == [sum(a > j for _, a in drafts) for j in range(width)]
    histogram = total.accepted_histogram().tolist()
    assert histogram == [sum(a == n for _, a in drafts) for n in range(len(histogram))]


@pytest.mark.fault("tokens past a request's end that counted as gain")
def test_gain_is_what_was_delivered_and_acceptance_is_vllms() -> None:
    batch = make_batch(1, rounds=3, drafted=[3, 3, 0], accepted=[3, 1, 0])
    batch.rounds.num_delivered[:] = [1, 2, 1]
    total = count_batch(batch, NOW_NS).total
    assert (total.accepted_tokens, total.emitted_tokens, total.delivered_tokens) == (4, 7, 4)
    assert (total.acceptance_length, total.tokens_per_round) == (3.0, 1.5)
    assert total.accepted.tolist() == [2, 1, 1]
    for wrong in ([5, 2, 1], [1, 2, -1], [1, 2]):
        batch.rounds.num_delivered[:] = wrong
        with pytest.raises(MalformedBatchError):
            count_batch(batch, NOW_NS)


def test_struck_out_drafts_are_not_drafted_but_their_round_is_a_draft() -> None:
    batch = make_batch(1, rounds=2, drafted=[3, 3], accepted=[0, 1])
    batch.rounds.num_invalid_tokens[:] = [3, 1]
    total = count_batch(batch, NOW_NS).total
    assert (total.rounds, total.draft_tokens, total.accepted_tokens) == (2, 2, 1)
    assert total.tried.tolist()[:2] == [1, 1]


def test_struck_drafts_were_tried_though_vllm_does_not_count_them() -> None:
    batch = make_batch(1, rounds=3, drafted=[3, 2, 0], accepted=[1, 2, 0])
    batch.rounds.num_invalid_tokens[:] = [2, 0, 0]
    batch.rounds.num_struck_tokens[:] = [2, 1, 3]
    total = count_batch(batch, NOW_NS).total
    assert (total.rounds, total.draft_tokens, total.accepted_tokens) == (2, 3, 3)
    assert total.tried.tolist() == [3, 2, 1]
    assert total.accepted.tolist() == [2, 1, 0]


def test_trimmed_drafts_are_drafted_as_vllm_counts_but_were_never_tried() -> None:
    batch = make_batch(1, rounds=3, drafted=[4, 4, 4], accepted=[1, 0, 2])
    batch.rounds.num_trimmed_tokens[:] = [3, 4, 1]
    total = count_batch(batch, NOW_NS).total
    assert (total.rounds, total.draft_tokens, total.accepted_tokens) == (3, 12, 3)
    assert total.tried.tolist() == [2, 1, 1, 0]
    assert total.accepted.tolist() == [2, 1, 0, 0]


def test_workloads_and_seconds_are_kept_apart() -> None:
    batch = _two_steps(5 * 10**9)
    cells = count_batch(batch, NOW_NS).cells
    assert {key: counts.rounds for key, counts in cells.items()} == {(3, "a"): 1, (3, "b"): 1, (5, "a"): 2}


def _two_steps(sent_ns: int) -> wire.EventBatch:
    return wire.EventBatch(
        engine_id="e",
        boot_id="b",
        seq=1,
        sent_unix_ns=sent_ns,
        sent_mono_ns=10 * 10**9,
        drafter_version="",
        workloads=["a", "b"],
        steps=wire.StepColumns(step=[9, 7], end_ns=[10 * 10**9, 8 * 10**9]),
        rounds=wire.RoundColumns(
            step=[7, 7, 9, 9], workload=[0, 1, 0, 0], num_draft_tokens=[1] * 4, num_accepted_tokens=[1] * 4
        ),
    )


def test_no_round_is_placed_in_the_future() -> None:
    cells = count_batch(make_batch(1, unix_ns=NOW_NS + 3600 * 10**9), NOW_NS).cells
    assert max(second for second, _ in cells) <= NOW_NS // 10**9


def test_too_many_workloads_share_one_name() -> None:
    batch = _two_steps(NOW_NS)
    cells = count_batch(batch, NOW_NS, lambda name: "other").cells
    assert {workload for _, workload in cells} == {"other"}
    assert sum(counts.rounds for counts in cells.values()) == 4


@pytest.mark.parametrize(
    "columns",
    [
        {"num_accepted_tokens": [4]},
        {"num_accepted_tokens": [1, 1]},
        {"num_accepted_tokens": [-1]},
        {"num_draft_tokens": [-1]},
        {"num_draft_tokens": [10**9]},
        {"num_draft_tokens": [2**70]},
        {"workload": [1]},
        {"workload": [-1]},
        {"workload": []},
        {"step": []},
        {"num_emitted": [-5]},
        {"num_invalid_tokens": [4]},
        {"num_invalid_tokens": [-1]},
        {"num_trimmed_tokens": [3]},
        {"num_trimmed_tokens": [-1]},
        {"num_trimmed_tokens": [1, 1]},
        {"num_struck_tokens": [-1]},
        {"num_struck_tokens": [10**9]},
        {"num_struck_tokens": [1, 1]},
    ],
)
def test_columns_that_contradict_each_other_are_malformed(columns: dict[str, list[int]]) -> None:
    good = {"step": [1], "workload": [0], "num_draft_tokens": [3], "num_accepted_tokens": [1]}
    batch = make_batch(1, rounds=1)
    broken = wire.EventBatch(
        **{name: getattr(batch, name) for name in batch.__struct_fields__ if name != "rounds"},
        rounds=wire.RoundColumns(**(good | columns)),
    )
    with pytest.raises(MalformedBatchError):
        count_batch(broken, NOW_NS)


def test_sums_survive_the_database_row() -> None:
    counts = count_batch(make_batch(1), NOW_NS).total
    again = Counts.from_row(counts.row())
    again.add(counts)
    assert again.rounds == 2 * counts.rounds
    assert again.tried.tolist() == (2 * counts.tried).tolist()


@given(st.lists(st.integers(0, 9), max_size=5), st.lists(st.integers(0, 9), max_size=5))
def test_adding_positions_is_commutative_and_keeps_the_sum(a: list[int], b: list[int]) -> None:
    x, y = np.array(a, dtype=np.int64), np.array(b, dtype=np.int64)
    assert add_positions(x, y).tolist() == add_positions(y, x).tolist()
    assert add_positions(x, y).sum() == x.sum() + y.sum()
    assert add_json(None, "[1,2]") == "[1,2]"


@pytest.mark.fault("a tree's nodes counted as the drafter's positions")
def test_trees_are_counted_beside_the_rest() -> None:
    """By position it is the drafter's own chain: else a smaller tree would look like a drafter that has got worse."""
    batch = make_batch(1, drafted=[7, 3], accepted=[4, 1], rounds=2)
    rounds = msgspec.structs.replace(batch.rounds, chain_tokens=[3, 0], chain_accepted=[1, 0], nodes=[0, 2, 4, 5])
    total = count_batch(msgspec.structs.replace(batch, rounds=rounds), 10**18).total
    assert (total.draft_tokens, total.accepted_tokens) == (10, 5)
    assert (total.tree_rounds, total.tree_nodes, total.tree_accepted_tokens, total.chain_accepted_tokens) == (1, 7, 4, 1)
    assert total.tree_share == 0.5
    assert total.drafted.tolist() == [2, 2, 2]
    assert total.tried.tolist() == [2, 2, 0]
    assert total.accepted.tolist() == [2, 0, 0]
    assert total.accepted_histogram().tolist() == [0, 1, 0, 0, 1, 0, 0, 0], "the tree's four tokens as one round's"
    assert Counts.from_row(total.row()).row() == total.row()
    with pytest.raises(MalformedBatchError, match="nodes"):
        count_batch(msgspec.structs.replace(batch, rounds=msgspec.structs.replace(rounds, nodes=[0, 2, 4])), 10**18)


@given(st.lists(rounds, max_size=6))
def test_a_query_sums_as_adding_one_by_one_does(batches: list[list[tuple[int, int]]]) -> None:
    """Rows of different numbers of positions among them; a Python loop over a year's rows took 13 seconds."""
    database, total = pysqlite3.connect(":memory:"), Counts()
    database.row_factory = pysqlite3.Row
    database.execute(f"CREATE TABLE rollups ({', '.join(Counts().row())})")
    for pairs in batches:
        drafted, accepted = [k for k, _ in pairs], [a for _, a in pairs]
        counts = count_batch(make_batch(1, rounds=len(pairs), drafted=drafted, accepted=accepted), NOW_NS).total
        row = counts.row()
        database.execute(f"INSERT INTO rollups VALUES ({', '.join(f':{name}' for name in row)})", row)
        total.add(counts)
    found = database.execute(f"SELECT {SUMS}, {POSITION_SUMS} FROM rollups").fetchone()
    assert Counts.from_sums(dict(found)).row() == total.row()
    database.close()
