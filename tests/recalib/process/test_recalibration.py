"""One operation, unit by unit, with a clock that the test turns."""

import json
import re
import time
from collections import Counter
from dataclasses import replace
from shutil import copyfile, copytree

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from honed.adapt.protocol import wire
from honed.adapt.protocol.sample_ring import FLAG_PREFILL
from honed.attach.capture.ring_writer import RingWriter
from honed.recalib.config.drafter import Mtp
from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.drafter.checkpoint import load_drafter
from honed.recalib.gate.gate import GateSettings, judge
from honed.recalib.process.contexts import contexts_of
from honed.recalib.process.recalibration import Recalibration, _blend
from honed.recalib.registry.registry import Registry
from honed.recalib.samples.hold_out import HoldOut
from honed.recalib.samples.selection import Selection
from honed.recalib.samples.traffic import Traffic
from honed.recalib.training.micro_step import MicroTrainer
from honed.recalib.training.mixture import MUST_GAIN_SHARE, WorkloadMix
from honed.recalib.training.pace import Pace
from honed.recalib.training.progress import OperationError
from honed.recalib.training.training_run import TrainingRun
from honed.recalib.training.training_state import TrainingState
from tests.recalib.toy_traffic import WIDTH, make_pair, tokens, write_sessions

SETTINGS = TrainerSettings(
    min_training_tokens=1000, max_steps=300, rows_per_micro_step=120, learning_rate=5e-3, micro_steps_per_update=1
)


class Site:
    """A registry, a ring and a clock."""

    def __init__(self, folder):
        self.target, drafter = make_pair(folder)
        self.registry = Registry(folder / "registry")
        self.parent = self.registry.import_checkpoint(drafter, target_path=str(self.target))
        self.ring = RingWriter(folder / "engines" / "e" / "ring", 1 << 22, WIDTH)
        self.traffic = Traffic(folder, SETTINGS, HoldOut(b"k" * 16), context_of=contexts_of(self.registry))
        self.traffic.discover()
        self.now_s = 0.0
        self.state_dir = None
        self.reading_s = 0.0

    def begin(self, settings=SETTINGS, gate=None, **request):
        while self.traffic.poll():
            pass
        request = {"workloads": ["b"], "max_seconds": 1e9, "parent_version": self.parent.version} | request
        return Recalibration(
            wire.TrainRequest(
                operation_id="op",
                capture_paths=[str(self.ring.path)],
                target_path=str(self.target),
                **request,
            ),
            settings,
            gate or GateSettings(min_sessions=3, confidence=0.8),
            self.registry,
            self.traffic.feeds[0],
            self.clock,
            self.state_dir,
        )

    def clock(self):
        self.now_s += self.reading_s  # a clock that nobody turns, so that even a micro-step takes time
        return self.now_s

    def finish(self, operation):
        while operation.result is None:
            self.now_s += 0.01
            operation.advance()
        return operation.result


