from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from honed.adapt.protocol.workloads import OTHER_WORKLOAD, RECENT_S
from honed.daemon.control.live_rounds import MOST_CELLS, Cell, LiveRounds
from honed.daemon.metrics.acceptance import families
from honed.daemon.metrics.labels import MOST_ENGINES, MOST_POSITIONS
from honed.daemon.service import Service
from honed.daemon.store.rollups import Counts
from tests.daemon.exposition import scrape
from tests.daemon.fake_engine import FakeEngine

ROUNDS = "drafter_version= engine=engine-0 model_name=tiny workload=default"


def by_position(found: dict[str, float]) -> list[float]:
    return [value for _, value in sorted(found.items())]


def test_rounds_tokens_and_positions(service: Service, make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine()
    engine.hello()
    engine.send(engine.batch(1, drafted=[3, 3, 2, 0], accepted=[3, 1, 2, 0], rounds=4))
    engine.wait_acked(1)
    found = scrape(service)
    assert found["honed_verify_rounds_total"] == {ROUNDS: 3}
    assert found["honed_draft_tokens_total"] == {ROUNDS: 8}
    assert found["honed_accepted_tokens_total"] == {ROUNDS: 6}
    assert found["honed_emitted_tokens_total"] == {ROUNDS: 10}
    assert found["honed_delivered_tokens_total"] == {ROUNDS: 10}
    assert found["honed_plain_rounds_total"] == {ROUNDS: 1}
    assert by_position(found["honed_position_drafted_total"]) == [3, 3, 2]
    assert by_position(found["honed_position_tried_total"]) == [3, 3, 1]
    assert by_position(found["honed_position_accepted_total"]) == [3, 2, 1]
    assert found["honed_acceptance_length_sum"] == {ROUNDS: 9}
    buckets = {key.split("le=")[1].split()[0]: value for key, value in found["honed_acceptance_length_bucket"].items()}
    assert buckets == {"1.0": 0, "2.0": 1, "3.0": 2, "4.0": 3, "+Inf": 3}


def test_all_acceptance_lengths_have_the_same_buckets() -> None:
    """Where one had more, the sum over all fell from one bucket to the next, and a quantile was its last one."""
    short, long = (Counts(rounds=2, accepted_tokens=k, accepted=np.ones(k, dtype=np.int64)) for k in (3, 7))
    (found,) = [one for one in families([(["a"] * 6, short), (["b"] * 6, long)]) if one.name == "honed_acceptance_length"]
    buckets = {
        name: {s.labels["le"]: s.value for s in found.samples if s.labels["engine"] == name and "le" in s.labels}
        for name in "ab"
    }
    assert list(buckets["a"]) == list(buckets["b"])
    assert buckets["a"]["8.0"] == buckets["a"]["4.0"] == 2.0
    assert [buckets["b"][le] for le in ("1.0", "7.0", "8.0")] == [1.0, 1.0, 2.0]


def test_versions_and_workloads_that_come_and_go_dont_make_a_scrape_grow(service: Service) -> None:
    one = Counts(rounds=1, draft_tokens=2, accepted_tokens=1, delivered_tokens=2)
    live = LiveRounds()
    for number in range(MOST_CELLS + 10):
        live.add(("engine-0", "a" if number % 2 else "b", f"v{number:04}"), one, number * RECENT_S)
        live.add(("engine-0", "steady", "v0000"), one, number * RECENT_S)
    cells = dict(live.snapshot())
    assert len(cells) == MOST_CELLS
    assert cells["engine-0", "steady", "v0000"].rounds == MOST_CELLS + 10, "what is in use stays"
    assert live.workloads() == {("engine-0", "a"), ("engine-0", "b"), ("engine-0", "steady")}


@pytest.mark.fault("counters that engines take turns to reset")
def test_many_engines_of_many_workloads_reset_no_counter() -> None:
    live, one = LiveRounds(), Counts(rounds=1)
    engines, workloads = [f"engine-{number}" for number in range(20)], [f"w{number:02}" for number in range(60)]
    before: dict[Cell, int] = {}
    for turn in range(5):
        for workload in workloads:
            for engine_id in engines:
                live.add((engine_id, workload, "v1"), one, float(turn))
        now = {cell: counts.rounds for cell, counts in live.snapshot()}
        assert turn < 2 or now.keys() == before.keys()
        assert all(now[cell] >= rounds for cell, rounds in before.items() if cell in now)
        before = now
    assert len(before) == MOST_CELLS
    pooled = sum(rounds for (_, name, _), rounds in before.items() if name == OTHER_WORKLOAD)
    assert live.pooled_rounds == pooled > 0


def test_what_was_read_doesnt_change_while_it_is_rendered() -> None:
    live = LiveRounds()
    live.add(("e", "w", ""), Counts(rounds=1), 0.0)
    before = live.snapshot()
    live.add(("e", "w", ""), Counts(rounds=1), 0.0)
    assert before[0][1].rounds == 1


def test_a_scrape_is_bounded_in_engines_and_positions(service: Service, make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine()
    for number in range(MOST_ENGINES + 5):
        engine.engine_id = f"engine-{number:03}"
        engine.hello()
    engine.send(engine.batch(1, drafted=[500], accepted=[500], rounds=1))
    engine.wait_acked(1)
    found = scrape(service)
    assert len(found["honed_engine_connected"]) == MOST_ENGINES
    assert f"engine=engine-{MOST_ENGINES + 4:03} model_name=tiny" in found["honed_engine_connected"], "heard last"
    assert len(found["honed_position_accepted_total"]) == MOST_POSITIONS
    assert len(found["honed_acceptance_length_bucket"]) == MOST_POSITIONS + 1
    assert next(iter(found["honed_acceptance_length_sum"].values())) == 501
