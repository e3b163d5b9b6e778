"""Sources take turns, within a source the order is kept, and nothing is lost or counted twice."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.store.fair_queue import FairQueue


def queue_of(*items: str) -> FairQueue[str]:
    """Each item's first letter is its source; its size is 1."""
    queue: FairQueue[str] = FairQueue()
    for item in items:
        queue.put(item[0], item, 1)
    return queue


def test_sources_take_turns() -> None:
    queue = queue_of("a1", "a2", "a3", "b1", "c1", "c2")
    assert [queue.take() for _ in range(len(queue))] == ["a1", "b1", "c1", "a2", "c2", "a3"]
    with pytest.raises(IndexError):
        queue.take()
    with pytest.raises(IndexError):
        queue.drop()


def test_whoever_has_most_loses_its_oldest_and_keeps_its_turn() -> None:
    queue = queue_of("a1", "b1", "b2", "b3")
    assert queue.take() == "a1"
    queue.put("a", "a2", 1)
    assert queue.drop() == "b1"
    assert queue.take() == "b2", "it would never be served if each drop put it behind the others"


def test_what_is_put_back_comes_before_the_rest_of_its_source() -> None:
    queue = queue_of("a1", "a2", "b1")
    taken = queue.take_all("a")
    queue.put("a", "a3", 1)
    queue.put_back("a", taken)
    assert [item for item, _ in queue.take_all("a")] == ["a1", "a2", "a3"]
    assert queue.take_all("a") == []
    assert (len(queue), queue.size, queue.size_of("a")) == (1, 1, 0)


@given(st.lists(st.tuples(st.sampled_from("pptdx"), st.sampled_from("abc"), st.integers(0, 9))))
def test_it_keeps_what_queues_of_each_source_keep(operations: list[tuple[str, str, int]]) -> None:
    queue: FairQueue[int] = FairQueue()
    model: dict[str, deque[tuple[int, int]]] = {source: deque() for source in "abc"}
    for number, (operation, source, size) in enumerate(operations):
        if operation == "p":
            queue.put(source, number, size)
            model[source].append((number, size))
        elif operation == "x":
            assert queue.take_all(source) == list(model[source])
            model[source].clear()
        elif any(model.values()):
            item = queue.take() if operation == "t" else queue.drop()
            (owner,) = (name for name, items in model.items() if items and items[0][0] == item)
            if operation == "d":
                sizes = {name: sum(size for _, size in items) for name, items in model.items() if items}
                assert sizes[owner] == max(sizes.values())
            model[owner].popleft()
        assert len(queue) == sum(map(len, model.values()))
        assert [queue.size_of(name) for name in "abc"] == [sum(size for _, size in model[name]) for name in "abc"]
        assert queue.size == sum(queue.size_of(name) for name in "abc")