@pytest.fixture
def site(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the trainer does: several would fight other processes for the cores
    yield Site(tmp_path)
    torch.set_num_threads(threads)


def held_out(operation, is_usable=lambda stretch: True):
    return operation._held_out("b", Selection(operation._feed.store, is_usable))


def test_long_sessions_are_held_out_in_as_many_as_the_gate_needs(site):
    """The limit is in rows that are judged, and a few long sessions don't use it up before a gain can be judged at all."""
    write_sessions(site.ring, "b", 40)
    operation = site.begin(replace(SETTINGS, max_gate_rows=1))
    held = held_out(operation)
    assert len({stretch.session for stretch in held}) == 3
    assert operation._missing(Selection(site.traffic.feeds[0].store, lambda stretch: True)) == ""
    every = held_out(site.begin(replace(SETTINGS, max_gate_rows=1 << 20)))
    most = sum(stretch.num_judged for stretch in every) - 1
    limited = held_out(site.begin(replace(SETTINGS, max_gate_rows=most)))
    assert limited == every, "prompts don't count"
    assert not held_out(site.begin(), lambda stretch: stretch.num_judged == 0)


def test_makes_a_version_that_is_better_in_the_type_it_is_stored_in(site):
    write_sessions(site.ring, "a", 30)
    write_sessions(site.ring, "b", 40)
    result = site.finish(site.begin(reason="drift", vllm_version="0.32.0"))
    assert result.ok
    assert result.error == ""
    manifest = site.registry.verify(result.version)
    assert manifest.vllm_version == "0.32.0"
    assert manifest.data_window["rows"].keys() == {"a", "b"}
    assert len(manifest.data_window["digest"]) == 32
    assert (manifest.parent, manifest.note, manifest.bytes) == (site.parent.version, "drift", site.parent.bytes)
    assert {g.workload: g.must_gain for g in result.gate} == {"a": False, "b": True}
    assert result.train_seconds <= result.elapsed_s


def test_old_traffic_is_drawn_and_kept_while_the_rate_falls(site, monkeypatch):
    write_sessions(site.ring, "a", 30)
    write_sessions(site.ring, "b", 40)
    mixes, kept, remaining = [], set(), []
    mix, parts = WorkloadMix.__init__, MicroTrainer.parts

    def note_mix(made, samples, must_gain, share, *more):
        mixes.append((list(must_gain), share))
        mix(made, samples, must_gain, share, *more)

    def note_parts(trainer, samples, **more):
        kept.update((sample.workload, is_kept) for sample, is_kept in zip(samples, more["kept"], strict=True))
        remaining.append(more["remaining"])
        return parts(trainer, samples, **more)

    monkeypatch.setattr(WorkloadMix, "__init__", note_mix)
    monkeypatch.setattr(MicroTrainer, "parts", note_parts)
    assert site.finish(site.begin(max_steps=20)).ok
    assert mixes == [(["b"], MUST_GAIN_SHARE)]
    assert kept == {("a", True), ("b", False)}
    assert remaining == pytest.approx([1.0 - step / 20 for step in range(20)], abs=0.001)
    kept.clear()
    site.finish(site.begin(max_steps=1, workloads=[]))
    assert {is_kept for _, is_kept in kept} == {False}, "any gain counts there"


def test_a_workload_that_drifted_is_learned_from_what_came_since(site):
    """Text of "a" came under the label "b" before: the gain is judged on the rest, and the earlier text is kept."""
    clock = site.traffic.feeds[0]._assembler
    clock._came_s = lambda: (100.0, 100.0)
    write_sessions(site.ring, "a", 40, label="b")
    while site.traffic.poll():
        pass
    clock._came_s = lambda: (200.0, 200.0)
    operation = site.begin(since_s=150.0)
    for _ in range(5):
        operation.advance()
    assert operation.progress.stage == "collecting", "earlier samples say nothing of what has to gain"
    write_sessions(site.ring, "b", 40)
    while site.traffic.poll():
        pass
    result = site.finish(operation)
    assert result.error == ""
    assert {g.workload: g.must_gain for g in result.gate} == {"b": True, "b (earlier)": False}
    rows = site.registry.verify(result.version).data_window["rows"]
    assert rows.keys() == {"b", "b (earlier)"}


def test_dry_run_judges_and_keeps_nothing(site):
    write_sessions(site.ring, "b", 40)
    result = site.finish(site.begin(dry_run=True))
    assert (result.ok, result.version) == (True, "")
    assert result.gate[0].candidate > result.gate[0].parent
    assert len(site.registry.versions()) == 1


def test_candidate_that_does_not_gain_is_refused_with_the_reason(site):
    write_sessions(site.ring, "b", 40)
    result = site.finish(site.begin(max_steps=1))
    assert (result.ok, result.version, result.steps) == (True, "", 1)
    assert result.error.startswith("gate: no sure gain")
    assert len(site.registry.versions()) == 1


def test_waits_for_samples_and_goes_on_when_they_come(site):
    operation = site.begin()
    for _ in range(5):
        operation.advance()
    assert (operation.progress.stage, operation.needs_device) == ("collecting", False)
    write_sessions(site.ring, "b", 40)
    while site.traffic.poll():
        pass
    operation.advance()
    assert (operation.progress.stage, operation.needs_device) == ("training", True)


def test_says_what_is_missing_when_samples_do_not_come(site):
    write_sessions(site.ring, "b", 3)
    operation = site.begin()
    operation.advance()
    site.now_s = SETTINGS.collect_s + 1
    result = site.finish(operation)
    assert not result.ok
    assert "of 1000 emitted tokens" in result.error
    assert "held-out sessions of workload 'b'" in result.error
    assert "not used" not in result.error
    assert result.error.endswith("wait for it longer (trainer.collect_s)")


def test_says_what_could_not_be_used_when_samples_do_not_come(site):
    write_sessions(site.ring, "b", 3, version="unknown")
    write_sessions(site.ring, "b", 2, seed=1)
    write_sessions(site.ring, "b", 9, seed=2, rows=8)  # before the operation begins
    operation = site.begin(since_s=time.time() + 1.0)
    operation.advance()
    site.ring.write_rows("long-prompt", "b", "", 0, tokens("b", 0, 40), bfloat16(1.0, 40), FLAG_PREFILL)
    site.ring.write_rows("long-prompt", "b", "", 40, tokens("b", 40, 1), bfloat16(1.0, 1))
    site.ring.write_end("long-prompt", "b")
    write_sessions(site.ring, "b", 4, seed=3, rows=8)
    while site.traffic.poll():
        pass
    site.now_s = SETTINGS.collect_s + 1
    unused = site.finish(operation).error.split("; ")[1]
    assert unused.startswith("not used: 4 answers too short or repetitive, ")
    assert set(unused.removeprefix("not used: ").split(", ")[1:]) == {
        "3 answers with another drafter's features",
        "1 answers of one token",
        "2 answers from before the drift",
    }


def test_deadline_ends_an_operation_that_only_waits(site):
    write_sessions(site.ring, "b", 40)
    operation = site.begin()
    operation.advance()
    site.now_s = SETTINGS.deadline_s - 1
    operation.keep_waiting()
    assert operation.result is None
    site.now_s = SETTINGS.deadline_s + 1
    operation.keep_waiting()
    assert "rarely idle at the same time" in operation.result.error


def test_a_deadline_amid_judging_names_the_setting_that_bounds_it(site):
    """It blamed idle engines that were busy judging."""
    write_sessions(site.ring, "b", 40)
    operation = site.begin()
    while operation.progress.stage != "gating":
        operation.advance()
    site.now_s += SETTINGS.deadline_s + 1
    operation.keep_waiting()
    assert "trainer.max_gate_rows" in operation.result.error


def test_where_little_time_is_left_for_training_what_was_learned_is_judged(site):
    """Beside requests training may get a fiftieth of the time: all micro-steps would take longer than the deadline."""
    write_sessions(site.ring, "b", 40)
    operation = site.begin()
    while operation.progress.steps < 100:
        site.now_s += 0.01
        operation.advance()
    site.now_s += 0.3 * SETTINGS.deadline_s
    while operation.progress.steps < 120:
        site.now_s += 0.01
        operation.advance()
    site.now_s += 0.3 * SETTINGS.deadline_s
    result = site.finish(operation)
    assert result.ok
    assert 120 <= result.steps <= 121 < SETTINGS.max_steps
    assert result.is_cut_short
    assert result.gate


def test_a_training_that_begins_late_has_half_of_what_is_left(site):
    """The engines were busy for most of the time, and are idle now."""
    write_sessions(site.ring, "b", 40)
    operation = site.begin()
    while operation.progress.stage == "collecting":
        operation.advance()
    site.now_s += 0.7 * SETTINGS.deadline_s
    result = site.finish(operation)
    assert result.steps == SETTINGS.max_steps
    assert not result.is_cut_short
    assert result.version


def test_a_training_without_time_for_an_update_is_not_judged(site):
    write_sessions(site.ring, "b", 40)
    operation = site.begin(replace(SETTINGS, micro_steps_per_update=8))
    while not operation.progress.steps:
        site.now_s += 0.01
        operation.advance()
    site.now_s += 0.6 * SETTINGS.deadline_s
    result = site.finish(operation)
    assert not result.ok
    assert "no time was left for an update" in result.error
    assert not result.gate


def test_the_deadline_does_not_count_training(site):
    write_sessions(site.ring, "b", 40)
    operation = site.begin()
    operation.advance()
    operation.progress.train_seconds = 2 * SETTINGS.deadline_s
    site.now_s = 3 * SETTINGS.deadline_s - 1
    operation.keep_waiting()
    assert operation.result is None
    site.now_s = 3 * SETTINGS.deadline_s + 1
    operation.keep_waiting()
    assert f"{2 * SETTINGS.deadline_s:.0f} s were spent training" in operation.result.error


def test_max_seconds_counts_training_only(site):
    """A reading of the clock takes a millisecond, and serving takes a second between two parts."""
    write_sessions(site.ring, "b", 40)
    site.reading_s = 0.001
    operation = site.begin(max_seconds=0.05)
    while operation.result is None:
        site.now_s += 1.0
        operation.advance()
    result = operation.result
    assert result.ok, result.error
    assert result.steps > 5
    assert 0.05 <= result.train_seconds < 0.06


def test_cancelled_operation_leaves_nothing(site):
    write_sessions(site.ring, "b", 40)
    operation = site.begin()
    for _ in range(10):
        operation.advance()
    operation.cancel("cancelled")
    operation.advance()
    assert (operation.result.ok, operation.result.error) == (False, "cancelled")
    assert len(site.registry.versions()) == 1


def test_fused_features_of_another_fc_are_not_used(site):
    """The rows were made by a drafter whose fc the parent doesn't share: to the parent they are noise."""
    write_sessions(site.ring, "b", 40, version="v0042-00000000")
    operation = site.begin()
    operation.advance()
    assert operation.progress.stage == "collecting"
    write_sessions(site.ring, "b", 40, seed=1, version=site.parent.version)
    while site.traffic.poll():
        pass
    operation.advance()
    assert operation.progress.stage == "training"


@pytest.mark.parametrize("has_same_fc", [True, False])
def test_fused_features_outlive_the_version_that_made_them(site, has_same_fc):
    """Whether they can be used is a matter of its fc, not of its place in the registry."""

    def write(folder):
        copytree(site.registry.path(site.parent.version), folder, dirs_exist_ok=True, copy_function=copyfile)
        if not has_same_fc:
            tensors = load_file(folder / "model.safetensors")
            save_file(tensors | {"fc.weight": tensors["fc.weight"] + 1.0}, folder / "model.safetensors")

    maker = site.registry.create(write).version
    write_sessions(site.ring, "b", 40, version=maker)
    operation = site.begin()  # reads the ring
    site.registry.create(write)
    site.registry.sync_aliases()
    assert site.registry.prune(1, [site.parent.version]) == [maker]
    operation.advance()
    assert operation.progress.stage == ("training" if has_same_fc else "collecting")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"parent_version": "v0042-00000000"}, "no version"),
        ({"parent_version": ""}, "no version"),
        ({"scope": "everything"}, "unknown scope"),
        ({"scope": "full"}, "needs unfused features"),
        ({"target_path": "/nowhere"}, "config.json is missing"),
    ],
)
def test_what_cannot_work_is_one_clear_line(site, change, reason):
    write_sessions(site.ring, "b", 40)
    operation = site.begin(**{k: v for k, v in change.items() if k != "target_path"})
    if "target_path" in change:
        operation.request = msgspec.structs.replace(operation.request, **change)
    result = site.finish(operation)
    assert not result.ok
    assert reason in result.error
    assert "\n" not in result.error


