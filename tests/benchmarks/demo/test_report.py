"""The report stands alone: well-formed, nothing from outside, and every figure of the record in it."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from benchmarks.demo import report
from benchmarks.demo.figures import promises_of

RESULT: dict[str, Any] = {
    "tokens_per_s": {"a": 612.0, "b": 301.0, "b_tuned": 455.0, "b_healed": 566.0},
    "speedup": {"tuned": 1.5, "healed": 1.75},
    "acceptance_length": {"a_before": 3.0, "b_before": 1.2, "b_after": 1.8, "a_after": 2.97, "b_trees": 2.3},
    "verify_rounds_logged": 12345,
    "verify_rounds_lost": 0,
    "vllm_num_drafts": 12345,
    "draft_tokens_logged": 7,
    "vllm_num_draft_tokens": 7,
    "accepted_tokens_logged": 1,
    "vllm_num_accepted_tokens": 1,
    "swap_pause_ms": 3.2,
    "train_seconds": 141.0,
    "requests_failed": 0,
    "greedy_identical": True,
    "requests_compared": 488,
}
OPERATION = {"state": "succeeded", "error": "", "detail": {"gate": []}}


def phase(key: str, start_s: float, **changes: Any) -> dict[str, Any]:
    vllm = {"drafts": 100, "draft_tokens": 700, "accepted_tokens": 50, "acceptance_length": 1.5}
    honed = {"drafts": 100, "draft_tokens": 700, "accepted_tokens": 50, "acceptance_length": 1.5}
    made = {
        "key": key,
        "name": key,
        "start_s": start_s,
        "end_s": start_s + 9,
        "requests": 8,
        "tokens": 1800,
        "tokens_per_s": 200.4,
    }
    return made | {"vllm": vllm, "honed": honed, "by_position": [0.5, 0.25], "pinned": True, "identical": True} | changes


def record(**changes: Any) -> dict[str, Any]:
    point = {"workload": "b", "rounds": 10, "accepted_tokens": 5, "draft_tokens": 70}
    gate = {"workload": "b", "sessions": 40, "parent": 1.2, "candidate": 1.8, "gain_low": 1.4, "gain_high": 1.6, "passed": True}
    return {
        "result": RESULT,
        "promises": promises_of(RESULT, OPERATION, True),
        "phases": [
            phase("b_before", 1000.0),
            phase("b_after", 1100.0, identical=False),
            phase("reference_a", 900.0, honed=None),
        ],
        "operation": {"detail": {"gate": [gate]}},
        "training": [{"t": 1.0, "steps": 10, "loss": 2.5}, {"t": 2.0, "steps": 20, "loss": 2.0}],
        "timeline": {
            "points": [point | {"t": 1000 + i} for i in range(12)],
            "marks": [{"t": 1050.0, "kind": "swap", "text": "v1 -> v2"}, {"t": 1051.0, "kind": "override", "text": "k"}],
        },
        "start_unix_s": 1000.0,
        "when": "2026-11-20 12:00",
        "machine": "two cores",
        "commands": ["honed serve", "<b>evil</b>"],
        "config": "[paths]",
        "trigger": "honed started by itself",
    } | changes


def test_nothing_comes_from_outside() -> None:
    page = report.render(record())
    assert not re.search(r"(?:src|href)=|https?://|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page


def test_the_page_is_well_formed() -> None:
    class Checker(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open_tags: list[str] = []

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag not in ("meta",):
                self.open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open_tags.pop() == tag

        def handle_startendtag(self, tag: str, attrs: Any) -> None:
            pass

    checker = Checker()
    checker.feed(report.render(record()))
    assert checker.open_tags == []


def test_key_figures_gate_and_swap_are_in_it() -> None:
    page = report.render(record())
    for text in ("1.20 → 1.80", "+50.0 %", "12,345 of 12,345", "3.2 ms", "141 s", "+40.0 … +60.0 %", ">swap<", "DIFFERENT"):
        assert text in page
    assert ">override<" not in page
    assert "&lt;b&gt;evil" in page


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_headline_follows_the_promises(is_kept: bool) -> None:
    promises = [{"text": "p", "found": "f", "kept": is_kept}]
    assert ("not every promise kept" in report.render(record(promises=promises))) is not is_kept


def test_a_demo_that_never_trained_still_has_a_report() -> None:
    result = RESULT | {"swap_pause_ms": None, "train_seconds": None}
    empty = {"points": [], "marks": []}
    page = report.render(record(result=result, operation={}, training=[], timeline=empty, phases=[]))
    assert page.count("nothing was measured") == 4


def test_bins_are_weighted_by_rounds() -> None:
    points = [{"t": 100, "rounds": 30, "accepted_tokens": 30}, {"t": 101, "rounds": 10, "accepted_tokens": 30}]
    points.append({"t": 104, "rounds": 0, "accepted_tokens": 0})
    assert report.binned(points, "accepted_tokens", "rounds", 1.0, 100.0) == [(1.5, 2.5)]
