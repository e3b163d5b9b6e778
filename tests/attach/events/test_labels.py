"""Labels that clients send are read with care: bounded, harmless, never an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from honed.adapt.protocol.workloads import MAX_LABEL_CHARS
from honed.attach.events.labels import Labels, read_labels


def params(**extra: Any) -> Any:
    return SimpleNamespace(temperature=0.7, extra_args=extra or None)


@pytest.mark.parametrize("nothing", [None, params(), params(honed_workload=""), params(other=1)])
def test_no_label_means_the_default(nothing: Any) -> None:
    assert read_labels(nothing) == Labels()


def test_labels_are_read() -> None:
    labels = read_labels(params(honed_workload="chat", honed_max_draft_tokens=3, honed_session=17, honed_capture=0))
    assert labels == Labels("chat", 3, "17", is_captured=False)


@pytest.mark.fault("a mistyped opt-out that is captured")
@pytest.mark.parametrize(
    ("value", "is_captured"),
    [(1, True), (1.0, True), (True, True), ("Yes", True), (0, False), ("no", False), ("off", False), ("flase", False)],
)
def test_only_a_clear_yes_is_captured(value: object, is_captured: bool) -> None:
    assert read_labels(params(honed_capture=value)).is_captured == is_captured


@pytest.mark.parametrize("ceiling", ["three", None, [1], {}, float("nan"), float("inf"), -5])
def test_a_ceiling_that_is_no_number_is_none(ceiling: Any) -> None:
    assert read_labels(params(honed_max_draft_tokens=ceiling)).max_draft_tokens == -1


def test_a_ceiling_may_come_as_text() -> None:
    assert read_labels(params(honed_max_draft_tokens="3")).max_draft_tokens == 3


def test_a_long_label_is_cut() -> None:
    assert read_labels(params(honed_workload="x" * 200)).workload == "x" * MAX_LABEL_CHARS


def test_labels_are_text_that_can_be_encoded() -> None:
    labels = read_labels(SimpleNamespace(extra_args={"honed_workload": "half \ud800", "honed_session": "\udfff"}))
    assert (labels.workload, labels.session) == ("half ?", "?")