def test_unexpected_failure_is_a_result_too(site, monkeypatch):
    write_sessions(site.ring, "b", 40)
    monkeypatch.setattr("honed.recalib.training.training_run.MicroTrainer.parts", lambda *_, **__: 1 / 0)
    result = site.finish(site.begin())
    assert (result.ok, result.error) == (False, "ZeroDivisionError: division by zero")


@pytest.mark.parametrize("is_recomputing", [False, True])
def test_memory_that_runs_out_is_a_result_with_cause_and_cure(site, monkeypatch, is_recomputing):
    """An estimate can be too low, and another process may take what was free."""
    write_sessions(site.ring, "b", 40)

    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("honed.recalib.training.training_run.MicroTrainer.parts", fail)
    settings = replace(SETTINGS, gradient_checkpointing=is_recomputing, anchors_per_micro_step=16, micro_steps_per_update=8)
    operation = site.begin(settings)
    result = site.finish(operation)
    assert not result.ok
    assert re.match(r"cpu ran out of memory: \d+ MiB were estimated, and others have taken what was free, or", result.error)
    assert ("trainer.gradient_checkpointing = true" in result.error) is not is_recomputing
    assert "trainer.anchors_per_micro_step = 8 and trainer.micro_steps_per_update = 16, or train on another" in result.error


