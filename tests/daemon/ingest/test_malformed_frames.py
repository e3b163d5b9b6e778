"""Whatever a process of the group sends is decoded, or counted once; everything behind it goes on."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from honed.adapt.control.controller import MOST_REASONS
from honed.adapt.protocol import wire
from honed.daemon.api.models import StatusView
from honed.daemon.ingest import engines
from honed.daemon.metrics.render import render
from honed.daemon.service import Service
from honed.daemon.store.export import Chosen, export
from honed.daemon.store.pruning import apply_deletions
from honed.daemon.views import views
from honed.daemon.views.plain_json import finite
from tests.daemon.conftest import wait_for
from tests.daemon.fake_engine import FakeEngine, make_batch

MakeEngine = Callable[..., FakeEngine]


def altered(message: Any, path: tuple[str | int, ...], value: Any) -> bytes:
    """The frame of a message with one other value, which its class needn't allow."""
    raw = msgspec.msgpack.decode(wire.encode(message))
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return msgspec.msgpack.encode(raw)


def num_malformed(service: Service) -> int:
    """Stored batches that couldn't be counted."""
    return int(service.store.read("SELECT sum(malformed_batches) AS n FROM boots")[0]["n"])


OUT_OF_RANGE = [
    (("sent_mono_ns",), 2**64 - 1),
    (("sent_unix_ns",), -(2**63)),
    (("sent_unix_ns",), 2**63),
    (("lost_rounds",), 2**63),
    (("first_seq",), -1),
    (("drafter_version",), "v" * 100_000),
    (("workloads",), ["w" * 1_000_000]),
    (("steps", "end_ns"), [2**63]),
    (("steps", "duration_us"), [-1]),
    (("steps", "context_tokens"), [2**64 - 1]),
    (("steps", "decision"), ["d" * 1_000_000]),
    (("rounds", "position"), [2**40] * 8),
    (("rounds", "num_draft_tokens"), [2**62] * 8),
    (("rounds", "num_emitted"), [2**62] * 8),
    (("rounds", "temperature"), [math.nan] * 8),
    (("rounds", "emitted"), [2**31] * 8),
]


@pytest.mark.fault("values out of range in a frame")
@pytest.mark.parametrize(("path", "value"), OUT_OF_RANGE, ids=lambda part: ".".join(part) if isinstance(part, tuple) else "")
def test_a_batch_out_of_range_is_counted_and_those_behind_it_go_on(
    service: Service, make_engine: MakeEngine, tmp_path: Path, path: tuple[str, ...], value: Any
) -> None:
    engine = make_engine()
    engine.hello()
    engine.send_frame(altered(engine.batch(1), path, value))
    engine.send(engine.batch(2))
    engine.wait_acked(2)
    assert num_malformed(service) == (path != ("first_seq",))
    database = service.settings.paths.database
    made = export(database, str(tmp_path / "rounds.parquet"), "parquet", Chosen())
    assert made["rounds"] == 8
    render(service)
    with service.store._db.atomic():  # far in the future everything goes
        apply_deletions(service.store._db, service.settings.store, 1e10)
    assert service.store.read("SELECT * FROM rollups") == service.store.read("SELECT * FROM batches") == []


@pytest.mark.fault("a path with a NUL")
@pytest.mark.parametrize("field", ["target_path", "drafter_path", "draft_model", "capture_path"])
def test_a_path_that_no_file_can_have_is_no_hello(service: Service, make_engine: MakeEngine, field: str) -> None:
    """Whoever looked for its file got a ValueError, where he expects that a file may be missing."""
    engine = make_engine()
    engine.send_frame(altered(engine.hello_message(), (field,), "/models/\0"))
    engine.hello()
    assert service.ingest.figures.rejected["undecodable"] == 1


