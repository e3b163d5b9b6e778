"""`honed retention` against real HTTP servers: what it counts, what it compares, and what it can't know."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from honed.daemon.calibration.compare_targets import ClassFigures, compare, length_note, spread
from honed.daemon.calibration.served_target import Counters
from honed.daemon.commands.main import app
from tests.daemon.served_model import serving_model

Run = Callable[..., Result]

PROMPTS = "".join(f'{{"prompt": "{"word " * (i + 1)}", "class": "{name}"}}\n' for name in ("code", "prose") for i in range(3))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in [name for name in os.environ if name.startswith("HONED_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HONED_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("HONED_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setattr("honed.daemon.calibration.served_target.SETTLE_S", 0.0)
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPTS)

    def invoke(*arguments: Any) -> Result:
        return CliRunner().invoke(app, ["retention", "--prompts", str(path), *map(str, arguments)])

    return invoke


def answer(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_base_and_tuned_target_are_compared_class_by_class(run: Run) -> None:
    with serving_model(accepted=2.0) as base, serving_model(accepted=0.5) as tuned:
        found = answer(run("--base-url", base.url, "--url", tuned.url, "--max-tokens", 30, "--repeat", 2, "--json"))
    assert list(found["tuned"]["classes"]) == ["", "code", "prose"]
    for row in found["retained"]:
        assert row["acceptance_length_retained"] == pytest.approx(1.5 / 3.0)
        assert row["speedup_retained"] > 0
    whole, code = (found["base"]["classes"][name] for name in ("", "code"))
    assert (whole["prompts"], code["prompts"]) == (6, 3)
    assert (whole["rounds"], code["rounds"]) == (2 * 6 * 10, 2 * 3 * 10)
    assert (code["acceptance_length"], code["draft_tokens_per_round"]) == (3.0, 4.0)
    assert code["speedup"]["low"] <= code["speedup"]["median"] <= code["speedup"]["high"]
    assert found["notes"] == []


def test_where_some_prompts_have_no_class_all_are_still_counted_together(run: Run, tmp_path: Path) -> None:
    with (tmp_path / "prompts.jsonl").open("a") as prompts:
        prompts.write('{"prompt": "no class"}\n')
    asked = ("--repeat", 1, "--max-tokens", 30)
    with serving_model() as model:
        first = answer(run("--url", model.url, *asked, "--json"))
        rows = first["tuned"]["classes"]
        assert {name: row["prompts"] for name, row in rows.items()} == {"": 7, "code": 3, "prose": 3, "(none)": 1}
        assert rows[""]["rounds"] == 7 * 10
        assert {body["vllm_xargs"]["honed_workload"] for body in model.asked} == {"code", "prose", "retention"}
        (tmp_path / "base.json").write_text(json.dumps(first))
        found = answer(run("--url", model.url, *asked, "--base", tmp_path / "base.json", "--json"))
        assert {row["class"]: row["acceptance_length_retained"] for row in found["retained"]} == {
            "": 1.0,
            "code": 1.0,
            "prose": 1.0,
            "(none)": 1.0,
        }
        assert found["base"]["classes"]["(none)"]["prompts"] == 1
        shown = run("--url", model.url, *asked, "--base", tmp_path / "base.json")
    assert shown.exit_code == 0, shown.output
    names = [line.split()[:2] for line in shown.stdout.splitlines()[1:9]]
    assert names == [[name, which] for name in ("(all)", "code", "prose", "(none)") for which in ("base", "tuned")]


def test_each_prompt_is_played_with_drafts_and_without_and_never_captured(run: Run) -> None:
    with serving_model() as model:
        answer(run("--url", model.url, "--max-tokens", 5, "--temperature", 0.5, "--repeat", 1, "--json"))
    labels = [body["vllm_xargs"] for body in model.asked]
    assert {one["honed_capture"] for one in labels} == {0}
    assert {one["honed_workload"] for one in labels} == {"code", "prose"}
    # One of each class beforehand, which isn't counted.
    assert sum(one.get("honed_max_draft_tokens") == 0 for one in labels) == 2 + 6
    assert sum("honed_max_draft_tokens" not in one for one in labels) == 6
    assert {body["temperature"] for body in model.asked} == {0.5}
    salts = [body["cache_salt"] for body in model.asked]
    assert len(set(salts)) == len(salts)


def test_a_server_without_honed_drafts_always_so_its_speed_without_is_not_known(run: Run) -> None:
    with serving_model(heeds_labels=False) as model:
        found = answer(run("--url", model.url, "--repeat", 1, "--json"))
        assert found["tuned"]["classes"]["code"]["acceptance_length"] == pytest.approx(3.0, abs=0.05)
        assert found["tuned"]["classes"]["code"]["speedup"] is None
        assert "ignores draft limits" in found["notes"][0]
        with serving_model(accepted=0.0, num_draft_tokens=0) as plain:
            plain.heeds_labels = True
            found = answer(run("--url", model.url, "--plain-url", plain.url, "--repeat", 1, "--json"))
    assert found["tuned"]["classes"]["code"]["speedup"]["median"] > 0
    assert found["notes"] == []


def test_others_on_the_server_are_noticed(run: Run) -> None:
    with serving_model(extra_tokens=1) as model:
        found = answer(run("--url", model.url, "--repeat", 1, "--json"))
    assert any("served others meanwhile" in note for note in found["notes"])


def test_an_earlier_result_stands_in_for_a_base_that_is_not_served_any_more(run: Run, tmp_path: Path) -> None:
    with serving_model(accepted=3.0) as model:
        first = run("--url", model.url, "--max-tokens", 40, "--json")
        (tmp_path / "base.json").write_text(first.stdout)
        model.accepted = 1.0
        found = answer(run("--url", model.url, "--max-tokens", 40, "--base", tmp_path / "base.json", "--json"))
        assert {row["acceptance_length_retained"] for row in found["retained"]} == {0.5}
        other = run("--url", model.url, "--max-tokens", 41, "--base", tmp_path / "base.json")
        assert other.exit_code == 2
        assert "different sampling" in other.stderr
        (tmp_path / "base.json").write_text("{}")
        broken = run("--url", model.url, "--base", tmp_path / "base.json")
    assert broken.exit_code == 2
    assert "isn't output of this command" in broken.stderr


def test_the_table_names_every_class_of_both_targets(run: Run) -> None:
    with serving_model() as base, serving_model(accepted=1.0) as tuned:
        shown = run("--base-url", base.url, "--url", tuned.url, "--repeat", 1, "--max-tokens", 30)
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert [row[:2] for row in rows[1:7]] == [
        [name, which] for name in ("(all)", "code", "prose") for which in ("base", "tuned")
    ]
    assert "66.7 %" in shown.stdout


def test_draft_lengths_that_differ_are_named() -> None:
    def document(length: float | None) -> dict[str, Any]:
        return {"classes": {"": {"draft_tokens_per_round": length}}}

    assert "--draft-tokens" in length_note(document(7.0), document(3.0))
    assert length_note(document(7.0), document(6.9)) == ""
    assert length_note(document(7.0), document(None)) == ""


def test_a_server_that_drafts_nothing_has_no_speed_up_and_the_cause_is_named(run: Run) -> None:
    with serving_model(accepted=0.0, num_draft_tokens=0) as model:
        found = answer(run("--url", model.url, "--repeat", 1, "--json"))
    assert {row["speedup"] for row in found["tuned"]["classes"].values()} == {None}
    (note,) = found["notes"]
    assert "drafted nothing" in note
    assert "honed override list" in note


def test_without_a_round_there_is_neither_acceptance_length_nor_speed_up() -> None:
    figures = ClassFigures(2, Counters(generated_tokens=10), drafted=[(10, 2.0)], plain=[(10, 4.0)])
    assert figures.view() == {
        "prompts": 2,
        "rounds": 0,
        "draft_tokens_per_round": None,
        "acceptance_length": None,
        "tokens_per_s": 5.0,
        "tokens_per_s_without": 2.5,
        "speedup": None,
    }
    about = {"prompts": "d", "sampling": {}, "concurrency": 1, "classes": {"": figures.view()}}
    assert compare(about, about) == [{"class": "", "acceptance_length_retained": None, "speedup_retained": None}]
    figures.counters = Counters(generated_tokens=10, rounds=5, draft_tokens=20, accepted_tokens=5)
    assert figures.view()["speedup"] == spread([2.0])


@pytest.mark.parametrize(
    ("about", "arguments", "code", "says"),
    [
        ({}, ["--url", "http://127.0.0.1:1"], 1, "doesn't answer"),
        ({"key": "secret"}, ["--url", "{url}"], 1, "--api-key-file"),
        ({}, ["--url", "{url}", "--model", "other"], 2, "only tiny, adapter"),
        ({}, ["--url", "{url}", "--draft-tokens", "3"], 3, "no daemon is running"),
        ({}, ["--url", "{url}", "--base", "b.json", "--base-url", "{url}"], 2, "either --base-url or --base"),
    ],
)
def test_what_goes_wrong_is_said_with_its_exit_code(
    run: Run, about: dict[str, Any], arguments: list[str], code: int, says: str
) -> None:
    with serving_model(**about) as model:
        result = run(*[argument.format(url=model.url) for argument in arguments])
    assert result.exit_code == code, result.output
    assert says in result.output
    assert "Traceback" not in result.output


def test_a_key_is_read_from_its_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    with serving_model(key="secret") as model:
        assert run("--url", model.url, "--api-key-file", tmp_path / "key", "--repeat", 1).exit_code == 0


def test_a_key_that_is_no_text_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xff\xfe\x00")
    result = run("--url", "http://127.0.0.1:1", "--api-key-file", tmp_path / "key", "--repeat", 1)
    assert result.exit_code == 2
    assert "the key can't be read" in result.output
    assert "Traceback" not in result.output


def test_prompts_that_the_server_refuses_end_the_command_with_its_reason(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPTS + '{"messages": [{"role": "user", "content": "refuse"}], "class": "chat"}\n')
    with serving_model() as model:
        result = run("--url", model.url, "--repeat", 1)
    assert result.exit_code == 1
    assert "line 7: HTTP 400: I don't like this prompt" in result.stderr
