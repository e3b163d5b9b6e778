"""What is shown says what the document says, survives what is missing from it, and never reads a client's text as markup."""

import io
import re
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from honed.adapt.protocol.wire import GateFigures
from honed.daemon.commands.show import cells
from honed.daemon.commands.show import status as show
from honed.daemon.views.findings import LAG_S, LATELY_S, findings

HEALTHY: dict[str, Any] = {
    "version": "0.1.0",
    "uptime_s": 3700.0,
    "state": "ok",
    "engines": [
        {
            "engine_id": "engine-0",
            "connected": True,
            "model_name": "tiny",
            "num_spec_tokens": 7,
            "capabilities": ["events", "capture"],
            "policy": {"kind": "goodput", "generation": 12, "fallback": ""},
            "rounds": 1234567,
            "lost_rounds": 0,
            "drafter_version": "v0002-beef",
        }
    ],
    "trainer": {
        "state": "idle",
        "device": "cpu",
        "preemptions": 3,
        "preemption_s_p99": 0.021,
        "preemption_computing_s_p99": 0.004,
        "yields_to": ["*"],
    },
    "recalibrates": True,
    "drafters": {"active": "v0002-beef", "previous": "v0001-cafe"},
    "acceptance": {"last_minute": {"rounds": 10, "acceptance_length": 3.25, "acceptance_rate": 0.375}, "total": {}},
    "events": {"received_rounds": 99, "lost_rounds": 0, "batches": 3, "lag_s": 0.1, "rejected_frames": 0},
    "store": {"bytes": 1 << 20, "errors": 0},
    "overrides": [],
}


