"""A number out of its range never becomes a setting, and the error names the field, the range and the value."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_type_hints

import pytest

from honed.adapt.control.settings import ControllerSettings
from honed.adapt.monitor.canary import CanarySettings
from honed.adapt.monitor.drift import DriftSettings
from honed.adapt.protocol.ranges import Range
from honed.adapt.steps.step_time import StepTimeSettings

OWNERS = (CanarySettings, ControllerSettings, DriftSettings, StepTimeSettings)
NUMBERS = (int, float, tuple[int, ...], tuple[float, ...])


@pytest.mark.parametrize(
    ("allowed", "good", "bad", "text"),
    [
        (Range(0, 1), [0, 0.5, 1, (), (0, 1)], [-1e-9, 1.1, math.nan, math.inf, "1", True, None, (0, 2)], "from 0 to 1"),
        (Range(0, 1, excludes_low=True), [1e-9, 1], [0], "above 0 and at most 1"),
        (Range(0, 0.5, excludes_low=True, excludes_high=True), [0.1], [0, 0.5], "above 0 and below 0.5"),
        (Range(0, 1, excludes_high=True), [0], [1], "at least 0 and below 1"),
        (Range(1 << 20), [1 << 20, 10**12], [0, math.inf], "at least 1_048_576"),
    ],
)
def test_what_a_range_holds_and_how_it_reads(allowed: Range, good: list[Any], bad: list[Any], text: str) -> None:
    assert [value for value in good if not allowed.holds(value)] == []
    assert [value for value in bad if allowed.holds(value)] == []
    assert str(allowed) == text


@pytest.mark.parametrize("owner", OWNERS)
def test_every_number_has_a_range_that_its_default_is_in(owner: type[Any]) -> None:
    hints = get_type_hints(owner)
    assert set(owner.RANGES) - {"mode"} == {field.name for field in dataclasses.fields(owner) if hints[field.name] in NUMBERS}
    owner()


def test_all_wrong_fields_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"capture_share must be from 0 to 1, not 7; .*policy_ttl_s must be from 3") as caught:
        ControllerSettings(mode="fast", capture_share=7, policy_ttl_s=-1.0)
    assert "mode must be one of goodput, " in str(caught.value)