def test_when_the_gate_refuses_what_was_trained_half_the_way_is_judged(site, monkeypatch):
    """A candidate that costs an old workload too much may still gain, and cost little, half-way to its parent."""
    write_sessions(site.ring, "b", 40)
    judged = []

    def refuse_once(before, after, must_gain, settings, share):
        verdict = judge(before, after, must_gain, settings, share)
        judged.append(after)
        return replace(verdict, passed=len(judged) > 1, reasons=[] if len(judged) > 1 else ["loss on workload 'a'"])

    monkeypatch.setattr("honed.recalib.process.recalibration.judge", refuse_once)
    result = site.finish(site.begin())
    assert result.ok, result.error
    assert len(judged) == 2
    assert site.registry.get(result.version).figures.blend == 0.5


@pytest.mark.fault("a gate that equal candidates pass by luck")
def test_without_a_gain_nothing_else_is_judged(site, monkeypatch):
    """A second look at the same sessions would be a second chance to pass by luck."""
    write_sessions(site.ring, "b", 40)
    judged = []
    monkeypatch.setattr("honed.recalib.process.recalibration.judge", lambda *given: judged.append(given[4]) or judge(*given))
    result = site.finish(site.begin(max_steps=1, error_share=0.5))
    assert result.error.startswith("gate: no sure gain")
    assert judged == [0.5]


