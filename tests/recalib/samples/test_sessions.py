"""Records become contiguous stretches; what doesn't fit together never does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.protocol.sample_ring import FLAG_GAP, FLAG_PREFILL, FLAG_REJECTED, KIND_END, KIND_ROWS
from honed.recalib.samples.ring_reader import RingRecord
from honed.recalib.samples.sessions import SessionAssembler

F = 2


def record(first, ids, flags=0, request="r", version="v", kind=KIND_ROWS, likely=None):
    ids = np.array(ids, np.int32)
    likely = np.full(len(ids), -1, np.int32) if likely is None else np.array(likely, np.int32)
    rows = np.stack([ids * 1.0, np.arange(first, first + len(ids))], axis=1) if len(ids) else np.zeros((0, F))
    return RingRecord(kind, flags, request, "s-" + request, "w", version, first, ids, likely, rows.astype(np.float32))


def end(request="r"):
    return record(0, [], request=request, kind=KIND_END)


def assemble(*records, **settings):
    assembler = SessionAssembler(**settings)
    found = [stretch for r in records for stretch in assembler.add(r)]
    return assembler, found


def check(stretch):
    """Every row's features belong to its token and its position."""
    np.testing.assert_array_equal(stretch.features[:, 0], stretch.token_ids)
    np.testing.assert_array_equal(
        stretch.features[:, 1], np.arange(stretch.first_position, stretch.first_position + stretch.num_rows)
    )


def test_prompt_and_rounds_become_one_stretch():
    _, (stretch,) = assemble(record(0, [5, 6, 7], FLAG_PREFILL), record(3, [8, 9]), record(5, [4]), end())
    assert stretch.token_ids.tolist() == [5, 6, 7, 8, 9, 4]
    assert (stretch.first_position, stretch.num_prompt_tokens, stretch.breaks) == (0, 3, ())
    assert (stretch.session, stretch.workload) == ("s-r", "w")
    check(stretch)


def test_a_stretch_tells_the_target_s_most_likely_tokens_where_it_sampled():
    prompt, answer = record(0, [5, 6, 7], FLAG_PREFILL, likely=[-1, -1, 8]), record(3, [9, 4], likely=[4, 2])
    repeated = record(2, [7, 9, 4, 1], FLAG_PREFILL)  # a preempted request is prefilled again
    _, (stretch,) = assemble(prompt, answer, repeated, record(3, [9, 3], likely=[6, 5]), end())
    assert stretch.token_ids.tolist() == [5, 6, 7, 9, 3]
    assert stretch.likely.tolist() == [-1, -1, 8, 6, 5]
    assert stretch.cut(slice(1, 4)).likely.tolist() == [-1, 8, 6]
    assert stretch.to_training_sample(True).likely.tolist() == [-1, -1, 8, 6, 5]
    assert stretch.num_bytes == 5 * (4 + 4 + 4 * F)
    _, (greedy,) = assemble(record(0, [5, 6, 7], FLAG_PREFILL), record(3, [8, 9]), end())
    assert greedy.likely is greedy.cut(slice(1, 4)).likely is greedy.to_training_sample(True).likely is None


def test_prompt_in_chunks_is_one_prompt():
    _, (stretch,) = assemble(record(0, [1, 2], FLAG_PREFILL), record(2, [3], FLAG_PREFILL), record(3, [4]), end())
    assert stretch.num_prompt_tokens == 3


def test_breaks_are_the_anchors_after_rounds_that_were_not_wholly_accepted():
    """Whatever their length: a step that drafted nothing is no break, nor is a short block that was accepted whole."""
    _, (stretch,) = assemble(
        record(0, [1], FLAG_PREFILL),
        record(1, [2], FLAG_REJECTED),
        record(2, [3, 4, 5, 6]),
        record(6, [7]),
        record(7, [8, 9], FLAG_REJECTED),
        record(9, [1], FLAG_REJECTED),
        record(10, [2]),
        end(),
    )
    assert stretch.breaks == (2, 9, 10)


