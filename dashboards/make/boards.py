"""Makes the dashboards: `python -m honed.dashboards.make.boards` rewrites them, and a test fails if they are out of date."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from honed.dashboards.make.controller import controller
from honed.dashboards.make.daemon import daemon
from honed.dashboards.make.overview import overview
from honed.dashboards.make.training import training

FOLDER = Path(__file__).parents[1]
BOARDS: dict[str, Callable[[], dashboard.Dashboard]] = {
    "honed-overview.json": overview,
    "honed-controller.json": controller,
    "honed-training.json": training,
    "honed-daemon.json": daemon,
}
"""File -> its maker."""


def render(board: dashboard.Dashboard) -> str:
    """Render the JSON as it is committed."""
    return json.dumps(board.build(), cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> None:
    """Write every dashboard."""
    for name, make in BOARDS.items():
        (FOLDER / name).write_text(render(make()))


if __name__ == "__main__":
    main()
