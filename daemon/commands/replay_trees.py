"""`honed replay --trees FILE`: predicts draft trees' results on a candidate log. `adapt.trees.replay` computes the answer.

The daemon's database has no candidates that a round didn't verify. `adapt.trees.candidate_log` defines the file's format.
"""

from __future__ import annotations

import gzip
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from honed.daemon.client.client import EXIT_USAGE
from honed.daemon.commands.replay import Document, ReplayError
from honed.daemon.commands.show import cells
from honed.daemon.commands.show.cells import Rows

if TYPE_CHECKING:
    from honed.adapt.trees.candidate_log import CandidateRequest

POLICIES = ("none", "chain", "tree:8", "tree:16", "tree:32", "tree:64", "caddtree", "shared", "honed")


@dataclass(frozen=True)
class TreeQuestion:
    """Selection from a file; empty policies and workload select all."""

    policies: tuple[str, ...] = ()
    workload: str = ""
    cost: str = "gpu"
    batches: tuple[int, ...] = (1,)
    seed: int = 0


def replay_trees(path: Path, question: TreeQuestion) -> Document:
    """Answer a question from a file of candidates.

    Raises:
        ReplayError: missing file, not a candidate log, unknown policy, cost or workload.
    """
    from honed.adapt.trees.costs import parse_cost
    from honed.adapt.trees.policies import parse_tree_policy
    from honed.adapt.trees.replay import predict

    said: list[str] = []
    requests = _of_workload(_read(path, said), question.workload)
    depths = requests[0].candidates.shape[1]
    named = [f"chain:{depths}" if name == "chain" else name for name in question.policies or POLICIES]
    try:
        model = parse_cost(question.cost)
        for name in named:
            parse_tree_policy(name, depths, model)
        if min(question.batches) < 1:
            raise ValueError("a batch has at least one request")
    except ValueError as error:
        raise ReplayError(str(error), exit_code=EXIT_USAGE) from error
    rows = []
    for batch in question.batches:
        for name in named:
            row = asdict(predict(requests, name, model, batch, question.seed))
            del row["sums"]
            rows.append(row)
    return {
        "file": str(path),
        "workload": question.workload,
        "cost": question.cost,
        "requests": len(requests),
        "tokens": sum(len(request.tokens) for request in requests),
        "num_depths": depths,
        "num_candidates": requests[0].candidates.shape[2],
        "policies": rows,
        "notes": said,
    }


def render(document: Document) -> RenderableType:
    """A line for each policy and batch size; the fastest of each batch size is bold."""
    table = Rows.of("batch", "policy", "tokens/s", "95 %", "τ", "nodes", "calibration", "before", "exact")
    rows = document["policies"]
    for row in rows:
        best = max(other["tokens_per_s"]["value"] for other in rows if other["num_requests"] == row["num_requests"])
        speed = row["tokens_per_s"]
        table.add_row(
            cells.count(row["num_requests"]),
            row["policy"],
            cells.number(speed["value"], 1),
            cells.interval(speed["low"], speed["high"], 1),
            cells.number(row["acceptance_length"]["value"], 3),
            cells.number(row["nodes_per_round"], 2),
            cells.number(row["calibration_error"], 4),
            cells.number(row["calibration_error_before"], 4),
            cells.percent(row["exact_rounds"]),
            style="bold" if speed["value"] == best else None,
        )
    head = (
        f"{document['file']}{', workload ' + document['workload'] if document['workload'] else ''}: "
        f"{cells.count(document['tokens'])} tokens of {cells.count(document['requests'])} requests, "
        f"{document['num_depths']} depths, {document['num_candidates']} candidates each; cost {document['cost']}"
    )
    notes: tuple[str, ...] = (
        "Predicted from a file of candidates. τ: tokens per round; nodes: verified per round, without root.",
        "calibration: mean |predicted − seen| of the verified nodes; before: with the drafter's own probabilities.",
        "exact: rounds that begin where candidates were logged.",
    )
    if any(row["tokens_per_s"]["low"] is None for row in rows):
        notes = (*notes, "No interval: too few requests to estimate their variance.")
    said = (Text(f"! {note}", "yellow") for note in document["notes"])
    return Group(Text(head), table, *said, *(Text(note, "dim") for note in notes))


def _read(path: Path, notes: list[str]) -> list[CandidateRequest]:
    from honed.adapt.trees.candidate_log import CandidateLogError, read_candidates

    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            return read_candidates(lines, notes)
    except FileNotFoundError as error:
        cure = "--trees takes a log of candidates, JSON lines; benchmarks/make_tiny/candidates.py writes one."
        raise ReplayError(f"there is no file {path}", cure=cure, exit_code=EXIT_USAGE) from error
    except (OSError, EOFError) as error:
        raise ReplayError(f"{path} can't be read: {error}", cure="Check that it is a complete, readable file.") from error
    except CandidateLogError as error:
        cure = "A log of candidates has one JSON object a line, as honed/adapt/trees/candidate_log.py describes."
        raise ReplayError(f"{path}: {error}", cure=cure) from error


def _of_workload(requests: list[CandidateRequest], workload: str) -> list[CandidateRequest]:
    chosen = [request for request in requests if workload in ("", request.workload)]
    if not chosen:
        names = ", ".join(sorted({request.workload for request in requests}))
        raise ReplayError(f"no workload {workload!r} in the file: there is {names}", exit_code=EXIT_USAGE)
    return chosen
