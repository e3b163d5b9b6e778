"""The demo's verdict follows from its figures, and from nothing else."""

import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.demo.figures import drafted_share, headline, honed_figures, promises_of, result_of, shell_line, toml
from benchmarks.server.vllm_server import Counters

KEYS = {
    "tokens_per_s",
    "speedup",
    "acceptance_length",
    "verify_rounds_logged",
    "verify_rounds_lost",
    "vllm_num_drafts",
    "draft_tokens_logged",
    "vllm_num_draft_tokens",
    "accepted_tokens_logged",
    "vllm_num_accepted_tokens",
    "swap_pause_ms",
    "train_seconds",
    "requests_failed",
    "greedy_identical",
    "requests_compared",
}
ENGINE = {"rounds": 100, "draft_tokens": 700, "accepted_tokens": 150, "lost_rounds": 0}
TOTALS = Counters(100, 700, 150)
SWAPPED = {"state": "succeeded", "detail": {"pause_ms": 3.14159, "train_seconds": 120.04}, "error": ""}


def phases(b_after: float = 1.8, a_after: float = 3.0, b_trees: float = 2.3, **changes: Any) -> list[dict[str, Any]]:
    lengths = {"a_before": 3.0, "b_before": 1.2, "b_after": b_after, "a_after": a_after, "b_trees": b_trees}
    rest = {"failed": 0, "identical": True, "requests": 64}
    made: list[dict[str, Any]] = [{"key": k, "vllm": {"acceptance_length": v}} | rest for k, v in lengths.items()]
    made.append({"key": "traffic_a", "vllm": {"acceptance_length": 9.9}, "failed": 0, "requests": 240})
    made[0] |= changes
    return made


def kept(engine: dict[str, Any] = ENGINE, operation: dict[str, Any] = SWAPPED, same: bool = True, **changes: Any) -> list[bool]:
    result = result_of(phases(**changes), engine, TOTALS, operation)
    return [promise["kept"] for promise in promises_of(result, operation, same)]


def test_the_result_has_exactly_the_promised_keys() -> None:
    result = result_of(phases(), ENGINE, TOTALS, SWAPPED)
    assert set(result) == KEYS
    assert result["acceptance_length"] == {"a_before": 3.0, "b_before": 1.2, "b_after": 1.8, "a_after": 3.0, "b_trees": 2.3}
    assert (result["swap_pause_ms"], result["train_seconds"]) == (3.142, 120.0)
    assert result["requests_compared"] == 5 * 64


def test_the_headline_compares_the_same_prompts() -> None:
    speeds = {
        "reference_a": 600.0,
        "reference_traffic_b": 300.0,
        "traffic_b": 450.0,
        "reference_traffic_b_after": 320.0,
        "traffic_b_after": 560.0,
    }
    played = [{"key": key, "vllm": {"acceptance_length": 1.0}, "failed": 0, "tokens_per_s": v} for key, v in speeds.items()]
    result = result_of(played, ENGINE, TOTALS, SWAPPED)
    assert result["tokens_per_s"] == {"a": 600.0, "b": 300.0, "b_tuned": 450.0, "b_healed": 560.0}
    assert result["speedup"] == {"tuned": 1.5, "healed": 1.75}
    assert "600 on the old workload; the new one brings vLLM alone to 300. With honed: 450 by drafting less" in headline(result)


def test_what_came_from_rounds_with_drafts_is_told() -> None:
    counted = {"drafts": 43, "accepted_tokens": 26}
    assert drafted_share({"vllm": counted, "tokens": 2300}) == pytest.approx(0.03)
    assert drafted_share({"vllm": counted, "tokens": 60}) == 1.0  # a request's last round may go beyond its end
    assert drafted_share({"vllm": counted}) == 0.0


def test_all_is_kept_when_all_is_well() -> None:
    assert kept() == [True] * 7


