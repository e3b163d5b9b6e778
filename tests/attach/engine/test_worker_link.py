"""What the engine's thread asks of the workers, and what it makes of their answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from honed.attach.contract.compatibility import Findings
from honed.attach.engine import engine_hook
from honed.attach.engine.environment import from_environment
from honed.attach.engine.graphs import Captured
from honed.attach.engine.guard import NoAnswer
from honed.attach.engine.worker_link import WorkerLink
from honed.attach.worker import HonedWorkerExtension

CURVES = ([(1, 1.0)], [(1, 2.0), (64, 4.0)])


class Engine:
    """Ranks that answer as they are told to."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers) or [{"graphs": ([], [], []), "dropped": []}]
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.of_method: dict[str, list[Any]] = {}
        self.failing = ""
        self.failure: Exception = engine_hook.RankError("AttributeError: no such layer")

    def rpc(self, method: str, *args: Any) -> list[Any]:
        self.asked.append((method, args))
        if method == self.failing:
            raise self.failure
        return self.of_method.get(method, self.answers)


def link(
    engine: Engine | None,
    monkeypatch: pytest.MonkeyPatch,
    *capabilities: str,
    trees: str = "0",
    folder: Path = Path("/nowhere/honed"),
    **more: Any,
) -> WorkerLink:
    monkeypatch.setattr(engine_hook, "current", lambda: engine)
    settings = from_environment({"HONED_RUNTIME_DIR": str(folder), "HONED_TREES": trees}, 0)
    assert settings is not None
    findings = Findings(("events", *capabilities), (), is_known=more.pop("is_known", True))
    return WorkerLink(settings, findings, b"s" * 16, **more)


def test_what_the_workers_tell_is_news_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine({"graphs": ([1, 8], [0, 7], [7]), "dropped": []}, {"graphs": ([], [], []), "dropped": []})
    made = link(engine, monkeypatch, "capture", "swap")
    assert made.attach()
    assert made.graphs == Captured([1, 8], [0, 7], [7])
    assert engine.asked[0][1][0]["wanted"] == ["capture", "swap"]
    assert not made.attach()
    assert [method for method, _ in engine.asked] == ["honed_attach", "honed_begin"]


def test_what_one_rank_cannot_do_is_dropped_for_all_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"graphs": ([], [], []), "dropped": [(("capture", "swap"), "capture and swap are off: no drafter")]}
    engine = Engine({"graphs": ([], [], []), "dropped": []}, refused, refused)
    made = link(engine, monkeypatch, "capture", "swap", "estimates")
    assert made.attach()
    assert made.findings.capabilities == ("events", "estimates")
    assert made.findings.limits == ("capture and swap are off: no drafter",)
    assert not made.can_capture
    # Nor does the rank that could leave draft passes out, in which the others would wait for it.
    assert [method for method, _ in engine.asked] == ["honed_attach"]


@pytest.mark.parametrize("failing", ["honed_attach", "honed_begin"])
@pytest.mark.parametrize("failure", [engine_hook.RankError("no such layer"), RuntimeError("no such layer")])
def test_workers_that_fail_have_nothing_to_offer(monkeypatch: pytest.MonkeyPatch, failing: str, failure: Exception) -> None:
    engine = Engine()
    engine.failing, engine.failure = failing, failure
    made = link(engine, monkeypatch, "draft_length", "capture", "swap", "estimates")
    assert made.attach()
    assert made.findings.capabilities == ("events", "draft_length")
    assert "no such layer" in made.findings.limits[0]
    assert not made.can_capture


@pytest.mark.fault("a hung worker that hung the engine for good")
@pytest.mark.parametrize("hung", ["honed_attach", "honed_begin"])
def test_workers_that_hang_end_the_engine(monkeypatch: pytest.MonkeyPatch, hung: str) -> None:
    engine = Engine()
    engine.failing, engine.failure = hung, NoAnswer("no answer")
    with pytest.raises(NoAnswer):
        link(engine, monkeypatch, "capture", "swap").attach()