@pytest.mark.fault("a gate that equal candidates pass by luck")
def test_a_later_attempt_waits_for_more_sessions(site):
    write_sessions(site.ring, "b", 40)
    operation = site.begin(error_share=2.0**-12)
    operation.advance()
    assert operation.progress.stage == "collecting"
    assert "of 15 held-out sessions of workload 'b'" in operation._missing(
        Selection(operation._feed.store, lambda stretch: True)
    )


def test_blending_goes_from_the_parent_to_what_was_trained(site):
    folder = site.registry.path(site.parent.version)
    parent, drafter = (load_drafter(folder, site.target) for _ in range(2))
    trained = [parameter.detach() + 1.0 for parameter in parent.parameters()]
    for share in (0.0, 0.5, 1.0):
        _blend(drafter, parent, trained, share)
        for new, old in zip(drafter.parameters(), parent.parameters(), strict=True):
            torch.testing.assert_close(new, old + share)


def trained_weights(monkeypatch):
    """The weights that training ended with, before the gate, of each operation that gets so far."""
    found = []

    def keep(drafter, parent, trained, share):
        found.append([tensor.clone() for tensor in trained])
        _blend(drafter, parent, trained, share)

    monkeypatch.setattr("honed.recalib.process.recalibration._blend", keep)
    return found