@pytest.mark.parametrize(
    ("broken", "options"),
    [
        (0, {"b_after": 1.2 * 1.249}),
        (1, {"a_after": 3.0 * 0.969}),
        (2, {"b_trees": 1.8 * 1.09}),
        (3, {"engine": ENGINE | {"rounds": 99}}),
        (3, {"engine": ENGINE | {"accepted_tokens": 151}}),
        (3, {"engine": ENGINE | {"lost_rounds": 1}}),
        (4, {"identical": False}),
        (5, {"failed": 1}),
        (6, {"same": False}),
        (6, {"operation": {"state": "failed", "detail": {"pause_ms": 1.0}, "error": "gate"}}),
        (6, {"operation": {"state": "succeeded", "detail": {}, "error": ""}}),
    ],
)
def test_each_promise_breaks_alone(broken: int, options: dict[str, Any]) -> None:
    assert kept(**options) == [i != broken for i in range(7)]


@pytest.mark.parametrize(("steps", "b_after", "is_said"), [(111, 1.3, True), (1500, 1.3, False), (111, 1.8, False)])
def test_a_gain_that_too_few_steps_kept_away_says_so(steps: int, b_after: float, is_said: bool) -> None:
    operation = {"state": "succeeded", "detail": {"pause_ms": 3.0, "train_seconds": 100.2, "steps": steps}, "error": ""}
    gain = promises_of(result_of(phases(b_after=b_after), ENGINE, TOTALS, operation), operation, True)[0]
    assert gain["kept"] == (b_after == 1.8)
    assert ("only 111 micro-steps fitted into 100 s" in gain["found"]) == is_said
    assert ("make demo TRAIN_SECONDS=400" in gain["found"]) == is_said


def test_a_command_can_be_pasted() -> None:
    words = ["honed", "vllm", "--speculative-config", '{"method":"dflash","model":"a b"}']
    line = shell_line("vllm", {"HONED_CONFIG": "/a b/honed.toml"}, words).splitlines()
    assert line[0] == "# vllm"
    assert shlex.split(line[1]) == ["HONED_CONFIG=/a b/honed.toml", *words]


def test_a_demo_without_its_phases_keeps_nothing_by_accident() -> None:
    result = result_of([], ENGINE, TOTALS, {})
    found = [promise["kept"] for promise in promises_of(result, {}, True)]
    assert found[0] is False
    assert found[1] is False
    assert found[2] is False
    assert found[6] is False


def test_honed_figures_are_differences_with_conditional_acceptance() -> None:
    before = {"rounds": 10, "draft_tokens": 30, "accepted_tokens": 12, "accepted_by_position": [6, 4, 2]}
    before["drafted_by_position"] = [10, 10, 10]
    after = {"rounds": 110, "draft_tokens": 330, "accepted_tokens": 102, "accepted_by_position": [56, 34, 12]}
    after["drafted_by_position"] = [110, 110, 110]
    figures = honed_figures(before, after)
    assert figures["honed"] == {"drafts": 100, "draft_tokens": 300, "accepted_tokens": 90, "acceptance_length": 1.9}
    assert figures["by_position"] == pytest.approx([0.5, 0.6, 1 / 3])


def test_the_first_view_may_be_empty() -> None:
    after = {"rounds": 4, "draft_tokens": 8, "accepted_tokens": 2}
    after |= {"accepted_by_position": [2, 0], "drafted_by_position": [4, 4]}
    assert honed_figures({}, after)["by_position"] == [0.5, 0.0]


def test_settings_survive_a_toml_reader() -> None:
    sections = {"paths": {"state_dir": Path('/a "b"\\c')}, "recalibration": {"automatic": True, "max_seconds": 1.5, "n": 3}}
    read = tomllib.loads(toml(sections))
    assert read == {"paths": {"state_dir": '/a "b"\\c'}, "recalibration": {"automatic": True, "max_seconds": 1.5, "n": 3}}
