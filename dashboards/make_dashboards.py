"""Makes the dashboards: `python dashboards/make_dashboards.py` rewrites them, and a test says when that was forgotten."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from honed.dashboards.board_controller import controller
from honed.dashboards.board_daemon import daemon
from honed.dashboards.board_overview import overview
from honed.dashboards.board_training import training

FOLDER = Path(__file__).parent
BOARDS: dict[str, Callable[[], dashboard.Dashboard]] = {
    "honed-overview.json": overview,
    "honed-controller.json": controller,
    "honed-training.json": training,
    "honed-daemon.json": daemon,
}
"""File -> what makes it."""


def render(board: dashboard.Dashboard) -> str:
    """The JSON as it is committed."""
    return json.dumps(board.build(), cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> None:
    """Write every dashboard beside this script."""
    for name, make in BOARDS.items():
        (FOLDER / name).write_text(render(make()))


if __name__ == "__main__":
    main()