@pytest.mark.parametrize("micro_steps_per_update", [1, 3])
def test_a_killed_training_is_taken_up_and_ends_with_the_same_weights(site, monkeypatch, micro_steps_per_update):
    write_sessions(site.ring, "b", 40)
    weights = trained_weights(monkeypatch)
    site.reading_s = 0.001
    # Micro-steps whole: divided by what was measured, they differ in rounding from one run to the next.
    settings = replace(
        SETTINGS,
        max_steps=40,
        save_state_s=0.01,
        preempt_budget_s=0.0,
        micro_steps_per_update=micro_steps_per_update,
    )
    site.finish(site.begin(settings))

    site.state_dir = site.registry.root.parent / "training"
    killed = site.begin(settings)
    while killed.progress.steps < 25:
        site.now_s += 0.01
        killed.advance()
        assert killed.result is None, killed.result.error
    assert list(site.state_dir.glob("*.safetensors"))  # and nothing more is heard of it

    taken_up = site.begin(settings)
    steps = []
    while taken_up.result is None:
        site.now_s += 0.01
        taken_up.advance()
        steps.append(taken_up.progress.steps)
    assert min(s for s in steps if s) > 2, "it began afresh"
    assert taken_up.result.steps == 40
    for whole, continued in zip(weights[0], weights[1], strict=True):
        assert torch.equal(whole, continued)
    assert not list(site.state_dir.glob("*")), "an operation that is over leaves nothing"


def test_saving_takes_a_tenth_of_the_time_at_most(site, monkeypatch):
    write_sessions(site.ring, "b", 40)
    saved = []

    def slow(state, tensors, facts):
        saved.append(facts["progress"]["steps"])
        site.now_s += 1.0
        yield

    monkeypatch.setattr(TrainingState, "save", slow)
    site.reading_s, site.state_dir = 0.001, site.registry.root.parent / "training"
    site.finish(site.begin(replace(SETTINGS, max_steps=40, save_state_s=0.01)))
    assert len(saved) == 2
    assert saved[0] < saved[1] == 40, "and at the end"


def test_a_training_that_begins_late_and_is_killed_has_its_share_of_the_time_too(site):
    write_sessions(site.ring, "b", 40)
    site.reading_s, site.state_dir = 0.001, site.registry.root.parent / "training"
    settings = replace(SETTINGS, max_steps=30, save_state_s=0.01)
    killed = site.begin(settings)
    while killed.progress.stage == "collecting":
        killed.advance()
    site.now_s += 0.7 * SETTINGS.deadline_s
    while not list(site.state_dir.glob("*.safetensors")):
        killed.advance()
    assert killed.progress.steps < 30
    assert site.finish(site.begin(settings)).steps == 30


def test_on_a_cpu_a_micro_step_is_not_divided(site):
    """The trainer yields within it; each part would compute the context anew."""
    write_sessions(site.ring, "b", 40)
    operation, turns = site.begin(replace(SETTINGS, max_steps=20, preempt_budget_s=1e-9)), 0
    while operation.progress.steps < 20:
        turns += operation.progress.stage == "training"
        operation.advance()
    assert turns < 3 * 20, "more turns than micro-steps and the pauses between them"


def test_a_training_killed_amid_a_micro_step_goes_on_from_the_last_whole_one(site, monkeypatch):
    monkeypatch.setattr(TrainingRun, "pace", lambda _: Pace(1e-9))
    monkeypatch.setattr(Pace, "blocks", lambda *_: 1)  # as for a hurried GPU
    write_sessions(site.ring, "b", 40)
    site.reading_s, site.state_dir = 0.001, site.registry.root.parent / "training"
    settings = replace(SETTINGS, max_steps=30, save_state_s=0.01)
    killed = site.begin(settings)
    while not list(site.state_dir.glob("*.safetensors")):
        killed.advance()
    saved_steps = killed.progress.steps
    for _ in range(3):
        killed.advance()
    assert (killed.progress.stage, killed.progress.steps) == ("training", saved_steps), "not amid a micro-step"
    taken_up = site.begin(settings)
    while not taken_up.progress.steps:
        taken_up.advance()
    assert taken_up.progress.steps == saved_steps
    assert site.finish(taken_up).steps == 30


def test_a_training_that_does_not_fit_is_refused_before_it_waits_for_samples(site):
    result = site.finish(site.begin(replace(SETTINGS, memory_bytes=1 << 16)))
    assert (result.ok, result.steps) == (False, 0)
    assert "training needs" in result.error
    assert "trainer." in result.error


