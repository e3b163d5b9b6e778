import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.protocol import workloads
from honed.adapt.protocol.workloads import (
    DEFAULT_WORKLOAD,
    MAX_WORKLOADS,
    OTHER_WORKLOAD,
    RECENT_S,
    WorkloadNames,
    workload_of,
)


@given(st.lists(st.sampled_from([DEFAULT_WORKLOAD, OTHER_WORKLOAD, *(f"w{number}" for number in range(200))]), max_size=400))
def test_the_first_labels_keep_their_names_and_no_more_names_than_the_bound_come_out(labels):
    names, first = WorkloadNames(), list(dict.fromkeys(labels))
    own = [label for label in first if label not in (DEFAULT_WORKLOAD, OTHER_WORKLOAD)][: MAX_WORKLOADS - 2]
    found = [names(label) for label in labels]
    assert len({*found, DEFAULT_WORKLOAD, OTHER_WORKLOAD}) <= MAX_WORKLOADS
    is_kept = {*own, DEFAULT_WORKLOAD, OTHER_WORKLOAD}
    assert found == [label if label in is_kept else OTHER_WORKLOAD for label in labels]
    assert names.num_pooled == sum(label not in is_kept for label in labels)


def test_a_name_keeps_its_place_once_it_is_known():
    names = WorkloadNames(f"w{number}" for number in range(MAX_WORKLOADS - 2))
    assert (names("w3"), names("late"), names("w3")) == ("w3", OTHER_WORKLOAD, "w3")


@pytest.mark.fault("labels that run out")
def test_a_name_out_of_use_makes_room_the_oldest_first():
    lost = []
    names = WorkloadNames(on_lost=lost.append)
    for number in range(MAX_WORKLOADS - 2):
        names(f"w{number}", float(number))
    assert names("late", RECENT_S - 1) == OTHER_WORKLOAD
    assert names("w0", RECENT_S) == "w0"
    assert names("late", RECENT_S) == OTHER_WORKLOAD, "w1 was used at 1 s"
    assert (names("late", RECENT_S + 1), lost) == ("late", ["w1"])
    assert (names("w1", RECENT_S + 1), names("w0", RECENT_S + 1)) == (OTHER_WORKLOAD, "w0")


@pytest.mark.fault("labels that run out")
def test_a_name_in_use_keeps_its_place():
    names = WorkloadNames(is_in_use=lambda name: name != "w3")
    for number in range(MAX_WORKLOADS - 2):
        names(f"w{number}", 0.0)
    assert [names(label, RECENT_S) for label in ("a", "w3", "w0")] == ["a", OTHER_WORKLOAD, "w0"]
    assert WorkloadNames(is_in_use=lambda name: True)("b", RECENT_S) == "b"


@given(st.lists(st.tuples(st.integers(0, 150), st.floats(0, 2 * RECENT_S)), max_size=300))
def test_within_the_time_for_which_names_stay_no_more_come_out_than_the_bound(steps):
    names, now_s, seen = WorkloadNames(), 0.0, []
    for number, after_s in steps:
        now_s += after_s / 50
        seen.append((now_s, names(f"w{number}", now_s)))
        recent = {name for at_s, name in seen if now_s - at_s < RECENT_S}
        assert len(recent | {DEFAULT_WORKLOAD, OTHER_WORKLOAD}) <= MAX_WORKLOADS


@pytest.mark.parametrize("label", [DEFAULT_WORKLOAD, OTHER_WORKLOAD])
def test_reserved_names_always_have_room(monkeypatch, label):
    monkeypatch.setattr(workloads, "MAX_WORKLOADS", 2)
    assert workload_of(label, set()) == WorkloadNames()(label) == label
    assert workload_of("a", set()) == OTHER_WORKLOAD
