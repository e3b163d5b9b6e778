"""The interval covers the median, and a machine that drifts doesn't look like overhead."""

import subprocess

from benchmarks.overhead import Pair, Run, commit, hardware, idle_cpu_share, summary
from benchmarks.server.processes import ROOT
from benchmarks.server.vllm_server import Counters


def pair(plain: float, attached: float, idle_attached: float = 0.0, idle_plain: float = 0.0) -> Pair:
    return {"plain": Run(plain, Counters(), idle_attached), "attached": Run(attached, Counters(), idle_plain)}


def test_equal_servers_have_ratio_one() -> None:
    assert summary([pair(rate, rate) for rate in (90.0, 100.0, 110.0, 120.0)]) == {"median": 1.0, "low": 1.0, "high": 1.0}


def test_the_interval_holds_the_median_and_widens_with_noise() -> None:
    found = summary([pair(100.0, 100.0 * r) for r in (0.97, 0.98, 0.985, 0.99, 0.99, 1.0, 1.0, 1.01)])
    assert found["low"] <= found["median"] <= found["high"]
    assert found["median"] == 0.99
    assert 0.97 <= found["low"] < found["high"] <= 1.01


def test_pairs_are_compared_within_themselves() -> None:
    assert summary([pair(rate, rate * 0.5) for rate in (10.0, 1000.0, 50.0)])["median"] == 0.5


def test_idleness_is_that_of_the_server_whose_turn_it_is_not() -> None:
    pairs = [pair(1, 1, idle_attached=0.4, idle_plain=0.0), pair(1, 1, idle_attached=0.2, idle_plain=0.02)]
    assert idle_cpu_share(pairs) == {"plain": 0.01, "attached": 0.3}


def test_the_result_names_machine_and_commit() -> None:
    assert hardware()["cores"]
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        assert commit() == "unknown"
    else:
        assert done.stdout.startswith(commit().removesuffix("+"))
        assert len(commit()) >= 7