def test_the_workers_know_when_the_target_was_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    made = link(engine, monkeypatch, "capture", "swap")
    made.note_new_target()  # before they are attached: nothing is captured yet
    made.attach()
    made.note_new_target()
    assert [method for method, _ in engine.asked].count("honed_new_target") == 1


@pytest.mark.fault("prompts of an earlier start in a ring that nothing is written to any more")
@pytest.mark.parametrize("capabilities", [(), ("capture", "swap")])
def test_the_ring_of_an_earlier_start_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capabilities: tuple[str, ...]
) -> None:
    made = link(Engine(), monkeypatch, *capabilities, folder=tmp_path)
    ring = made._settings.ring_path
    ring.parent.mkdir(parents=True)
    ring.write_bytes(b"prompts")
    made.attach()
    assert not ring.exists()
    ring.write_bytes(b"of this start")
    made.attach()
    assert ring.exists()


def test_without_capture_no_ring_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    link(engine, monkeypatch, "swap", "estimates").attach()
    assert engine.asked[0][1][0]["ring_path"] == ""


@pytest.mark.parametrize(
    ("are_drafts_on_device", "is_known", "asked"),
    [(True, True, ["honed_attach", "honed_draft_ids"]), (False, True, ["honed_attach"]), (True, False, []), (False, False, [])],
)
def test_workers_of_other_methods_are_attached_to_and_asked_for_drafts_on_the_device(
    monkeypatch: pytest.MonkeyPatch, are_drafts_on_device: bool, is_known: bool, asked: list[str]
) -> None:
    """V1's would count zeros in the place of drafts as drafts."""
    engine = Engine()
    made = link(engine, monkeypatch, are_drafts_on_device=are_drafts_on_device, is_known=is_known)
    assert not made.attach()
    made.want_draft_ids(True)
    assert [method for method, _ in engine.asked] == asked


def test_workers_without_drafts_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    assert not link(engine, monkeypatch, "draft_length", has_drafts=False).attach()
    assert engine.asked == []


def test_without_the_extension_no_worker_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    made = link(engine, monkeypatch, "draft_length", "capture", "swap", are_drafts_on_device=True, has_extension=False)
    assert made.attach()
    assert made.findings.capabilities == ("events", "draft_length")
    assert "--worker-extension-cls honed.attach.worker.HonedWorkerExtension" in made.findings.limits[0]
    made.want_draft_ids(True)
    made.set_capture_share(1.0, "v1", -1)
    made.rest(True)
    with pytest.raises(RuntimeError, match="without --worker-extension-cls"):
        made.rpc("honed_checksum", 0)
    assert engine.asked == []


def test_without_an_engine_everything_of_the_workers_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    made = link(None, monkeypatch, "draft_length", "swap", "estimates", are_drafts_on_device=True)
    assert made.attach()
    assert made.findings.capabilities == ("events", "draft_length")
    made.want_draft_ids(True)


def test_vllms_rule_is_fed_when_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    made = link(engine, monkeypatch, "estimates")
    made.feed(False, None)
    assert engine.asked == []
    made.feed(True, None)
    made.feed(True, CURVES)
    made.feed(True, (CURVES[0], [(1, 2.01), (64, 4.0)]))  # hardly any different
    made.feed(True, (CURVES[0], [(1, 2.5), (64, 4.0)]))
    made.feed(False, CURVES)
    made.feed(True, CURVES)
    empty: tuple[list[Any], list[Any]] = ([], [])
    assert [args for _, args in engine.asked] == [
        (True, *empty),
        (True, *CURVES),
        (True, CURVES[0], [(1, 2.5), (64, 4.0)]),
        (False, *empty),
        (True, *CURVES),
    ]


