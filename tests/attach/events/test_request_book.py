"""Running requests: workloads of a bounded number, and a keyed hash instead of the request's name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from honed.adapt.protocol.fields import MAX_TEMPERATURE
from honed.adapt.protocol.workloads import DEFAULT_WORKLOAD, MAX_WORKLOADS, OTHER_WORKLOAD, RECENT_S
from honed.attach.events.labels import Labels, read_labels
from honed.attach.events.request_book import RequestBook


def params(**extra: Any) -> Any:
    return SimpleNamespace(temperature=0.7, extra_args=extra or None)


def test_workloads_are_bounded_and_short() -> None:
    book = RequestBook()
    added = [book.add(f"r{i}", params(honed_workload=f"w{i}" + "x" * 200)) for i in range(500)]
    names = {labels.workload for labels, _ in added}
    assert [tracked.workload for _, tracked in added] == [labels.workload for labels, _ in added]
    assert len(names | {DEFAULT_WORKLOAD}) == MAX_WORKLOADS
    assert OTHER_WORKLOAD in names
    assert book.workloads.num_pooled == sum(labels.workload == OTHER_WORKLOAD for labels, _ in added) == 500 - 62
    assert max(map(len, names)) <= 64


@pytest.mark.fault("labels that run out")
def test_finished_requests_make_room_for_new_labels_and_running_ones_keep_theirs() -> None:
    now_s = [0.0]
    book = RequestBook(lambda: now_s[0])
    for number in range(MAX_WORKLOADS - 2):
        book.add(f"r{number}", params(honed_workload=f"w{number}"))
        if number:
            book.remove(f"r{number}")
    now_s[0] = RECENT_S
    names = [book.add(f"s{number}", params(honed_workload=f"late{number}"))[0].workload for number in range(100)]
    assert names == [f"late{number}" for number in range(61)] + [OTHER_WORKLOAD] * 39
    assert book.add("t", params(honed_workload="w0"))[0].workload == "w0"
    assert book.workloads.num_pooled == 39


def test_an_adapters_requests_are_a_workload_unless_the_client_named_one() -> None:
    book = RequestBook()
    plain, named = SimpleNamespace(temperature=0.0, extra_args=None), params(honed_workload="chat")
    assert book.add("a", plain, adapter="sql")[0].workload == "sql"
    assert read_labels(plain).workload == "sql", "the workers read it for the samples"
    assert book.add("b", named, adapter="sql")[0].workload == "chat"
    assert book.add("c", params())[0].workload == DEFAULT_WORKLOAD


@pytest.mark.fault("labels that run out")
def test_the_workers_read_the_name_that_the_events_have() -> None:
    book = RequestBook()
    given = [params(honed_workload=f"w{number}", honed_session="s") for number in range(100)]
    for number, one in enumerate(given):
        labels, _ = book.add(f"r{number}", one)
        assert read_labels(one) == labels
    assert read_labels(given[-1]) == Labels(OTHER_WORKLOAD, session="s")


@pytest.mark.fault("values out of range in a frame")
@pytest.mark.parametrize(("given", "kept"), [(float("nan"), 0.0), (float("inf"), MAX_TEMPERATURE), (1e30, MAX_TEMPERATURE)])
def test_a_temperature_that_the_wire_cannot_carry_is_one_that_it_can(given: float, kept: float) -> None:
    _, tracked = RequestBook().add("r", SimpleNamespace(temperature=given, extra_args=None))
    assert tracked.temperature == kept


def test_keys_are_stable_within_a_boot_and_differ_between_boots() -> None:
    first, second = RequestBook(), RequestBook()
    (_, tracked), (_, other) = (book.add("r", params(), 17) for book in (first, second))
    assert first.add("r", params(), 17)[1] == tracked
    assert tracked.key != other.key
    assert (tracked.num_prompt_tokens, tracked.num_tokens, tracked.temperature) == (17, 17, 0.7)


def test_requests_are_counted_while_they_run() -> None:
    book = RequestBook()
    for name in ("r", "s", "r"):
        book.add(name, params())
    assert len(book) == 2
    for name in ("r", "r", "unknown"):
        book.remove(name)
    assert len(book) == 1