def text_of(renderable: RenderableType, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def changed(**changes: Any) -> dict[str, Any]:
    return HEALTHY | changes


def engine(**changes: Any) -> dict[str, Any]:
    return changed(engines=[HEALTHY["engines"][0] | changes])


def on_disk(**changes: Any) -> dict[str, Any]:
    return engine(**changes) | {"runtime": {"dir": "/var/honed", "filesystem": "ext4"}}


def test_a_folder_on_disk_is_no_matter_where_nothing_is_captured() -> None:
    assert findings(on_disk(capabilities=["events"])) == []
    assert findings(on_disk(capabilities=["capture"]) | {"runtime": {"dir": "/run/honed", "filesystem": "tmpfs"}}) == []


def test_a_host_that_only_observes_needs_no_trainer() -> None:
    assert findings(changed(trainer=None, recalibrates=False)) == []
    assert findings(engine(capabilities=["events"]) | {"trainer": None}) == []


def test_what_was_long_ago_is_no_finding() -> None:
    """An idle engine sends no batch that would say that events are on time again."""
    assert findings(changed(events={"rejected_frames": 2, "rejected_age_s": 2 * LATELY_S})) == []
    assert findings(changed(events={"lag_s": LAG_S + 1, "batch_age_s": 2 * LATELY_S})) == []


def test_a_healthy_service_has_nothing_to_report() -> None:
    assert findings(HEALTHY) == []
    assert "all is well" in text_of(show.status(HEALTHY))


@pytest.mark.parametrize(
    ("status", "level", "part"),
    [
        (changed(problems=["the writer thread has ended"]), "error", "writer thread"),
        (changed(events={"lost_rounds": 12345, "loss_age_s": 5.0}), "error", "12,345 verify rounds were lost"),
        (changed(events={"rejected_frames": 2, "rejected_age_s": 5.0}), "warning", "2 frames"),
        (changed(events={"lag_s": LAG_S + 1, "batch_age_s": 5.0}), "warning", "6.0 s old"),
        (changed(store={"errors": 4, "last_error": "disk is full", "error_age_s": 5.0}), "error", "disk is full"),
        (
            changed(log={"errors": 2, "last_error": "disk is full", "error_age_s": 5.0}),
            "warning",
            "log could not be written 2 times",
        ),
        (
            changed(background={"oldest_job_s": 75.0, "oldest_job": "/nfs/d"}),
            "warning",
            "not ended after 75 s: it touches /nfs/d",
        ),
        (changed(cut_sums={"1s": 700.0, "1min": 3 * 86400.0}), "warning", "their age: 1s for 12 minutes, 1min for 3 days"),
        (engine(connected=False, silent_s=60.0), "error", "engine-0 is not connected"),
        (engine(connected=False, silent_s=LATELY_S), "warning", "engine-0 is not connected"),
        (engine(policy={"fallback": "stale_policy"}), "warning", "no message from the daemon for too long"),
        (engine(policy={"fallback": "error"}), "error", "drafts vLLM's own lengths until vLLM restarts"),
        (engine(policy={"fallback": "something_new"}), "warning", "something_new"),
        (engine(missing_batches=1, loss_age_s=5.0), "error", "never arrived"),
        (engine(malformed_batches=1, loss_age_s=5.0), "error", "inconsistent"),
        (engine(errors=1), "warning", "caught inside vLLM"),
        (
            changed(drafter_problems={"active": "its sha256 differs"}),
            "error",
            "active drafter version can't be used: its sha256",
        ),
        (changed(verdict_problem="v2 was found worse, but is still active: no space"), "error", "v2 was found worse, but"),
        (changed(web_config_problem="web.yml isn't YAML"), "warning", "keeps the last web config that it could use: web.yml"),
        (changed(drafter_problems={"previous": "no version"}), "warning", "previous drafter version can't be used"),
        (engine(nonfinite_rows=1234), "warning", "1,234 captured rows held NaN or infinity"),
        (changed(trainer=HEALTHY["trainer"] | {"nonfinite_rows": 3}), "warning", "3 rows with NaN or infinity"),
        (changed(trainer=HEALTHY["trainer"] | {"dropped_updates": 2}), "warning", "2 updates of the training"),
        (engine(limits=["no swap here"]), "warning", "no swap here"),
        (engine(note="two processes"), "warning", "two processes"),
        (changed(engines=[]), "warning", "vllm-args"),
        (changed(trainer=None), "warning", "no trainer"),
        (changed(training_paused=True), "warning", "paused: `honed resume`"),
        (changed(trainer={"defective_rings": 2}), "warning", "2 sample rings can't be read"),
        (
            changed(trainer={"yields_to": ["engine-*", "chat"]}),
            "warning",
            "trainer.yields_to names 'chat', which matches no engine",
        ),
        (on_disk(capabilities=["events", "capture"]), "warning", "/var/honed is on ext4, not on a tmpfs"),
        (on_disk() | {"engines": [], "runtime": {}}, "warning", "no engine has attached"),
        (changed(drafters={}), "warning", "no drafter version is active: the first engine"),
        (
            changed(overrides=[{"name": "policy", "value": "off"}]),
            "warning",
            "override policy = off is in force: `honed override clear policy` ends it",
        ),
        (changed(overrides=[{"name": "draft_tokens", "value": 9}]), "warning", "in force (engine engine-0 drafts at most 7)"),
    ],
)
def test_each_trouble_is_one_finding(status: dict[str, Any], level: str, part: str) -> None:
    (found,) = findings(status)
    assert found.level == level
    assert part in found.text
    assert found.text in text_of(show.status(status))


@pytest.mark.parametrize("age_s", [LATELY_S, -1.0])
def test_what_was_lost_long_ago_is_a_figure_and_no_finding(age_s: float) -> None:
    status = changed(events={"lost_rounds": 12345, "loss_age_s": age_s}, store={"errors": 4, "error_age_s": age_s})
    assert findings(status) == []
    assert "12,345 rounds lost" in text_of(show.status(status))
    assert findings(engine(missing_batches=1, malformed_batches=1, loss_age_s=age_s)) == []


def test_the_worst_comes_first() -> None:
    levels = [f.level for f in findings(changed(trainer=None, engines=[], store={"errors": 1, "error_age_s": 0.0}))]
    assert levels == ["error", "warning", "warning"]


def test_figures_are_shown_as_they_are() -> None:
    text = text_of(show.status(HEALTHY))
    for figure in ("1,234,567", "3.25", "37.5 %", "goodput #12", "v0002-beef", "1:01:40", "0.021 s", "0.004 s"):
        assert figure in text


@pytest.mark.parametrize("name", ["status", "drafters", "operation", "canary"])
def test_empty_documents_render(name: str) -> None:
    assert text_of(getattr(show, name)({}))


@pytest.mark.parametrize("name", ["engines", "workloads", "operations", "overrides", "audit", "gate"])
def test_rows_without_fields_render(name: str) -> None:
    assert text_of(getattr(show, name)([{}]))
    assert text_of(getattr(show, name)([]))


@pytest.mark.parametrize(
    ("name", "nothing"),
    [
        ("engines", "no engine has attached"),
        ("drafters", "the registry has no version"),
        ("operations", "no operation was requested"),
        ("canaries", "no version has had a trial"),
        ("overrides", "no override is in force"),
        ("audit", "nothing has been changed"),
    ],
)
def test_where_there_is_nothing_to_show_it_says_so(name: str, nothing: str) -> None:
    (line,) = text_of(getattr(show, name)({} if name == "drafters" else [])).splitlines()
    assert nothing in line


def test_a_clients_label_is_never_markup() -> None:
    label = "[/bold] [red]x[/red] [link=http://a]"
    assert label in text_of(show.workloads([{"workload": label}]))
    assert label in text_of(show.audit([{"reason": label}]))
    assert label in text_of(show.status(changed(overrides=[{"name": label, "value": 1}], version=label)))


def test_the_gate_says_gain_and_interval() -> None:
    row = {"workload": "b", "sessions": 40, "parent": 1.2, "candidate": 1.8, "gain_low": 1.4, "gain_high": 1.6}
    text = text_of(show.gate([row | {"passed": True, "must_gain": True}, row | {"passed": False}]))
    assert "+50.0 %" in text
    assert "+40.0 … +60.0 %" in text
    assert text.count("passed") == text.count("failed") == 1


def test_a_workload_with_too_few_sessions_is_not_said_to_have_passed() -> None:
    row = {"workload": "b", "sessions": 4, "parent": 1.2, "candidate": 1.0, "gain_low": 0.7, "gain_high": 0.9}
    text = text_of(show.gate([row | {"passed": True, "is_judged": False}]))
    assert "not judged: too few sessions" in text
    assert "passed" not in text


def test_a_window_without_rounds_names_the_way_to_see_all() -> None:
    assert "last 5m: `--window 0` shows all" in text_of(show.workloads([], window="5m"))


def test_a_training_in_progress_says_how_far_it_is() -> None:
    detail = {"steps": 10, "max_steps": 100, "train_seconds": 150.0, "max_seconds": 600.0}
    running = {"kind": "recalibrate", "operation_id": "op-1", "stage": "training", "detail": detail}
    assert "recalibrate op-1: training, 25 % done" in text_of(show.status(changed(operation=running)))
    assert show.steps_line(detail) == "step 10/100, 150 of at most 600 s"


def test_an_operation_shows_gate_and_pause() -> None:
    detail = {"version": "v0002-x", "pause_ms": 3.21, "stage_ms": 40.0, "gate": [{"workload": "b"}]}
    text = text_of(show.operation({"operation_id": "op-1", "state": "succeeded", "detail": detail}))
    assert "3.21 ms pause, 40.0 ms staging" in text
    assert "op-1" in text
    assert "deadline_s" not in text


def test_an_operation_tells_what_draft_trees_would_accept() -> None:
    row = {"workload": "b", "parent_trees": {"7": 2.0, "63": 3.0}, "candidate_trees": {"7": 2.1, "63": 3.2}}
    text = text_of(show.operation({"operation_id": "op-1", "state": "succeeded", "detail": {"gate": [row]}}))
    heads, lengths = [line.split() for line in text.splitlines()[-2:]]
    assert heads == ["with", "draft", "trees", "7", "nodes", "63", "nodes"]
    assert lengths == ["b", "2.00", "→", "2.10", "3.00", "→", "3.20"]


def test_an_operation_says_that_its_training_was_cut_short() -> None:
    detail = {"is_cut_short": True, "steps": 90, "max_steps": 1600, "train_seconds": 25.0, "max_seconds": 600.0}
    text = text_of(show.operation({"operation_id": "op-1", "state": "succeeded", "detail": detail}))
    assert "trainer.deadline_s ended the training: step 90/1,600, 25 of at most 600 s" in text


def test_training_beside_requests_says_what_it_costs() -> None:
    beside = {"beside_seconds": 1234.5, "beside_duty": 0.03, "beside_harm": 0.0123, "beside_harm_error": 0.004}
    line = show.trainer_line(HEALTHY["trainer"] | beside)
    assert line.endswith("1,234 s beside requests (3.0 % of their time, steps +1.2 ± 0.4 %)")
    limited = show.trainer_line(HEALTHY["trainer"] | beside | {"beside_limit": "p99"})
    assert limited.endswith("steps +1.2 ± 0.4 %, held back by their p99)")
    held = show.trainer_line(HEALTHY["trainer"] | beside | {"beside_pause": "requests wait for a place in the batch"})
    assert held.endswith("; requests wait for a place in the batch)")
    assert "beside" not in show.trainer_line(HEALTHY["trainer"])


def test_a_training_says_why_it_is_not_on_the_gpu() -> None:
    line = show.trainer_line(HEALTHY["trainer"] | {"device_reason": "chat-0 isn't running"})
    assert line.startswith("idle on cpu (chat-0 isn't running), ")
    assert show.trainer_line(HEALTHY["trainer"] | {"device_reason": ""}).startswith("idle on cpu, ")


def test_aliases_stand_beside_their_versions() -> None:
    gate = [msgspec.to_builtins(GateFigures("b", 9, 2.0, 3.0, 1.4, 1.6, passed=True))]
    document = {
        "aliases": {"active": "v0002-b", "previous": "v0001-a", "candidate": None, "floor": "v0001-a"},
        "versions": [
            {"version": "v0001-a", "created_unix_s": 1.0},
            {"version": "v0002-b", "created_unix_s": 2.0, "figures": {"gate": gate}},
        ],
    }
    lines = text_of(show.drafters(document)).splitlines()
    assert "active" in lines[1]
    assert "+50 %" in lines[1]
    assert "previous, floor" in lines[2]


def test_narrow_terminals_keep_every_word_whole() -> None:
    words = text_of(show.engines(HEALTHY["engines"]), width=40).split()
    assert {"engine-0", "connected", "v0002-beef,", "1,234,567", "goodput", "#12"} <= set(words)


def test_engines_with_slots_for_trees_say_how_often_they_verify_one() -> None:
    drafted = {"draft_tokens_per_round": 9.5, "num_spec_tokens": 15, "tree_share": 0.625}
    grown, chains = engine(capabilities=["events", "trees"], **drafted), engine(**drafted)
    for view in (show.engines, show.brief_engines):
        assert "k 9.50 of 15 (62.5 % of the rounds trees)" in text_of(view(grown["engines"]))
        assert "trees" not in text_of(view(chains["engines"]))


OPERATION: dict[str, Any] = {
    "operation_id": "op-7bdba40678a9",
    "kind": "recalibrate",
    "state": "cancelled",
    "stage": "collecting",
    "actor": "operator",
    "created_unix_s": 1.0,
    "finished_unix_s": 1234567.0,
    "reason": "a reason of many words that says why it was asked for",
}


def wholes(operation: dict[str, Any]) -> set[str]:
    """What must stand in one piece, whatever the width."""
    began = cells.moment(operation["created_unix_s"])
    return {"op-7bdba40678a9", "recalibrate", "cancelled", "collecting", "operator", began, "14 days, 6:56:06"}


def lines_of(renderable: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable, crop=False)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 120])
def test_narrow_terminals_show_every_cell_whole_and_reasons_below_their_row(width: int) -> None:
    lines = lines_of(show.operations([OPERATION, OPERATION]), width)
    assert max(map(len, lines)) <= width
    text = " ".join(line.strip() for line in lines)
    assert [part for part in wholes(OPERATION) if text.count(part) != 2] == []
    first, second = (number for number, line in enumerate(lines) if OPERATION["operation_id"] in line)
    assert OPERATION["reason"] in " ".join(line.strip() for line in lines[first:second])


