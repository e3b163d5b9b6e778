"""The progress bar moves during a training and shows the time left."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from honed.daemon.commands import watching
from honed.daemon.commands.show import status as show


def view(stage: str, **detail: Any) -> dict[str, Any]:
    return {"operation_id": "op-1", "kind": "recalibrate", "state": "running", "stage": stage, "detail": detail}


def training(steps: int, **detail: Any) -> dict[str, Any]:
    return view("training", steps=steps, max_steps=100, samples=40, sessions=8, **detail)


@pytest.mark.parametrize(
    ("shown", "share"),
    [
        (training(25), 0.25),
        (training(25, train_seconds=9.0, max_seconds=10.0), 0.9),
        (training(250), 1.0),
        (view("training"), None),
        (view("collecting", steps=0, max_steps=100), None),
        (view("gating", steps=100, max_steps=100), None),
        (view("canary"), None),
        (view("done"), 1.0),
    ],
)
def test_the_bar_stands_for_the_training_alone(shown: dict[str, Any], share: float | None) -> None:
    assert show.share_done(shown) == share


def test_a_terminal_shows_the_time_that_is_left() -> None:
    def views() -> Iterator[dict[str, Any]]:
        yield view("collecting")
        for steps in range(0, 50, 5):
            yield training(steps)
            time.sleep(0.1)
        yield view("gating", steps=100, max_steps=100)
        time.sleep(0.3)
        yield view("done") | {"state": "succeeded"}

    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    assert watching._bar(views(), console)["state"] == "succeeded"
    said = console.file.getvalue()  # type: ignore[attr-defined]
    frames = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part) for part in re.split(r"[\r\n]", said)]
    assert any(re.search(r"training .* step 4\d/100 .*0:00:0[1-2] left", frame) for frame in frames), frames
    compared = [frame for frame in frames if "comparing" in frame]
    assert compared
    assert not [frame for frame in compared if "left" in frame]


def test_a_pipe_gets_a_line_for_each_stage() -> None:
    console = Console(file=io.StringIO(), width=120)
    watching._lines(iter([view("collecting"), training(1), training(2), view("done")]), console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split(":")[1].split("(")[0].strip() for line in lines] == ["collecting samples", "training", "done"]
