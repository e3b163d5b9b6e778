"""Zeros that V1 puts in the place of drafts count as drafts that weren't verified, in the step after and in no other."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from honed.attach.events.step_log import UNWALKED
from honed.attach.runner.unfit_drafts import UnfitDrafts
from honed.attach.trees.runner_v1 import TreesV1


class V1Runner:
    """The order of vLLM's V1 runner: a step verifies drafts, then asks whether its batch fits the drafter."""

    def __init__(self, is_async: bool) -> None:
        self.is_async, self.fits = is_async, True
        self.input_batch = SimpleNamespace(req_ids=[])
        self.told: set[str] = set()
        UnfitDrafts(self).wrap(pytest.fail)

    def _input_fits_in_drafter(self, metadata: Any) -> bool:
        return self.fits

    def execute_model(self, scheduler_output: Any) -> None:
        pass

    def sample_tokens(self, grammar: Any = None) -> Any:
        self._input_fits_in_drafter(SimpleNamespace(max_seq_len=100))
        output = SimpleNamespace(**({UNWALKED: self.told} if self.told else {}))
        return SimpleNamespace(get_output=lambda: output) if self.is_async else output

    def step(self, *verified: str, fits: bool = True, finished: Collection[str] = ()) -> set[str]:
        self.fits, self.input_batch.req_ids = fits, list(verified)
        drafts = {request: [0, 0] for request in verified}
        self.execute_model(SimpleNamespace(scheduled_spec_decode_tokens=drafts, finished_req_ids=set(finished)))
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
    runner.execute_model(SimpleNamespace(scheduled_spec_decode_tokens={}, finished_req_ids=set()))
    assert runner.step("a") == {"a"}


def test_a_batch_of_other_requests_in_between_keeps_its_rounds() -> None:
    """Under pipeline parallelism, and where a step has no room for all."""
    runner = V1Runner(is_async=False)
    runner.step("a", "c", fits=False)
    assert runner.step("b") == set()
    assert runner.step("a", "b", finished={"c"}) == {"a"}
    assert runner.step("a", "b", "c") == set(), "another request came by the name of one that is over"


def test_rounds_that_others_mark_stay_marked() -> None:
    runner = V1Runner(is_async=True)
    runner.step("a", fits=False)
    runner.told = {"c"}
    assert runner.step("a") == {"a", "c"}


def test_beside_trees_that_run_ahead_it_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of trees, chains and requests that came since. They ask for a block's tokens, fewer than there are slots."""
    asked: list[int] = []

    def fits(runner: V1Runner, metadata: Any) -> bool:
        asked.append(metadata.max_seq_len + 15)
        return runner.fits

    monkeypatch.setattr(V1Runner, "_input_fits_in_drafter", fits)
    runner: Any = V1Runner(is_async=True)
    runner._prepare_inputs = runner._sample = runner.take_draft_token_ids = pytest.fail
    runner.drafter = SimpleNamespace(propose=pytest.fail, _sample_draft_tokens=pytest.fail)
    runner.num_spec_tokens = 15
    trees: Any = SimpleNamespace(_runner=runner, depth=7, is_off=False, _wanted=set(), _told=None, _on_error=pytest.fail)
    trees._warm_up, trees.layers = SimpleNamespace(begin=lambda: None), SimpleNamespace(wrap=lambda: None)
    TreesV1.wrap(trees)
    assert runner.step("a", "b", fits=False) == set()
    assert runner.step("a", "b") == {"a", "b"}
    assert runner.step("a", "b") == set()
    assert asked == [100 + 7] * 3


def test_a_runner_without_the_test_is_refused() -> None:
    with pytest.raises(AttributeError, match="_input_fits_in_drafter"):
        UnfitDrafts(SimpleNamespace(execute_model=None, sample_tokens=None))
