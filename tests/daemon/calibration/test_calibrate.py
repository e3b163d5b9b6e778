"""`honed calibrate` with the real daemon: a served target over HTTP, engine and trainer over the real socket."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from click.testing import Result
from typer.testing import CliRunner

from honed.adapt.protocol import wire
from honed.daemon.calibration.calibrate import STUCK_S, CalibrationError, sessions_for, until_registered
from honed.daemon.client.client import AdminClient
from honed.daemon.commands.main import app
from honed.daemon.process.serve import start
from honed.daemon.settings.settings import load
from honed.recalib.registry.registry import Registry
from tests.daemon.fake_engine import FakeTrainer, ServingEngine
from tests.daemon.lifecycle.test_lifecycle import write_checkpoint
from tests.daemon.served_model import ServedModel, serving_model
from tests.tools import ROOT

ROWS_PER_ANSWER = 100
NUM_PROMPTS = 64


@dataclass
class Site:
    """A machine on which a target is served: a thread works engine and trainer while commands run."""

    admin: Path
    model: ServedModel
    engine: ServingEngine
    trainer: FakeTrainer
    registry: Registry
    first: str
    captures: bool = True
    loses: bool = False
    """Whether the ring is too small: a record is lost for each answer."""
    gate_error: str = ""
    requests: list[wire.TrainRequest] = field(default_factory=list)
    share: float = 0.0
    shares: list[float] = field(default_factory=list)
    """Capture share in force at each answer."""
    prompts: Path = Path()

    def run(self, *arguments: Any) -> Result:
        words = ["calibrate", "--url", self.model.url, "--prompts", self.prompts, *arguments]
        return CliRunner().invoke(app, [str(word) for word in words])

    def work(self) -> None:
        """One turn of the engine and of the trainer."""
        self.engine.turn(0)
        policies = [message for message in self.engine.received if isinstance(message, wire.Policy)]
        self.share = policies[-1].capture_share if policies else 0.0
        rows = ROWS_PER_ANSWER * sum(share == 1.0 for share in self.shares) if self.captures else 0
        self.engine.send_status(captured_rows=rows, policy_generation=policies[-1].generation if policies else 0)
        if self.loses:
            lost = len(self.model.asked)
            self.trainer.send(wire.TrainerStatus(trainer_id="trainer-0", state="idle", ring_lost_records=lost))
        while (message := self.trainer.receive()) is not None:
            if isinstance(message, wire.TrainRequest):
                self._train(message)

    def _train(self, request: wire.TrainRequest) -> None:
        self.requests.append(request)
        version = ""
        if not self.gate_error:
            version = self.registry.create(
                lambda folder: write_checkpoint(folder, 2.0), parent=self.first, target_path="/models/tiny"
            ).version
        row = wire.GateFigures(
            workload="", sessions=9, parent=1.0, candidate=1.5, gain_low=1.2, gain_high=1.8, passed=bool(version)
        )
        self.trainer.send(
            wire.TrainResult(
                operation_id=request.operation_id, ok=True, version=version, error=self.gate_error, gate=[row], steps=5
            )
        )


@pytest.fixture
def site(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    paths = {"runtime_dir": folder / "run", "state_dir": folder / "state"}
    monkeypatch.setenv("HONED_RUNTIME_DIR", str(paths["runtime_dir"]))
    monkeypatch.setenv("HONED_STATE_DIR", str(paths["state_dir"]))
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setattr("honed.daemon.calibration.calibrate.STEADY_S", 0.1)
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    write_checkpoint(folder / "drafter", 0.0)
    with ExitStack() as stack, serving_model() as model:
        stack.callback(structlog.reset_defaults)
        flags = {"paths": paths, "http": {"metrics_listen": ""}, "events": {"engine_lost_s": 300.0}}
        flags["trainer"] = {"min_training_tokens": 1000}
        start(load(None, flags), stack)
        engine = ServingEngine(paths["runtime_dir"] / "engine.sock", checkpoint=str(folder / "drafter"))
        stack.callback(engine.close)
        trainer = FakeTrainer(paths["runtime_dir"] / "engine.sock")
        stack.callback(trainer.close)
        first = engine.attach(capture_path="/ring", features="layers").drafter_version
        trainer.introduce()
        made = Site(
            paths["runtime_dir"] / "admin.sock", model, engine, trainer, Registry(paths["state_dir"] / "registry"), first
        )
        model.on_answer = lambda: made.shares.append(made.share)
        made.prompts = tmp_path / "prompts.jsonl"
        made.prompts.write_text("".join(f'{{"prompt": "{"word " * 200}{i}", "class": "code"}}\n' for i in range(NUM_PROMPTS)))
        is_over = threading.Event()

        def keep_working() -> None:
            while not is_over.wait(0.02):
                made.work()

        worker = threading.Thread(target=keep_working, daemon=True)
        worker.start()
        stack.callback(worker.join)
        stack.callback(is_over.set)
        yield made


def overrides(site: Site) -> list[dict[str, Any]]:
    with AdminClient(site.admin) as client:
        found: list[dict[str, Any]] = client.get("/v1/overrides")
    return found


def test_prompts_are_played_captured_and_learnt_from(site: Site) -> None:
    done = site.run("--max-tokens", 50, "--temperature", 0.8, "--top-p", 0.9, "--max-seconds", 30, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["version"] == site.registry.versions()[-1].version != site.first
    assert found["collected"] | {"seconds": 0} == {
        "engine_id": "engine-0",
        "captured_rows": NUM_PROMPTS * ROWS_PER_ANSWER,
        "lost_records": 0,
        "prompts": NUM_PROMPTS,
        "failed": 0,
        "prompt_tokens": NUM_PROMPTS * 201,
        "completion_tokens": NUM_PROMPTS * 50,
        "seconds": 0,
    }
    assert found["operation"]["stage"] == "canary"
    (request,) = site.requests
    assert (request.scope, request.workloads, request.max_seconds) == ("full", [], 30.0)
    for body in site.model.asked:
        assert (body["max_tokens"], body["temperature"], body["top_p"]) == (50, 0.8, 0.9)
        assert body["vllm_xargs"]["honed_workload"] == "code"
    assert len({body["vllm_xargs"]["honed_session"] for body in site.model.asked}) == NUM_PROMPTS
    assert overrides(site) == []


def test_an_operator_s_own_override_is_in_force_again_afterwards(site: Site) -> None:
    with AdminClient(site.admin) as client:
        client.put("/v1/overrides/capture_share", {"value": 0.25, "ttl_s": 900, "reason": "mine"})
    assert site.run("--max-tokens", 50).exit_code == 0
    (left,) = overrides(site)
    assert (left["value"], left["reason"]) == (0.25, "mine")
    assert 800 < left["ttl_s"] < 900


def test_promote_swaps_the_version_in_without_a_trial(site: Site) -> None:
    done = site.run("--max-tokens", 50, "--promote", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["promotion"]["state"] == "succeeded"
    assert site.engine.live_version == found["version"] == site.registry.alias("active")
    with AdminClient(site.admin) as client:
        assert client.get("/v1/status")["canary"] is None


def test_what_the_gate_refuses_ends_with_1_and_its_figures(site: Site) -> None:
    site.gate_error = "gate: no sure gain on the traffic as a whole"
    done = site.run("--max-tokens", 50)
    assert done.exit_code == 1
    assert "no sure gain" in done.stdout
    assert "1.50" in done.stdout
    assert len(site.registry.versions()) == 1


def test_too_few_prompts_are_refused_before_any_is_played(site: Site) -> None:
    few = site.run("--limit", 60)
    assert few.exit_code == 2
    assert "a comparison needs 6" in few.stderr
    short = site.run("--max-tokens", 15)
    assert short.exit_code == 2
    assert "at most 716 tokens for training, 1,000 are needed" in short.stderr
    assert site.model.asked == []


@pytest.mark.parametrize(("held_out", "share"), [(6, 0.2), (8, 0.2), (6, 0.5), (6, 1.0), (1, 0.01)])
def test_enough_sessions_are_asked_for_that_enough_of_them_are_held_out(held_out: int, share: float) -> None:
    """30 at a fifth fell short in two of five cases, after all prompts had been played."""
    least, rng = sessions_for(held_out, share), np.random.default_rng(0)
    assert (rng.binomial(least, share, 100_000) < held_out).mean() == pytest.approx(0.01, abs=0.01)
    if share < 1.0:
        assert (rng.binomial(least - 1, share, 100_000) < held_out).mean() > 0.008


def test_prompts_that_do_not_fit_are_left_out_and_named(site: Site) -> None:
    none = site.run("--max-tokens", 1000)
    assert none.exit_code == 2
    assert "no prompt fits" in none.stderr
    site.prompts.write_text(site.prompts.read_text() + json.dumps({"prompt": "word " * 1000}) + "\n")
    done = site.run("--max-tokens", 50, "--json")
    assert done.exit_code == 0, done.output
    assert f"1 prompts don't fit the server's context and are left out: {NUM_PROMPTS + 1}" in done.stderr
    assert len(site.model.asked) == NUM_PROMPTS


def test_another_server_than_the_engine_s_is_noticed(site: Site) -> None:
    site.captures = False
    done = site.run("--max-tokens", 50)
    assert done.exit_code == 1
    assert "nothing was captured" in done.stderr
    assert site.requests == []
    assert overrides(site) == []


def test_records_that_the_ring_lost_are_told(site: Site) -> None:
    site.loses = True
    done = site.run("--max-tokens", 50, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["collected"]["lost_records"] == NUM_PROMPTS
    assert f"{NUM_PROMPTS} records were overwritten before they were read" in done.stderr
    assert "HONED_RING_BYTES" in done.stderr


def test_a_few_prompts_may_fail_but_not_many(site: Site) -> None:
    lines = site.prompts.read_text().splitlines()
    refused = json.dumps({"prompt": "refuse " * 100})
    site.prompts.write_text("\n".join([*lines, refused]) + "\n")
    done = site.run("--max-tokens", 50, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["collected"]["failed"] == 1
    site.prompts.write_text("\n".join([*lines, *[refused] * 9]) + "\n")
    with AdminClient(site.admin) as client:
        client.post(f"/v1/operations/{json.loads(done.stdout)['operation']['operation_id']}:cancel")
    many = site.run("--max-tokens", 50)
    assert many.exit_code == 1
    assert f"9 of {NUM_PROMPTS + 9} prompts failed; the first: line {NUM_PROMPTS + 1}: HTTP 400: I don't" in many.stderr


def test_what_stands_in_the_way_is_said_before_any_prompt_is_played(site: Site) -> None:
    with AdminClient(site.admin) as client:
        client.post("/v1/training:pause")
        assert "honed resume" in site.run().stderr
        client.post("/v1/training:resume")
        assert "engine 'other' that captures" in site.run("--engine", "other").stderr
        site.engine.send(site.engine.hello_message(capture_path="/ring", features="fused"))
        deadline_s = time.monotonic() + 20
        while client.get("/v1/engines")[0]["captures"] != "fused" and time.monotonic() < deadline_s:
            time.sleep(0.02)
        refused = site.run("--scope", "full")
        assert "HONED_FEATURES=layers" in refused.stderr
        assert refused.exit_code == 1
    assert site.model.asked == []


def test_the_api_refuses_a_full_training_on_fused_features_too(site: Site) -> None:
    with AdminClient(site.admin) as client:
        site.engine.send(site.engine.hello_message(capture_path="/ring", features="fused"))
        deadline_s = time.monotonic() + 20
        while client.get("/v1/engines")[0]["captures"] != "fused" and time.monotonic() < deadline_s:
            time.sleep(0.02)
        with pytest.raises(RuntimeError, match="captures fused features") as refused:
            client.post("/v1/recalibrations", {"scope": "full"})
    assert "HONED_FEATURES=layers" in refused.value.cure  # type: ignore[attr-defined]


class Told:
    """An admin API that notes what is posted to it."""

    def __init__(self) -> None:
        self.posted: list[str] = []

    def post(self, path: str, body: Any = None) -> None:
        self.posted.append(path)


def test_collecting_without_end_is_given_up_and_cancelled() -> None:
    clock = iter([0.0, STUCK_S, STUCK_S + 1.0])
    stuck = {"operation_id": "op-1", "state": "running", "stage": "collecting", "detail": {"state": "collecting"}}
    told = Told()
    with pytest.raises(CalibrationError, match="too little was captured"):
        list(until_registered(told, [stuck] * 9, lambda: next(clock)))  # type: ignore[arg-type]
    assert told.posted == ["/v1/operations/op-1:cancel"]


def test_an_engine_that_is_busy_is_waited_for() -> None:
    waiting = {"operation_id": "op-1", "state": "running", "stage": "collecting", "detail": {"state": "waiting"}}
    clock: Callable[[], float] = iter(range(0, 10_000, 50)).__next__
    over = waiting | {"state": "failed"}
    views = list(until_registered(Told(), [waiting] * 9 + [over], clock))  # type: ignore[arg-type]
    assert len(views) == 10


def test_a_new_drafter_is_written_by_a_program_of_its_own(tmp_path: Path) -> None:
    target = ROOT / "benchmarks" / "tiny" / "target"
    asked = [sys.executable, "-m", "honed.daemon.commands.main", "calibrate", "--new-drafter", str(tmp_path / "new")]
    done = subprocess.run(
        [*asked, "--target", str(target), "--layers", "1", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["num_layers"], made["block_size"], made["mask_token_id"]) == (1, 16, 1)
    assert (tmp_path / "new" / "model.safetensors").exists()
    again = subprocess.run([*asked, "--target", str(target)], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "is not an empty folder" in again.stderr


@pytest.mark.parametrize("words", ["", "--url http://127.0.0.1:1", "--new-drafter x", "--url u --prompts p --scope half"])
def test_wrong_usage_ends_with_2(words: str) -> None:
    assert CliRunner().invoke(app, ["calibrate", *words.split()]).exit_code == 2


@pytest.mark.parametrize("command", ["calibrate", "retention"])
def test_an_address_without_http_is_wrong_usage(tmp_path: Path, command: str) -> None:
    (tmp_path / "prompts").write_text("one\n")
    asked = [command, "--url", "127.0.0.1:8000", "--prompts", str(tmp_path / "prompts")]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2
    assert "'127.0.0.1:8000' isn't a server's address" in result.stderr
    assert "Write http://127.0.0.1:8000." in result.stderr


@pytest.mark.fault("a URL that can't be read")
@pytest.mark.parametrize("command", ["calibrate", "retention"])
@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "http://[::1", "http://.."])
def test_an_address_that_cannot_be_read_is_wrong_usage(tmp_path: Path, command: str, url: str) -> None:
    (tmp_path / "prompts").write_text("one\n")
    result = CliRunner().invoke(app, [command, "--url", url, "--prompts", str(tmp_path / "prompts")])
    assert result.exit_code == 2
    assert f"'{url}' isn't a server's address: " in result.stderr
    assert "Write http://host:port." in result.stderr