VERSION = "v0012-2f1c9be4"
NAMES = {"gain"}
WIDE: list[tuple[str, RenderableType]] = [
    (
        "workloads",
        show.workloads(
            [
                {
                    "engine_id": "engine-0",
                    "workload": "code-completion-for-editors",
                    "drafter_version": VERSION,
                    "rounds": 1234567,
                    "acceptance_length": 2.5,
                    "tokens_per_round": 2.25,
                    "acceptance_rate": 0.3,
                    "by_position": [0.61 - 0.01 * j for j in range(15)],
                    "drift": {"state": "drifted"},
                }
            ]
        ),
    ),
    (
        "drafters",
        show.drafters(
            {
                "aliases": {"active": VERSION, "previous": VERSION},
                "versions": [{"version": VERSION, "parent": "v0011-2f1c9be4", "note": "of " * 40, "sha256": "0" * 64}],
            }
        ),
    ),
    (
        "audit",
        show.audit(
            [{"t": 1.0, "actor": "operator", "action": "recalibrate", "subject": "op-7bdba40678a9", "reason": "why " * 30}]
        ),
    ),
    (
        "overrides",
        show.overrides([{"name": "draft_tokens", "value": "7", "ttl_s": 600, "reason": "why " * 30, "actor": "operator"}]),
    ),
    (
        "canaries",
        show.canaries(
            [{"operation_id": "op-7bdba40678a9", "kind": "canary", "new": VERSION, "old": VERSION, "text": "t " * 60}]
        ),
    ),
    ("acceptance", show.status(HEALTHY)),
]