def test_fused_features_that_cannot_be_used_are_refused_once_a_ring_has_them(site):
    operation = site.begin(scope="full")
    feed = site.traffic.feeds[0]
    known, feed.features = feed.features, None
    operation.advance()
    assert operation.progress.stage == "collecting"
    run, config = operation._run, operation._run._config
    feed.features = known
    run._config = replace(config, mtp=Mtp(has_gate=False))
    run.check_features()  # an MTP head's rows are the same in either form
    run._config = config
    operation.advance()
    assert "scope 'full' trains fc and needs unfused features" in operation.result.error
    assert "HONED_FEATURES=layers" in operation.result.error


def test_unfused_features_can_be_used_with_any_scope(site):
    site.ring = RingWriter(site.ring.path, 1 << 22, 2 * WIDTH, feature_kind="layers")
    operation = site.begin(scope="full")
    operation.advance()
    assert operation.progress.stage == "collecting"
    assert operation.result is None


def test_rows_of_the_layers_that_another_drafter_reads_are_not_used(site, tmp_path):
    """vLLM was restarted with a drafter that reads as many layers, while the trainer went on."""
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [1, 2]
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    new = site.registry.import_checkpoint(tmp_path / "drafter", target_path=str(site.target))
    for version in (site.parent.version, new.version):
        site.ring = RingWriter(site.ring.path, 1 << 22, 2 * WIDTH, feature_kind="layers")
        for number in range(3):
            site.ring.write_rows(version, "b", version, 0, tokens("b", number, 80), np.zeros((80, 2 * WIDTH), np.uint16))
            site.ring.write_end(version, "b")
        while site.traffic.poll():
            pass
    store = site.traffic.feeds[0].store
    for parent in (site.parent, new):
        operation = site.begin(parent_version=parent.version)
        why = operation._why_unusable(parent, 1 << 20)
        usable = [one.drafter_version for side in (False, True) for one in store.stretches("b", side) if not why(one)]
        assert usable == [parent.version] * 3
        operation.advance()
        assert "3 answers with another drafter's features" in operation._unused(why, Counter())


def test_a_target_whose_head_has_another_name_is_refused_before_it_waits_for_samples(site):
    (site.target / "m.safetensors").rename(site.target / "old")
    save_file({"elsewhere.embed_tokens.weight": torch.zeros(4, WIDTH)}, site.target / "m.safetensors")
    operation = site.begin()
    operation.advance()
    assert "the target's files have no tensor model.embed_tokens.weight" in operation.result.error


def test_what_a_training_takes_is_said_before_it_begins(site):
    operation = site.begin()
    operation.advance()
    assert operation.progress.stage == "collecting"
    assert operation.progress.memory_bytes > site.parent.bytes


def write_request(ring, number, features):
    """One request of workload b with other features."""
    ids = tokens("b", number, len(features))
    ring.write_rows(f"odd-{number}", "b", "", 0, ids, features)
    ring.write_end(f"odd-{number}", "b")


def bfloat16(value, rows=80):
    return torch.full((rows, WIDTH), value).to(torch.bfloat16).view(torch.uint16).numpy()


@pytest.mark.fault("captured rows that aren't finite")
def test_a_row_that_is_not_finite_costs_a_training_nothing_but_that_row(site):
    write_sessions(site.ring, "b", 40)
    odd = bfloat16(1.0)
    odd[40, 3] = 0x7FC0  # NaN
    write_request(site.ring, 0, odd)
    result = site.finish(site.begin())
    assert (result.error, result.dropped_updates) == ("", 0)
    assert site.registry.verify(result.version)
    assert site.traffic.feeds[0].reader.nonfinite_rows == 1


@pytest.mark.fault("captured rows that aren't finite")
def test_a_sample_that_overflows_costs_the_updates_it_is_drawn_for(site):
    write_sessions(site.ring, "b", 40)
    for number in range(3):
        write_request(site.ring, number, bfloat16(3e38))
    result = site.finish(site.begin())
    assert result.error == ""
    assert 0 < result.dropped_updates < SETTINGS.max_steps // 2
    assert result.version


