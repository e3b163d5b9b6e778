"""Zeros that V1 puts in the place of drafts count as drafts that weren't verified, in the step after and in no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from honed.attach.events.step_log import UNWALKED
from honed.attach.runner.unfit_drafts import UnfitDrafts


class V1Runner:
    """The order of vLLM's V1 runner: a step verifies drafts, then asks whether its batch fits the drafter."""

    def __init__(self, is_async: bool) -> None:
        self.is_async, self.fits = is_async, True
        self.told: set[str] = set()
        UnfitDrafts(self).wrap(pytest.fail)

    def _input_fits_in_drafter(self, metadata: Any) -> bool:
        return self.fits

    def execute_model(self, scheduler_output: Any) -> None:
        pass

    def sample_tokens(self, grammar: Any = None) -> Any:
        self._input_fits_in_drafter(None)
        output = SimpleNamespace(**({UNWALKED: self.told} if self.told else {}))
        return SimpleNamespace(get_output=lambda: output) if self.is_async else output

    def step(self, *verified: str, fits: bool = True, num_tokens: int = 8) -> set[str]:
        self.fits = fits
        drafts = {request: [0, 0] for request in verified}
        self.execute_model(SimpleNamespace(scheduled_spec_decode_tokens=drafts, total_num_scheduled_tokens=num_tokens))
        output = self.sample_tokens()
        return set(getattr(output.get_output() if self.is_async else output, UNWALKED, ()))


@pytest.mark.fault("zeros in the place of drafts that counted as refused")
@pytest.mark.parametrize("is_async", [False, True])
def test_the_step_after_a_batch_that_does_not_fit_verifies_nobodys_drafts(is_async: bool) -> None:
    runner = V1Runner(is_async)
    assert runner.step("a", "b", fits=False) == set()
    assert runner.step("a", "b", fits=False) == {"a", "b"}
    assert runner.step("b") == {"b"}
    assert runner.step("b") == set()


def test_a_step_of_nothing_changes_nothing() -> None:
    runner = V1Runner(is_async=False)
    runner.step("a", fits=False)
    runner.execute_model(SimpleNamespace(scheduled_spec_decode_tokens={}, total_num_scheduled_tokens=0))
    assert runner.step("a") == {"a"}


def test_rounds_that_others_mark_stay_marked() -> None:
    runner = V1Runner(is_async=True)
    runner.step("a", fits=False)
    runner.told = {"c"}
    assert runner.step("a") == {"a", "c"}


def test_a_runner_without_the_test_is_refused() -> None:
    with pytest.raises(AttributeError, match="_input_fits_in_drafter"):
        UnfitDrafts(SimpleNamespace(execute_model=None, sample_tokens=None))
