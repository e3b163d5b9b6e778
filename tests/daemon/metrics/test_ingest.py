from __future__ import annotations

from collections.abc import Callable

from honed.daemon.service import Service
from tests.daemon.conftest import wait_for
from tests.daemon.exposition import scrape
from tests.daemon.fake_engine import FakeEngine

ENGINE = "engine=engine-0 model_name=tiny"


def test_what_came_and_what_got_lost_is_counted(service: Service, make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine()
    assert "honed_last_event_timestamp_seconds" not in scrape(service), "else it would be 1970"
    engine.hello()
    engine.send(engine.batch(1))
    engine.send(engine.batch(1))
    engine.send(engine.batch(3))
    engine.send(engine.batch(2, lost_rounds=5))
    engine.send_status(queue_bytes=1234)
    engine.wait_acked(2)
    wait_for(lambda: scrape(service)["honed_engine_queue_bytes"] == {ENGINE: 1234}, "the status")
    found = scrape(service)
    assert found["honed_events_received_total"] == {"": 16}
    assert found["honed_event_batches_received_total"] == {"": 2}
    assert found["honed_event_batches_duplicate_total"] == {"": 1}
    assert found["honed_event_batches_ahead_total"] == {"": 1}
    assert found["honed_events_lost_total"] == {f"{ENGINE} reason=queue_full": 5}
    assert found["honed_event_batches_lost_total"] == {f"{ENGINE} reason=malformed": 0, f"{ENGINE} reason=missing": 0}
    assert found["honed_event_queue_length"] == {"": 0}
    assert found["honed_last_event_timestamp_seconds"][""] > service.started_unix_s - 1
    assert 0 <= found["honed_event_lag_seconds"][""] < 60


def test_a_frame_that_nobody_can_read_has_a_reason_out_of_a_small_set(
    service: Service, make_engine: Callable[..., FakeEngine]
) -> None:
    make_engine().send_frame(b"\x00")
    for parts in range(2, 5):
        # A connection that broke the protocol is closed: what its peer sends before it notices is lost. So each has its own.
        make_engine().send_frame(*[b"x"] * parts)
        wait_for(lambda: service.ingest.figures.rejected["broken_protocol"] == parts - 1, "the odd frame")  # noqa: B023
    service.on_odd_frame("a reason of the future")
    found = {name: value for name, value in scrape(service)["honed_frames_rejected_total"].items() if value}
    assert found == {"reason=undecodable": 1, "reason=broken_protocol": 3, "reason=other": 1}
    assert scrape(service)["honed_events_received_total"] == {"": 0}