@pytest.mark.fault("captured tokens outside the vocabulary")
def test_a_sample_with_tokens_outside_the_vocabulary_is_not_used(site):
    """On a GPU such a row would end the process."""
    write_sessions(site.ring, "b", 40)
    given = tokens("b", 0, 80)
    site.ring.write_rows("odd", "b", "", 0, given + 50, bfloat16(1.0))
    site.ring.write_end("odd", "b")
    site.ring.write_rows("drawn", "b", "", 0, given, bfloat16(1.0), likely=given + 50)
    site.ring.write_end("drawn", "b")
    result = site.finish(site.begin())
    assert result.error == ""
    assert result.version


@pytest.mark.fault("a training that diverges without saying so")
def test_a_training_that_diverges_says_so(site):
    """A candidate that was ruined isn't one that gained too little."""
    write_sessions(site.ring, "b", 40)
    good = site.finish(site.begin()).version
    result = site.finish(site.begin(replace(SETTINGS, learning_rate=1.0, warmup_updates=1), parent_version=good, max_steps=40))
    assert not result.ok
    fell = r"the acceptance length fell from \d+\.\d+ to \d+\.\d+ on workload 'b'"
    said = rf"training diverged: {fell}; lower trainer\.learning_rate \(1\)"
    assert re.fullmatch(said, result.error), result.error
    assert len(site.registry.versions()) == 2


def test_a_few_sessions_show_no_divergence(site):
    """The gate doesn't judge by them either, and its reason is the one to tell."""
    write_sessions(site.ring, "b", 40)
    operation = site.begin()
    operation.advance()
    fallen = wire.GateFigures(workload="a", sessions=6, parent=3.0, candidate=1.2, gain_low=0.3, gain_high=0.5, passed=False)
    few = msgspec.structs.replace(fallen, sessions=5)
    operation._run.check_result([few, msgspec.structs.replace(fallen, is_judged=False)], 6)
    with pytest.raises(OperationError, match=r"training diverged: .* from 3\.00 to 1\.20 on workload 'a'"):
        operation._run.check_result([few, fallen], 6)


def test_a_loss_that_rises_because_other_samples_came_is_no_divergence(site, monkeypatch):
    """Each micro-step has samples of its own: those of one workload may have several times the loss of another's."""
    write_sessions(site.ring, "b", 40)
    parts = MicroTrainer.parts

    def rising(trainer, *arguments, **more):
        figures = yield from parts(trainer, *arguments, **more)
        return replace(figures, loss=0.1 if trainer.num_updates < 2 else 9.0)

    monkeypatch.setattr(MicroTrainer, "parts", rising)
    result = site.finish(site.begin())
    assert result.error == ""
    assert result.version


@pytest.mark.fault("a training that diverges without saying so")
def test_samples_without_a_finite_loss_are_the_reason_given(site):
    for number in range(40):
        write_request(site.ring, number, bfloat16(3e38))
    result = site.finish(site.begin())
    assert not result.ok
    assert "no loss was finite in 5 updates from the start: the parent's weights or the captured features" in result.error
    assert (result.steps, result.dropped_updates) == (5, 5)


@pytest.mark.fault("a training that diverges without saying so")
def test_a_training_whose_weights_stop_being_finite_says_so(site, monkeypatch):
    write_sessions(site.ring, "b", 40)
    made, load = [], TrainingRun.load_drafter
    monkeypatch.setattr(TrainingRun, "load_drafter", lambda run: made.append(load(run)) or made[-1])
    operation = site.begin()
    while operation.progress.steps < 30:
        site.now_s += 0.01
        operation.advance()
    for parameter in made[0].parameters():
        parameter.data.fill_(torch.nan)
    result = site.finish(operation)
    assert not result.ok
    assert result.error.startswith("training diverged: neither loss nor gradient was finite in 5 updates")
    assert result.steps == 35