def test_what_follows_in_another_stretch_or_instead_of_what_was_held_is_no_break():
    _, stretches = assemble(record(0, [1], FLAG_REJECTED), record(5, [2], FLAG_GAP), record(6, [3]), end())
    assert [stretch.breaks for stretch in stretches] == [(), ()]
    _, (stretch,) = assemble(record(0, [1]), record(1, [2], FLAG_REJECTED), record(1, [3]), record(2, [4]), end())
    assert stretch.breaks == ()
    _, (stretch,) = assemble(record(0, [1]), record(1, [2], FLAG_REJECTED), record(0, [1, 2, 3]), record(3, [4]), end())
    assert stretch.breaks == ()


def test_gap_begins_another_stretch():
    _, stretches = assemble(record(0, [1, 2]), record(9, [3, 4], FLAG_GAP), record(20, [5]), end())
    assert [(s.first_position, s.num_rows) for s in stretches] == [(0, 2), (9, 2), (20, 1)]


def test_preempted_request_that_is_prefilled_again_goes_on():
    """The engine recomputes everything and says that it began anew; what is held is the same and stays."""
    _, (stretch,) = assemble(
        record(0, [1, 2], FLAG_PREFILL),
        record(2, [3], FLAG_REJECTED),
        record(3, [4, 5]),
        record(0, [1, 2, 3, 4, 5, 6], FLAG_PREFILL | FLAG_GAP),
        record(6, [7]),
        end(),
    )
    assert stretch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert (stretch.num_prompt_tokens, stretch.breaks) == (2, (3,))
    check(stretch)


def test_wholly_repeated_record_changes_nothing():
    _, (stretch,) = assemble(record(0, [1, 2, 3]), record(1, [2]), record(3, [4]), end())
    assert stretch.token_ids.tolist() == [1, 2, 3, 4]


def test_later_tokens_at_the_same_positions_are_right():
    _, (stretch,) = assemble(record(0, [1, 2, 3, 4]), record(2, [9, 8]), end())
    assert stretch.token_ids.tolist() == [1, 2, 9, 8]
    check(stretch)


def test_gap_with_other_tokens_begins_another_stretch():
    _, stretches = assemble(record(0, [1, 2, 3]), record(1, [7, 7], FLAG_GAP), end())
    assert [s.token_ids.tolist() for s in stretches] == [[1, 2, 3], [7, 7]]


def test_new_drafter_version_begins_another_stretch():
    _, stretches = assemble(record(0, [1, 2]), record(2, [3], version="v2"), end())
    assert [s.drafter_version for s in stretches] == ["v", "v2"]


def test_versions_that_take_turns_with_the_same_context_share_a_stretch():
    """As in a trial of a candidate: cut at each turn, the samples would begin without context."""
    turns = [
        record(0, [1, 2], FLAG_PREFILL),
        record(2, [3, 4], version="v2"),
        record(4, [5]),
        record(5, [6], version="full"),
        end(),
    ]
    contexts = {"v": "c", "v2": "c", "full": "d"}
    _, stretches = assemble(*turns, context_of=contexts.__getitem__)
    assert [(s.token_ids.tolist(), s.drafter_version) for s in stretches] == [([1, 2, 3, 4, 5], "v"), ([6], "full")]


def test_long_answers_are_split_and_each_part_has_context():
    _, stretches = assemble(*(record(3 * i, [1, 2, 3], FLAG_REJECTED) for i in range(8)), end(), max_rows=9)
    places = [(s.first_position, s.num_rows, s.num_prompt_tokens) for s in stretches]
    assert places == [(0, 9, 0), *((first, 7, 4) for first in (5, 8, 11, 14, 17))]
    assert [s.breaks for s in stretches[:3]] == [(3, 6), (9,), (12,)]
    for stretch in stretches:
        check(stretch)


@pytest.mark.parametrize("num_rows", [3, 25])
def test_the_answer_to_a_long_prompt_has_the_prompts_end_before_it(num_rows):
    """However long its chunks are, and wherever the last one ends."""
    prompt = [record(first, range(first, first + num_rows), FLAG_PREFILL) for first in range(0, 75, num_rows)]
    assembler, (stretch,) = assemble(*prompt, record(75, [75, 76]), record(77, [77]), end(), max_rows=12)
    assert stretch.num_judged == 3
    assert 6 <= stretch.num_prompt_tokens <= 9
    assert stretch.first_position + stretch.num_rows == 78
    check(stretch)
    assert assembler.open_bytes == 0