@pytest.mark.parametrize(("name", "shown"), WIDE, ids=[name for name, _ in WIDE])
def test_no_line_is_wider_than_a_small_terminal(name: str, shown: RenderableType) -> None:
    """The figures of a row stand on one line; what has no room there goes below, whole words a line."""
    lines = lines_of(shown, 80)
    assert max(map(len, lines)) <= 80
    wide, narrow = (re.findall(r"[\w%.,µ-]+", " ".join(one)) for one in (lines_of(shown, 400), lines))
    assert set(wide) - set(narrow) <= NAMES, "nothing but names of empty columns is left out"


def test_wide_terminals_break_nothing() -> None:
    assert text_of(show.operations([OPERATION])).splitlines()[1].rstrip().endswith(f"{OPERATION['reason']}")


TRIAL: dict[str, Any] = {
    "operation_id": "op-1",
    "kind": "canary",
    "old": "v0001-a",
    "new": "v0002-b",
    "began_unix_s": 1.0,
    "rounds": 1280,
    "max_pairs": 800,
    "pairs": 10,
    "change": -0.12,
    "evidence_worse": 1.4,
    "evidence_better": -3.0,
    "decision": "",
    "text": "all traffic looks worst so far",
}


def test_a_trial_that_is_under_way_is_on_the_first_screen() -> None:
    text = text_of(show.status(changed(canary=TRIAL)))
    assert "v0002-b against v0001-a, 1,280 rounds in 10 of at most 800 pairs of windows: -12.0 % accepted, " in text
    assert "25 : 1 that it is worse, 1 : 1,000 that" in text


@pytest.mark.parametrize(
    ("log10", "shown"),
    [(2.1, "126 : 1"), (0.2, "1.6 : 1"), (0.0, "1.0 : 1"), (-3.0, "1 : 1,000"), (9.0, "over 10^6 : 1"), (None, cells.NOTHING)],
)
def test_evidence_is_shown_as_odds(log10: float | None, shown: str) -> None:
    assert cells.odds(log10) == shown


def test_trials_and_their_evidence_over_time() -> None:
    assert "going on" in text_of(show.canaries([TRIAL]))
    point = {"t": 2.0, "rounds": 128, "evidence_worse": 0.2, "evidence_better": -0.1, "change": -0.1}
    points = [point | {"pairs": n, "workload": name} for n in range(1, 101) for name in ("", "code")]
    shown = text_of(show.canary(TRIAL | {"decision": "worse", "points": points})).splitlines()
    assert len(shown) < 60
    assert any("worse" in line for line in shown)
    assert " 100 " in shown[-1] + shown[-2]  # the latest is always there