@pytest.mark.fault("values out of range in a frame")
def test_a_delay_that_is_no_number_is_counted(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    for delay_s in (math.nan, math.inf, -1.0, 1e308):
        engine.send(wire.TrainerStatus(trainer_id="t", state="idle", preemption_delays_s=[delay_s]))
    engine.hello()
    assert service.ingest.figures.rejected == {"undecodable": 4}
    render(service)


@pytest.mark.fault("a batch under another engine's ids")
def test_another_process_cannot_send_under_an_engines_ids(service: Service, make_engine: MakeEngine) -> None:
    engine, stranger = make_engine(), make_engine()
    engine.hello()
    engine.send(engine.batch(1))
    engine.wait_acked(1)
    stranger.send(stranger.hello_message())
    stranger.send(stranger.batch(2, rounds=1))
    stranger.send_status(errors=7)
    wait_for(lambda: service.ingest.figures.rejected["not_introduced"], "the refusal")
    assert service.ingest.figures.rejected["refused_hello"] == 1
    engine.send(engine.batch(2))
    engine.wait_acked(2)
    assert [row["rounds"] for row in service.store.read("SELECT rounds FROM batches")] == [8, 8]
    assert service.engines.get("engine-0").status is None


def test_an_engine_whose_connection_has_ended_comes_back(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.hello()
    for seq in range(1, 4):
        engine.send(engine.batch(seq))
        engine.wait_acked(seq)
        engine.reconnect()
        assert engine.hello().committed_seq == seq


@pytest.mark.fault("engine names and reasons without end")
def test_engine_ids_without_end_push_no_engine_out(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "MOST_ENGINES", 8)
    hello = FakeEngine.hello_message
    now_s = [service.monotonic()]
    monkeypatch.setattr(service.ingest, "_monotonic", lambda: now_s[0])

    class Names:
        boot_id = "boot"
        engine_id = ""

    for number in range(1000):
        Names.engine_id = f"engine-{number}"
        service.on_frame(number.to_bytes(8), wire.encode(hello(Names)))  # type: ignore[arg-type]
    assert list(service.engines.by_id) == [f"engine-{number}" for number in range(8)]
    now_s[0] += 1000.0  # all have fallen silent
    Names.engine_id = "engine-new"
    service.on_frame(b"new", wire.encode(hello(Names)))  # type: ignore[arg-type]
    assert list(service.engines.by_id) == [*(f"engine-{number}" for number in range(1, 8)), "engine-new"]
    assert len(service.engines._boots) == 8


@pytest.mark.fault("engine names and reasons without end")
def test_reasons_without_end_are_counted_as_one(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.hello()
    for seq in range(1, 101):
        engine.send_frame(altered(engine.batch(seq), ("steps", "decision"), [f"reason {seq}"]))
    engine.wait_acked(100)
    assert service.decisions["engine-0", "other"] == 100 - MOST_REASONS
    assert len(service.decisions) == MOST_REASONS + 1


NASTY = st.sampled_from(
    [
        *(0, -1, 1, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
        *(math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324),
        *("", "\0", "\x1b]0;x\x07", "../..", "w" * 100_000, "\ud7ff", None, True, b"\xff"),
        *([], [[]], {}, {"type": "EventBatch"}, [2**64 - 1] * 9, [0] * 9, ["x"] * 9, [math.nan] * 9),
    ]
)
MESSAGES = [
    make_batch(1),
    wire.EngineStatus(
        **dict.fromkeys(wire.EngineStatus.__struct_fields__, 0)
        | {"engine_id": "e", "boot_id": "b", "fallback": "", "drafter_version": "", "is_asleep": False, "policy_age_s": 0.5}
    ),
    wire.CommandResult(engine_id="e", boot_id="b", command_id="c", ok=False, figures={"pause_ms": 1.0}, detail={"a": "b"}),
    wire.TrainerHello(trainer_id="t", device="cpu", yields_to=["*"]),
    wire.TrainerStatus(
        trainer_id="t",
        state="idle",
        preemption_delays_s=[0.5],
        preemption_computing_s=[0.1],
        gate=[wire.GateFigures(workload="w", sessions=1, parent=1.0, candidate=1.0, gain_low=1.0, gain_high=1.0, passed=True)],
    ),
    wire.TrainResult(operation_id="op", ok=False, error="x"),
    wire.Purged(operation_id="op", problems=["x"]),
]
BOOTS = count()


def paths_of(raw: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Ways to everything inside a decoded message."""
    inside = raw.items() if isinstance(raw, dict) else enumerate(raw[:2]) if isinstance(raw, list) else ()
    return [path for key, value in inside for path in ((*at, key), *paths_of(value, (*at, key)))]


@hypothesis_settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_frames_go_through_decoder_ingest_and_store(service: Service, data: st.DataObject) -> None:
    boot = {"engine_id": "engine-0", "boot_id": f"boot-{next(BOOTS):06}"}
    peer = boot["boot_id"].encode()
    hello = FakeEngine.hello_message(type("Names", (), boot))  # type: ignore[arg-type]
    service.on_frame(peer, wire.encode(hello))
    for number in range(data.draw(st.integers(1, 4))):
        message = data.draw(st.sampled_from([*MESSAGES, hello]))
        raw = msgspec.msgpack.decode(wire.encode(message))
        raw |= {name: value for name, value in boot.items() if name in raw}
        if "seq" in raw:
            raw["seq"] = number + 1
        for _ in range(data.draw(st.integers(0, 3))):
            paths = paths_of(raw)
            *way, last = data.draw(st.sampled_from(paths))
            place = raw
            for key in way:
                place = place[key]
            place[last] = copy.deepcopy(data.draw(NASTY))
        frame = bytearray(msgspec.msgpack.encode(raw))
        if data.draw(st.integers(0, 3)) == 0:
            frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
        service.on_frame(peer, bytes(frame))
    service.on_frame(peer, wire.encode(hello))
    engine = service.engines.get("engine-0")
    if engine.boot.boot_id == boot["boot_id"]:
        seq = engine.boot.sequence.accepted + 1
        service.on_frame(peer, wire.encode(make_batch(seq, **boot)))
        assert service.store.drain(20.0)
        assert engine.boot.committed_seq == seq
    while service.steering.observe():
        pass
    service.steer(service.monotonic())
    with service.lock:
        service.tick(service.monotonic())
    StatusView.model_validate(json.loads(json.dumps(finite(views.status(service)), allow_nan=False)))
    render(service)
    service.on_close(peer)


def test_the_log_of_mutated_frames_can_be_exported(service: Service, tmp_path: Path) -> None:
    test_mutated_frames_go_through_decoder_ingest_and_store(service)
    assert num_malformed(service)
    assert service.store.errors == 0
    database = service.settings.paths.database
    assert export(database, str(tmp_path / "rounds.parquet"), "parquet", Chosen())["rounds"]
    assert export(database, str(tmp_path / "rounds.jsonl"), "jsonl", Chosen())["rounds"]


def test_faults_without_end_fill_no_journal(
    service: Service, make_engine: MakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine()
    engine.hello()
    capsys.readouterr()
    for seq in range(1, 51):
        engine.send(engine.batch(seq, accepted=[4] * 8))
    engine.wait_acked(50)
    assert num_malformed(service) == 50
    assert capsys.readouterr().out.count("malformed batch") == 1
