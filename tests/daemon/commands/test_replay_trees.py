"""`honed replay --trees`: the table, the JSON, and one clear line for a file that won't do."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from honed.adapt.steps.step_time import PARAMETERS
from honed.adapt.trees.candidate_log import CandidateRequest, render_line
from honed.daemon.commands.main import app

Run = Callable[..., Result]
DEPTHS, WIDTH, TOKENS = 4, 3, 24


def make_lines(count: int, workload: str = "chat") -> bytes:
    """Requests whose text takes the first candidate with a half, the second with a quarter, and none else."""
    rng = np.random.default_rng(0)
    lines = []
    for number in range(count):
        tokens = rng.choice([0, 1, 9], TOKENS, p=[0.5, 0.25, 0.25]).astype(np.int64)
        shape = (TOKENS, DEPTHS, WIDTH)
        candidates, log_probs = (np.broadcast_to(row, shape).copy() for row in (np.arange(WIDTH), np.log([0.5, 0.25, 0.05])))
        request = CandidateRequest(f"{number:08x}", workload, 0.0, tokens, np.arange(TOKENS), candidates, log_probs, 10)
        lines.append(render_line(request))
    return b"".join(lines)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "candidates.jsonl"
    path.write_bytes(make_lines(12))
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "110")
    return lambda *arguments: CliRunner().invoke(app, ["replay", *(str(a) for a in arguments)])


def test_a_table_of_tree_policies(run: Run, log: Path) -> None:
    result = run("--trees", log, "--batch", 1, "--batch", 2)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "288 tokens of 12 requests, 4 depths, 3 candidates each; cost gpu" in " ".join(result.stdout.split())
    for name in ("none", "chain:4", "tree:64", "caddtree", "shared", "honed"):
        assert sum(f" {name} " in line for line in lines) == 2
    assert max(map(len, lines)) <= 110


def test_json_has_what_the_text_took(run: Run, log: Path) -> None:
    result = run("--trees", log, "none", "chain:1", "--json")
    assert result.exit_code == 0, result.output
    none, chain = json.loads(result.stdout)["policies"]
    assert none["acceptance_length"]["value"] == 1.0
    assert none["calibration_error"] is None
    assert chain["nodes_per_round"] == 1.0
    assert chain["acceptance_length"]["value"] == pytest.approx(1.5, abs=0.1)
    assert chain["exact_rounds"] == 1.0


def test_a_workload_and_a_packed_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "candidates.jsonl.gz"
    path.write_bytes(gzip.compress(make_lines(3, "chat") + make_lines(2, "code")))
    document = json.loads(run("--trees", path, "none", "--workload", "code", "--json").stdout)
    assert document["requests"] == 2
    assert document["policies"][0]["tokens_per_s"]["low"] is None
    shown = run("--trees", path, "none", "--workload", "code")
    assert shown.exit_code == 0, shown.output
    assert "No interval" in shown.stdout
    failed = run("--trees", path, "--workload", "mail")
    assert (failed.exit_code, "there is chat, code" in failed.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tree:0"], "chain:1 … chain:4"),
        (["chain:9"], "unknown tree policy"),
        (["static:2"], "unknown tree policy"),
        (["--cost", "tpu"], "cpu, gpu"),
        (["--cost", "1,2"], f"{len(PARAMETERS)} figures"),
        (["--batch", "0"], "at least one request"),
    ],
)
def test_what_makes_no_sense_ends_with_2(run: Run, log: Path, arguments: list[str], said: str) -> None:
    failed = run("--trees", log, *arguments)
    assert failed.exit_code == 2
    assert said in " ".join(failed.stderr.split())


def test_a_file_that_is_not_there_ends_with_2(run: Run, tmp_path: Path) -> None:
    failed = run("--trees", tmp_path / "none.jsonl")
    assert failed.exit_code == 2
    assert "there is no file" in failed.stderr
    assert "→" in failed.stderr


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "no request has candidates"), (b"{}\n", "line 1"), (make_lines(1) + b'{"torn\n', "line 2")]
)
def test_a_file_that_is_no_log_ends_with_1(run: Run, tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    failed = run("--trees", path)
    assert failed.exit_code == 1
    assert said in failed.stderr
    assert "→" in failed.stderr


def test_a_line_that_was_not_written_out_is_left_out_and_said(run: Run, log: Path) -> None:
    assert json.loads(run("--trees", log, "none", "--json").stdout)["notes"] == []
    log.write_bytes(make_lines(12)[:-9])
    document = json.loads(run("--trees", log, "none", "--json").stdout)
    assert (document["requests"], len(document["notes"])) == (11, 1)
    assert "line 12 is torn" in run("--trees", log, "none").stdout


def test_a_folder_ends_with_1(run: Run, tmp_path: Path) -> None:
    failed = run("--trees", tmp_path)
    assert (failed.exit_code, "can't be read" in failed.stderr) == (1, True)


@pytest.mark.parametrize("arguments", [("--last", "1h"), ("--engine", "e"), ("--state-dir", "/"), ("--seed", -1)])
def test_what_is_about_the_store_makes_no_sense_here(run: Run, log: Path, arguments: tuple[str, str | int]) -> None:
    failed = run("--trees", log, *arguments)
    assert failed.exit_code == 2
    assert arguments[0] in failed.stderr
