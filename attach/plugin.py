"""vLLM's `general_plugins` entry point: vLLM calls it in each process; inert unless HONED_RUNTIME_DIR is set."""

from __future__ import annotations

import os

from honed.adapt.protocol.attach_variables import RUNTIME_DIR, wants_tree_graphs, wants_trees


def register() -> None:
    """Prepare this process for an attachment; do nothing, and import nothing, when honed isn't switched on."""
    if os.environ.get(RUNTIME_DIR, "").strip():
        from honed.attach.engine import engine_hook

        engine_hook.install()
        if wants_trees(os.environ):
            from honed.attach.trees.runner_v2 import prepare_workers

            prepare_workers(wants_tree_graphs(os.environ))
