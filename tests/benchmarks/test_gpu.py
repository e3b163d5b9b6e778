"""`make gpu`: what is kept when something is cut off, and what runs at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import engine_tests, time_slices, tree_steps, whole_trainer
from benchmarks.gpu.kept import Kept, in_ms
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.server.client_load import Prompt, Reply


def part(name: str, code: str, limit_s: float = 60.0, is_timed: bool = True) -> Part:
    """A part that runs some Python, whose last argument is the result file."""
    return Part(name, "a test's", ("-c", code), ("-c", code), limit_s, lambda found: {"seen": found["seen"]}, is_timed)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr(command, "LOGS", tmp_path)
    monkeypatch.setattr(command, "KEEP_S", 0.1)
    return Kept(tmp_path / "all.json", {"parts": {}, "commit": "c", "device": "d", "when": "w"})


def test_a_part_that_is_cut_off_keeps_what_it_had_written(kept: Kept) -> None:
    code = "import sys, time; open(sys.argv[-1], 'w').write('{\"seen\": 3}'); time.sleep(60)"
    command.run([part("slow", code, limit_s=2.0)], True, 1e12, kept)
    row = json.loads(kept.path.read_text())["parts"]["slow"]  # type: ignore[union-attr]
    assert not row["ok"]
    assert row["seen"] == 3
    assert row["why"].startswith("cut off")


def test_what_a_part_has_written_is_kept_while_it_runs(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    # A run on a GPU was cut off from outside while two parts were at work, and the result file knew of neither.
    rows = []
    monkeypatch.setattr(Kept, "update", lambda self, **new: self.document.update(new) or rows.append(dict(new)))
    code = "import sys, time; open(sys.argv[-1], 'w').write('{\"seen\": 3}'); time.sleep(1.5)"
    command.run([part("slow", code)], True, 1e12, kept)
    assert [row["parts"]["slow"]["ok"] for row in rows][-1]
    assert {"ok": False, "seen": 3}.items() <= rows[-2]["parts"]["slow"].items()


def test_ctrl_c_ends_the_part_that_runs(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    begun, begin = [], command.start
    monkeypatch.setattr(command, "start", lambda *words: begun.append(begin(*words)) or begun[-1])
    monkeypatch.setattr(command, "note", interrupt)
    with pytest.raises(KeyboardInterrupt):
        command.run([part("slow", "import time; time.sleep(60)")], True, 1e12, kept)
    assert begun[0].poll() is not None


def test_a_part_that_fails_says_how(kept: Kept) -> None:
    command.run([part("bad", "raise SystemExit('there is no such thing')")], False, 1e12, kept)
    row = kept.document["parts"]["bad"]
    assert not row["ok"]
    assert row["log"] == ["there is no such thing"]


def test_only_parts_that_measure_no_time_run_at_once() -> None:
    parts = [part(name, "", is_timed=name.isupper()) for name in ("a", "b", "C", "d", "E")]
    assert [[p.name for p in group] for group in command.groups(parts, True)] == [["a", "b"], ["C"], ["d"], ["E"]]
    assert [len(group) for group in command.groups(parts, False)] == [1] * 5


def test_all_parts_fit_into_the_time_of_three_calls() -> None:
    limits, calls = [max(part.limit_s for part in group) for group in command.groups(list(PARTS), True)], [0.0]
    for limit_s in limits:
        calls = [*calls, limit_s] if calls[-1] + limit_s > command.MOST_S else [*calls[:-1], calls[-1] + limit_s]
    assert len(calls) == 3
    assert max(calls) <= command.MOST_S
    assert all(part.figures({}) is not None for part in PARTS), "a part that wrote nothing has figures all the same"


def test_verdicts_are_read_from_a_log_that_broke_off(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "tests/e2e/test_x.py::test_one PASSED [ 10%]\ntests/e2e/test_x.py::test_two[a b] FAILED [ 20%]\n"
        "tests/e2e/test_x.py::test_three ERROR [ 30%]\ntests/e2e/test_x.py::test_four \n"
        "FAILED tests/e2e/test_x.py::test_two[a b] - AssertionError: no\n"
    )
    found = engine_tests.verdicts(log)
    assert (found["passed"], found["failed"], found["errors"]) == (1, ["test_two[a b]"], ["test_three"])
    assert found["reasons"] == {"test_two[a b]": "AssertionError: no"}


def test_tests_of_one_name_in_two_files_are_two(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("tests/kernels/a/test_x.py::test_one FAILED [ 50%]\ntests/kernels/b/test_y.py::test_one PASSED [100%]\n")
    found = engine_tests.verdicts(log)
    assert (found["passed"], found["failed"]) == (1, ["tests/kernels/a/test_x.py::test_one"])


def test_an_answer_is_compared_with_the_beginning_of_the_reference() -> None:
    answers = whole_trainer.Answers({"p": Reply([1, 2, 3, 4])})
    prompt = Prompt("s", "p")
    answers.check("x", [prompt] * 3, [Reply([1, 2]), Reply([1, 3]), Reply(error="HTTP 500")])
    assert answers.told() == {"compared": 2, "failed": 1, "differing": 1, "which": [{"stage": "x", "session": "s", "at": 1}]}


def test_a_tree_has_to_emit_as_much_more_as_its_step_takes_longer() -> None:
    seen = {"none": [10.0, 10.0], "chain": [11.0, 10.0], "63 nodes": [13.2, 13.0]}
    assert tree_steps.break_even(seen) == {"63 nodes": {"over_chain": [1.25, 1.2, 1.3], "over_none": [1.31, 1.3, 1.32]}}
    assert tree_steps.gains(seen) == {"63 nodes": [round(9.5 / 6.5 / 1.25, 3), round(10.7 / 7.8 / 1.25, 3)]}


def test_slices_lie_between_gaps() -> None:
    assert time_slices.slices_of([(100, 900), (200, 300), (500, 700)]) == [(100, 200), (300, 500), (700, 900)]


def test_the_mean_and_the_longest_are_told() -> None:
    assert in_ms([]) == {}
    assert in_ms([0.001, 0.003]) == {"mean": 2.0, "p50": 1.0, "p99": 3.0, "max": 3.0}
