"""Ratios of a busy server's blocks, with training over without."""

from __future__ import annotations

from benchmarks.latency.busy import Block, Pair, ratio, won


def block(gap_s: float, first_s: float, requests: int = 20) -> Block:
    """Requests of four chunks of two tokens each, after the first."""
    gaps = [gap_s] * 3 * requests
    return Block(gaps, [first_s] * requests, decode_s=sum(gaps), tokens=6 * requests)


def pairs(factor: float) -> list[Pair]:
    return [{"on": block(0.01 * n * factor, 0.1 * n), "off": block(0.01 * n, 0.1 * n)} for n in (1, 2, 3, 4)]


def test_what_training_adds_is_found_in_pairs_that_differ() -> None:
    for name in ("itl_mean", "itl_p99"):
        found = ratio(pairs(1.2), name)
        assert found["ratio"] == found["low"] == found["high"] == 1.2
    assert ratio(pairs(1.2), "ttft_mean")["ratio"] == 1.0


def test_the_interval_widens_with_what_differs_from_pair_to_pair() -> None:
    mixed = pairs(0.8) + pairs(1.2)
    found = ratio(mixed, "itl_mean")
    assert found["low"] < 0.95 < 1.0 == found["ratio"] < 1.05 < found["high"]


def test_longer_blocks_count_more() -> None:
    long, short = {"on": block(0.02, 0.1, 90), "off": block(0.01, 0.1, 90)}, {"on": block(0.01, 0.1), "off": block(0.01, 0.1)}
    assert ratio([long, short], "itl_mean")["ratio"] > 1.7


def test_without_requests_there_is_no_ratio() -> None:
    assert ratio([], "itl_mean") == {}
    assert ratio([{"on": Block(), "off": block(0.01, 0.1)}], "itl_mean") == {}


def test_what_a_candidate_wins_is_counted_in_accepted_tokens() -> None:
    """32 tokens take 16 rounds at a length of 2, and 12.8 at 2.5: 3.2 more of them are accepted drafts."""
    other = {"workload": "a", "parent": 2.0, "candidate": 9.0}
    gate = [other, {"workload": "b", "parent": 2.0, "candidate": 2.5, "must_gain": True}]
    assert won(gate, 32) == {"per_1000_requests": 3200}
    assert won([other], 32) == {}
