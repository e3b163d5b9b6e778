"""The harness of `make bench-kernels`: what it says of a case, wherever it runs."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from benchmarks import kernel_bench as harness
from benchmarks.kernels.case import Case, Goal, Work
from benchmarks.kernels.timing import Ceilings, peak_bytes, take_turns

CPU = torch.device("cpu")
CEILINGS = Ceilings(bytes_per_s=1e9, flops_per_s=1e9)
MIB = 1 << 20


def case(work: Work, *goals: Goal, on: str = "cpu") -> Case:
    return Case("an_op", "a shape", on, lambda _: work, goals)  # type: ignore[arg-type]


def test_a_gpus_shapes_are_listed_on_a_cpu_but_not_measured() -> None:
    def make(_: torch.device) -> Work:
        raise AssertionError("too large for a CPU")

    row = harness.measure(Case("an_op", "a shape", "cuda", make, (Goal("time_us", at_most=60),)), CPU, 3, CEILINGS)
    assert row["time_us"] == "not measured"
    assert row["goals"] == [{"goal": "time_us ≤ 60", "value": "not measured"}]
    assert "not measured" in harness.line_of("an_op", row)


def test_a_row_has_times_ratios_and_verdicts() -> None:
    x = torch.ones(1000)
    work = Work(
        lambda: x.sum(),
        bytes_moved=4000,
        alternatives={"twice": lambda: (x.sum(), x.sum())},
        yardsticks={"nothing": lambda: None},
    )
    goals = (Goal("ratio:twice", at_least=0.0), Goal("cost:nothing", at_most=0.0), Goal("ratio:missing", at_least=1.0))
    row = harness.measure(case(work, *goals), CPU, 3, CEILINGS)
    assert row["time_us"]["low"] <= row["time_us"]["median"] <= row["time_us"]["high"]
    assert set(row["alternatives"]) == {"twice"}
    assert [goal.get("is_met") for goal in row["goals"]] == [True, False, None]
    assert row["ceiling_share"] == pytest.approx(4.0 / row["time_us"]["median"], rel=0.02, abs=1e-3)  # 4 us at 1 GB/s
    assert "twice" in harness.line_of("an_op", row)


def test_what_fails_is_named_and_the_rest_is_measured() -> None:
    def broken() -> object:
        raise RuntimeError("no such kernel")

    row = harness.measure(case(Work(lambda: None, alternatives={"other": broken, "fine": lambda: None})), CPU, 3, CEILINGS)
    assert row["failed"] == {"other": "RuntimeError: no such kernel"}
    assert set(row["alternatives"]) == {"fine"}
    for made in (case(Work(broken)), Case("an_op", "a shape", "cpu", lambda _: broken())):  # type: ignore[arg-type, return-value]
        row = harness.measure(made, CPU, 3, CEILINGS)
        assert "FAILED RuntimeError: no such kernel" in harness.line_of("an_op", row)


def test_the_best_alternative_is_the_fastest() -> None:
    row = {"alternatives": {name: {"time_us": {"median": m}, "ratio": {"median": m}} for name, m in (("a", 3.0), ("b", 2.0))}}
    assert harness.best_alternative(row) == "b"
    assert harness.figure("ratio", row) == 2.0
    assert harness.figure("ratio:a", row) == 3.0
    assert harness.best_alternative({"alternatives": {}}) is None


def test_peak_memory_is_what_was_held_at_once() -> None:
    def one_after_the_other() -> None:
        for _ in range(3):
            torch.ones(MIB)

    def together() -> object:
        return [torch.ones(MIB) for _ in range(3)]

    assert peak_bytes(CPU, one_after_the_other) == pytest.approx(4 * MIB, rel=0.01)
    assert peak_bytes(CPU, together) == pytest.approx(12 * MIB, rel=0.01)


def test_candidates_take_turns() -> None:
    turns: list[str] = []
    times = take_turns(CPU, {name: lambda name=name: turns.append(name) for name in "ab"}, 4)  # type: ignore[misc]
    order = [name for name, before in zip(turns, ["", *turns], strict=False) if name != before]
    assert order[-8:] == ["a", "b"] * 4
    assert {len(values) for values in times.values()} == {4}


def test_every_op_has_a_shape_for_a_gpu_and_one_for_a_cpu_and_goals_name_known_figures() -> None:
    where = defaultdict(set)
    for family in harness.FAMILIES:
        for one in family.CASES:
            where[one.op].add(one.on)
            for goal in one.goals:
                assert goal.figure.partition(":")[0] in {"time_us", "ceiling_share", "ratio", "cost", "peak_share"}
                assert (goal.at_least is None) != (goal.at_most is None)
    assert where
    assert all(kinds == {"cuda", "cpu"} for kinds in where.values())
