from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest

from honed.adapt.protocol import wire
from honed.daemon.metrics.training import TRAINER_STATES
from honed.daemon.service import Service
from honed.daemon.settings.settings import Settings
from honed.daemon.views import views
from tests.daemon.conftest import wait_for
from tests.daemon.exposition import scrape
from tests.daemon.fake_engine import FakeEngine, FakeTrainer


def states(service: Service) -> set[str]:
    return {labels for labels, value in scrape(service)["honed_trainer_state"].items() if value}


def test_without_a_trainer_it_is_absent_and_says_nothing_of_it(service: Service) -> None:
    found = scrape(service)
    assert states(service) == {"state=absent"}
    assert len(found["honed_trainer_state"]) == len(TRAINER_STATES)
    assert found["honed_training_steps_total"] == {"": 0}
    assert "honed_training_loss" not in found


def test_a_trainers_figures(service: Service, settings: Settings) -> None:
    with closing(FakeTrainer(settings.paths.engine_socket)) as trainer:
        trainer.introduce()
        check_figures(service, trainer)
        trainer.introduce()  # as after a lost connection
        found = scrape(service)
        assert "honed_samples_nonfinite_rows_total" not in found, "0 would be a counter that falls"
        assert "honed_samples_held_bytes" not in found


def check_figures(service: Service, trainer: FakeTrainer) -> None:
    status = {"operation_id": "op-1", "state": "training", "steps": 30, "tokens": 600, "preemptions": 2, "loss": 1.5}
    status |= {"dropped_updates": 2, "nonfinite_rows": 9}
    figures = {"samples_bytes": 4096, "spilled_bytes": 512, "idle_ratio": 0.75}
    trainer.send(wire.TrainerStatus(trainer_id="trainer-0", **status, **figures, preemption_delays_s=[0.004, 0.02]))
    wait_for(lambda: states(service) == {"state=training"}, "the trainer's state")
    found = scrape(service)
    assert found["honed_training_loss"] == {"": 1.5}
    assert found["honed_gpu_idle_ratio"] == {"": 0.75}
    assert found["honed_samples_held_bytes"] == {"": 4096}
    assert found["honed_samples_spilled_bytes"] == {"": 512}
    assert found["honed_samples_nonfinite_rows_total"] == {"": 9}
    assert found["honed_training_dropped_updates_total"] == {"": 2}
    # Its own figures begin anew with the next operation; a counter goes on.
    status |= {"operation_id": "op-2", "steps": 5, "state": "waiting", "dropped_updates": 1}
    told = {"preemption_delays_s": [0.002, 3.0], "preemption_computing_s": [0.125, 0.5]}
    trainer.send(wire.TrainerStatus(trainer_id="trainer-0", **status, **told))
    wait_for(lambda: states(service) == {"state=waiting"}, "the next operation")
    found = scrape(service)
    assert found["honed_training_steps_total"] == {"": 35}
    assert found["honed_training_tokens_total"] == {"": 1200}
    assert found["honed_training_preemptions_total"] == {"": 4}
    assert found["honed_training_dropped_updates_total"] == {"": 3}
    buckets = found["honed_training_preemption_seconds_bucket"]
    assert [buckets[f"le={bound}"] for bound in ("0.001", "0.0025", "0.005", "0.025", "2.5", "+Inf")] == [0, 1, 2, 3, 3, 4]
    assert found["honed_training_preemption_seconds_sum"][""] == pytest.approx(3.026)
    computed = found["honed_training_preemption_computing_seconds_bucket"]
    assert [computed[f"le={bound}"] for bound in ("0.1", "0.25", "0.5", "+Inf")] == [0, 1, 2, 2]
    assert found["honed_training_preemption_computing_seconds_sum"][""] == pytest.approx(0.625)
    view = views.status(service)["trainer"]
    assert view["preemption_delays_s"] == [0.004, 0.02, 0.002, 3.0]
    assert view["preemption_computing_s"] == [0.125, 0.5]
    assert (view["preemption_s_p50"], view["preemption_s_p99"]) == (0.004, 3.0)
    assert view["preemption_computing_s_p99"] == 0.5
    # Quantiles are of more of them than are shown.
    many = {"preemption_delays_s": [0.01] * 100, "preemption_computing_s": [0.002] * 100}
    trainer.send(wire.TrainerStatus(trainer_id="trainer-0", **status | {"steps": 6}, **many))
    wait_for(lambda: scrape(service)["honed_training_steps_total"] == {"": 36}, "the last status")
    view = views.status(service)["trainer"]
    assert view["preemption_computing_s"] == [0.002] * 100
    assert (view["preemption_s_p99"], view["preemption_computing_s_p99"]) == (0.02, 0.125)


def test_what_an_engine_captured(service: Service, make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine()
    engine.hello()
    engine.send_status(captured_rows=100, capture_skipped_rows=7, capture_nonfinite_rows=3, capture_media_requests=2)
    wait_for(lambda: scrape(service).get("honed_captured_rows_total"), "the status")
    found = scrape(service)
    assert found["honed_captured_rows_total"] == {"engine=engine-0 model_name=tiny": 100}
    assert found["honed_capture_skipped_rows_total"] == {"engine=engine-0 model_name=tiny": 7}
    assert found["honed_capture_nonfinite_rows_total"] == {"engine=engine-0 model_name=tiny": 3}
    assert found["honed_capture_media_requests_total"] == {"engine=engine-0 model_name=tiny": 2}
    assert views.engines(service)[0]["nonfinite_rows"] == 3
