"""Steps with chains and steps with trees that follow each other closely, as they do while the two are compared."""

from __future__ import annotations

import pytest

from honed.adapt.lengths import tree_decider
from honed.adapt.protocol import wire
from tests.e2e.engine import K, TestEngine
from tests.e2e.logged import set_policy


def take_turns(running: TestEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a policy in force under which chains and trees are chosen by chance, anew in every second step."""
    monkeypatch.setattr(tree_decider, "_RUN_STEPS", 2)
    monkeypatch.setattr(tree_decider, "COLD_EXPLORE_SHARE", 0.5)
    set_policy(running, kind="goodput", static_k=15, max_k=running.honed._num_spec_tokens, explore_share=0.02)


def check_turns(batches: list[wire.EventBatch]) -> None:
    """Each step verified either trees or chains of the drafter's block or less, and both occurred."""
    kinds = dict[int, set[bool]]()
    for batch in batches:
        columns = batch.rounds
        for step, k, chain in zip(
            columns.step, columns.num_draft_tokens, columns.chain_tokens or [0] * len(columns.step), strict=True
        ):
            if k:
                kinds.setdefault(step, set()).add(chain > 0)
                assert chain or k <= K
    assert all(len(seen) == 1 for seen in kinds.values())
    found = [is_tree for seen in kinds.values() for is_tree in seen]
    assert found.count(True) >= 2 <= found.count(False), found