def test_with_trees_no_length_is_captured_but_steps_are_padded_as_in_piecewise_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the slots' graphs the daemon would draft as many nodes as there are slots, or none."""
    engine = Engine({"graphs": ([16, 32], [15], [3]), "dropped": []})
    made = link(engine, monkeypatch, "swap", trees="graphs")
    engine.of_method["honed_trees"] = [("", [1, 2, 4, 8]), ("", [1, 2, 4, 8])]
    assert made.attach()
    assert ("honed_trees", (True,)) in engine.asked
    assert made.findings.capabilities == ("events", "swap", "trees")
    assert made.graphs == Captured([1, 2, 4, 8], [], [3])
    made.end_trees()
    assert made.findings.capabilities == ("events", "swap")
    assert made.graphs == Captured([16, 32], [15], [3])


def test_trees_that_one_rank_refuses_leave_the_graphs_to_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine({"graphs": ([16, 32], [15], []), "dropped": []})
    made = link(engine, monkeypatch, "swap", trees="1")
    engine.of_method["honed_trees"] = [("", []), ("the target has recurrent layers", [])]
    assert made.attach()
    assert made.findings.limits == ("trees are off: the target has recurrent layers",)
    assert made.graphs == Captured([16, 32], [15], [])


A, B = "6d9c4b9e-8f6b-4f0e-9a53-0d1e2f3a4b5c", "00000000-8f6b-4f0e-9a53-0d1e2f3a4b5c"


def rank(gpu: str, reserve: int) -> dict[str, Any]:
    return {"graphs": ([], [], []), "dropped": [], "gpu": gpu, "reserve": reserve}


def told(**more: float) -> dict[str, float]:
    """A rank's answer to `honed_capture`."""
    return {"reserve": 0, "errors": 0} | more


def test_what_is_reserved_on_each_gpu_is_known_and_kept_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("honed.attach.engine.worker_link.time.monotonic", lambda: now[0])
    engine = Engine(rank(A, 5), rank(B, 7), rank(B, 1))
    made = link(engine, monkeypatch, "capture", "swap")
    assert made.reserves is None
    made.set_capture_share(0.5, "v1", -1)  # nobody is there to tell it to yet
    made.attach()
    assert made.reserves == {A: 5, B: 8}
    engine.of_method["honed_capture"] = [told(reserve=2, rows=3), told(), told(reserve=1)]
    made.set_capture_share(0.5, "v1", -1)
    assert made.reserves == {A: 2, B: 1}
    assert made.captured["rows"] == 3
    engine.of_method["honed_capture"] = [told(reserve=1, rows=9), told(), told()]
    for _ in range(30):  # the engine is never idle, and the share stays: once a minute
        now[0] += 2.1
        made.set_capture_share(0.5, "v1", -1)
    assert made.reserves == {A: 1, B: 0}
    assert made.captured["rows"] == 9
    assert [method for method, _ in engine.asked].count("honed_capture") == 2


def test_errors_of_all_workers_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(rank(A, 0), rank(B, 0))
    made = link(engine, monkeypatch, "estimates")
    made.attach()
    engine.of_method["honed_capture"] = [told(errors=2), told(errors=3)]
    made.set_capture_share(0.0, "v1", 1)
    assert made.num_errors == 5


def test_a_worker_tells_its_errors_whether_or_not_it_captures() -> None:
    worker: Any = HonedWorkerExtension()
    worker._honed_errors = SimpleNamespace(count=4)
    assert worker.honed_capture(0.5, "v1") == told(errors=4)


def test_without_capture_what_is_reserved_is_kept_up_to_date_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(rank(A, 5))
    made = link(engine, monkeypatch, "swap")
    made.attach()
    engine.of_method["honed_capture"] = [told(reserve=2)]
    made.set_capture_share(0.5, "v1", -1)
    assert made.reserves == {A: 2}
    assert engine.asked[-1] == ("honed_capture", (0.0, "v1"))


@pytest.mark.parametrize(("answers", "known"), [([rank("", 0)], {}), ([rank(A, 5), rank("", 5)], None)])
def test_a_cpu_has_no_gpus_and_unknown_ones_are_not_taken_for_none(
    monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, Any]], known: dict[str, int] | None
) -> None:
    made = link(Engine(*answers), monkeypatch, "capture", "swap")
    made.attach()
    assert made.reserves == known
