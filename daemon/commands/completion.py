"""Names that a shell completes: engines, versions and operations of the daemon. `honed --install-completion` sets it up.

Nothing is completed where the daemon doesn't answer within a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from honed.daemon.client.client import AdminError
from honed.daemon.client.terminal import Connection
from honed.daemon.client.visible import visible

TIMEOUT_S = 1.0
Completer = Callable[[typer.Context, str], list[str]]


def _of(path: str, names: Callable[[Any], list[Any]]) -> Completer:
    def complete(context: typer.Context, incomplete: str) -> list[str]:
        given = context.find_root().params  # the options' own callback doesn't run in a completion
        options = {name: given[name] for name in ("config", "socket", "url", "token_file") if given.get(name)}
        try:
            with Connection(**options, timeout_s=TIMEOUT_S).open() as client:
                found = [visible(str(name)) for name in names(client.get(path))]
        except (AdminError, typer.Exit):
            return []
        return sorted({name for name in found if name.startswith(incomplete)})

    return complete


engines = _of("/v1/engines", lambda rows: [row["engine_id"] for row in rows])
versions = _of("/v1/drafters", lambda document: [one["version"] for one in document["versions"]])
operations = _of("/v1/operations", lambda rows: [row["operation_id"] for row in rows])
running = _of("/v1/operations", lambda rows: [row["operation_id"] for row in rows if not row.get("finished_unix_s")])
canaries = _of("/v1/canaries", lambda rows: [row["operation_id"] for row in rows])
overrides = _of("/v1/overrides", lambda rows: [row["name"] for row in rows])


def override_names(incomplete: str) -> list[str]:
    """What can be overridden."""
    return [name for name in ("capture_share", "draft_tokens", "policy") if name.startswith(incomplete)]
