"""vLLM's `general_plugins` entry point: vLLM calls it in each process; inert unless HONED_RUNTIME_DIR is set."""

from __future__ import annotations

import os

from honed.adapt.protocol.attach_variables import RUNTIME_DIR, wants_tree_graphs, wants_trees


def register() -> None:
    """Prepare this process for an attachment; do nothing, and import nothing, when honed isn't switched on."""
    if os.environ.get(RUNTIME_DIR, "").strip():
        from honed.attach.engine import engine_hook

        engine_hook.install()
        try:
            has_trees, may_have_graphs = wants_trees(os.environ), wants_tree_graphs(os.environ)
        except ValueError:  # the scheduler's process says so, and serves without honed
            return
        if has_trees:
            from honed.attach.trees.runner_v2 import prepare_workers

            prepare_workers(may_have_graphs)
