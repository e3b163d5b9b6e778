"""A swap's stall is the gap in which it happened, which is the one before the step whose drafts are still the old version's."""

import asyncio
from types import SimpleNamespace

import pytest

from benchmarks import swap
from benchmarks.latency import yielding
from benchmarks.server.measured import percentile
from benchmarks.server.processes import ProcessError


def steps_with_swap_after(number: int, gap_ms: float, count: int = 40) -> list[tuple[int, float, str]]:
    """Steps of 10 ms, and one longer gap between step `number` and the next."""
    steps, end_ms = [], 0.0
    for step in range(1, count + 1):
        end_ms += gap_ms if step == number + 1 else 10.0
        # The step right after the swap verifies what the old weights drafted.
        steps.append((step, end_ms, "old" if step <= number + 1 else "new"))
    return steps


def test_the_gap_around_a_swap_is_found_and_compared_with_the_steps_nearby() -> None:
    (stall,) = swap.stalls_of(steps_with_swap_after(20, 14.0), [3.0])
    assert stall == {"pause_ms": 3.0, "gap_ms": pytest.approx(14.0), "step_ms": pytest.approx(10.0)}


def test_a_swap_that_is_not_in_the_log_is_an_error() -> None:
    with pytest.raises(ProcessError, match="2 swaps were made, but the log of steps has 1"):
        swap.stalls_of(steps_with_swap_after(20, 14.0), [3.0, 3.0])


def test_naming_the_version_that_runs_already_is_no_swap() -> None:
    steps = [(n, end, name if n > 3 else "") for n, end, name in steps_with_swap_after(20, 14.0)]
    assert len(swap.stalls_of(steps, [3.0])) == 1


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert swap.spread(values) == {"p50": 50.0, "p99": 99.0}


def test_a_ratio_of_latencies_is_over_all_phases_and_its_interval_over_pairs() -> None:
    pair = {"on": yielding.Phase([0.010] * 99 + [0.022], []), "off": yielding.Phase([0.010] * 99 + [0.020], [])}
    assert yielding.ratio_of([pair, pair], 1.0) == pytest.approx(1.1)
    assert yielding.interval([pair, pair], 1.0) == {"low": 1.1, "high": 1.1}


@pytest.mark.parametrize("stolen", [0.0, 0.2])
def test_pairs_that_the_host_disturbed_do_not_count(stolen: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are followed by others, as long as there is time."""
    calls, num_preempted = [], 1

    class Client:
        def post(self, path: str, body: object) -> None:
            calls.append(path)

    async def phase(plan: yielding.Plan, at: object, client: object, prompts: object, seed: int) -> yielding.Phase:
        await asyncio.sleep(0.01)
        is_disturbed = seed % 2 == 1
        value_s = 0.03 if is_disturbed else 0.01
        delays_s, computing_s = [2 * value_s] * num_preempted, [0.001] * num_preempted
        return yielding.Phase([value_s] * 100, [0.1], 0, stolen if is_disturbed else 0.0, delays_s, computing_s)

    monkeypatch.setattr(yielding, "phase", phase)
    at = SimpleNamespace(client=Client(), server=SimpleNamespace(url="http://127.0.0.1:1"))
    found = asyncio.run(yielding.measure(yielding.Plan(pairs=4), at))  # type: ignore[arg-type]
    assert found["pairs"] == 4
    assert found["all_pairs"]["pairs"] == (7 if stolen else 4)
    assert found["itl_ms"]["on"]["p99"] == (10.0 if stolen else 30.0)
    assert found["preempt_ms"]["p99"] == (20.0 if stolen else 60.0)
    assert (found["preemptions"], found["all_pairs"]["preemptions"]) == (4, 7 if stolen else 4)
    assert calls.count("/v1/training:pause") == found["all_pairs"]["pairs"]
    if stolen:
        late = asyncio.run(yielding.measure(yielding.Plan(pairs=10**6, most_s=0.5), at))  # type: ignore[arg-type]
        assert 0 < late["pairs"] < late["all_pairs"]["pairs"]
        with pytest.raises(ProcessError, match="quieter time"):
            asyncio.run(yielding.measure(yielding.Plan(pairs=1, most_stolen=-1.0, most_s=0.2), at))  # type: ignore[arg-type]
    num_preempted = 0
    with pytest.raises(ProcessError, match="never pre-empted"):
        asyncio.run(yielding.measure(yielding.Plan(pairs=1), at))  # type: ignore[arg-type]