def test_requests_do_not_mix():
    _, stretches = assemble(record(0, [1], request="x"), record(0, [2], request="y"), record(1, [3], request="x"), end("x"))
    assert [s.token_ids.tolist() for s in stretches] == [[1, 3]]


def test_open_requests_are_bounded_in_number_and_bytes():
    """New ones are ignored until they end: the others go on as a whole."""
    names = [str(i) for i in range(6)]
    for limit in ({"max_open": 3}, {"max_open_bytes": 800}):  # 160 bytes each
        begins = [record(0, [1] * 10, FLAG_PREFILL, name) for name in names]
        rounds = [record(at, [2], request=name) for at in (10, 11) for name in names]
        assembler, stretches = assemble(*begins, *rounds, *map(end, names), **limit)
        assert [(s.session, s.num_rows, s.num_prompt_tokens) for s in stretches] == [(f"s-{i}", 12, 10) for i in range(3)]
        assert assembler.open_bytes == 0
        list(assembler.add(record(0, [1], request="5")))
        assert assembler.open_bytes == 16, "its key is free again"


def test_requests_that_grow_beyond_the_limit_are_cut_one_by_one():
    names = list("abc")
    begins = [record(0, [1] * 10, FLAG_PREFILL, name) for name in names]
    rounds = [record(10 + at, [2], request=name) for at in range(20) for name in names]
    assembler, stretches = assemble(*begins, *rounds, max_open_bytes=800)
    assert assembler.open_bytes <= 800
    assert [s.session for s in (*stretches, *assembler.finish())] == ["s-a", "s-b", "s-c"]
    assert stretches[0].num_rows > 15
    assert stretches[1].num_rows > 20


def test_prompts_are_shortened_while_memory_is_short(monkeypatch):
    monkeypatch.setattr("honed.recalib.samples.sessions.SHORT_PROMPT_ROWS", 3)
    begins = [record(0, range(20), FLAG_PREFILL, name) for name in "abc"]
    rounds = [record(20, [20, 21], request=name) for name in "abc"]
    assembler, stretches = assemble(*begins, *rounds, *map(end, "abc"), max_open_bytes=534)
    assert [(s.first_position, s.num_rows, s.num_prompt_tokens) for s in stretches] == [(17, 5, 3), (17, 5, 3), (0, 22, 20)]
    assert assembler.open_bytes == 0
    for stretch in stretches:
        check(stretch)


def test_only_what_was_silent_for_long_is_given_up():
    now = [0.0]
    assembler = SessionAssembler(max_open=2, monotonic=lambda: now[0])
    found = []
    for now[0], name, first in ((0.0, "a", 0), (5.0, "b", 0), (9.0, "c", 0), (12.0, "d", 0), (13.0, "b", 1)):
        found += assembler.add(record(first, [1], request=name))
    assert [s.session for s in found] == ["s-a"]
    assert sorted(s.session for s in assembler.finish()) == ["s-b", "s-d"]


def test_finish_and_forget():
    assembler, _ = assemble(record(0, [1, 2]), record(0, [3], request="q"))
    assert len(list(assembler.finish())) == 2
    assert assembler.open_bytes == 0
    list(assembler.add(record(0, [1, 2])))
    assembler.forget()
    assert (assembler.open_bytes, list(assembler.finish())) == (0, [])


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(0, 3), st.booleans()), max_size=40))
def test_any_records_give_stretches_whose_rows_belong_together(parts):
    """Whatever comes in whatever order: positions rise by one, features stay with their tokens, memory is accounted for."""
    records = [
        record(f, np.arange(f, f + n) % 5 + salt, (FLAG_GAP if gap else 0) | (FLAG_REJECTED if n % 2 else 0))
        for f, n, salt, gap in parts
    ]
    assembler, stretches = assemble(*records, end(), max_rows=20)
    for stretch in stretches:
        check(stretch)
        assert list(stretch.breaks) == sorted(set(stretch.breaks))
        assert all(stretch.first_position < p < stretch.first_position + stretch.num_rows for p in stretch.breaks)
    assert assembler.open_bytes == 0
