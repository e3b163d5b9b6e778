"""Draft trees of a DFlash2 drafter, which scores each token after each of the depth above, on vLLM's V2 runner."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.make_pairs.kinds import make_dflash2
from tests.e2e.engine import DRAFTER, IS_SLOW, IS_V2, TARGET, K, TestEngine, engine, held_out
from tests.e2e.logged import rounds, set_policy, take_batches
from tests.e2e.swapping import wait_until_trees_may_grow

pytestmark = [pytest.mark.e2e, pytest.mark.v2, pytest.mark.skipif(not IS_V2, reason="vLLM has DFlash2 on V2 alone")]
SLOTS = 15
PROMPTS = held_out(2 if IS_SLOW else 8, 60 if IS_SLOW else 300)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16 if IS_SLOW else 48, "ignore_eos": True}


def chains(trees: Any, slots: list[int]) -> list[list[int]]:
    """Tokens of the likeliest child of the likeliest child, and so on, of these slots' trees."""
    found = []
    for slot in slots:
        tokens, parents, ranks = (part[slot].tolist() for part in (trees.tokens, trees.parents, trees.ranks))
        chain, last = list[int](), -1
        for node in range(int(trees.num_nodes[slot])):
            if parents[node] == last and ranks[node] == 0:
                chain.append(tokens[node])
                last = node
        found.append(chain)
    return found


def test_tokens_are_those_without_speculation_and_trees_hold_vllms_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from honed.attach.trees.runner_v2 import TreesV2, prepare_workers

    drafter = tmp_path / "drafter"
    shutil.copytree(DRAFTER, drafter)
    make_dflash2(drafter, scale=0.05)
    with engine(None, speculative_config=None) as plain:
        expected = plain.generate(PROMPTS, **GREEDY)
    monkeypatch.setenv("HONED_TREES", "1")
    prepare_workers()
    grow, seen = TreesV2._grow, list[tuple[list[int], list[int]]]()

    def watched(self: TreesV2, padded: torch.Tensor, batch: Any) -> torch.Tensor:
        vllms = padded[:, :K].tolist()
        grown = grow(self, padded, batch)
        seen.extend(zip(vllms, chains(self._trees, batch.idx_mapping_np[: batch.num_reqs].tolist()), strict=False))
        return grown

    monkeypatch.setattr(TreesV2, "_grow", watched)
    speculation = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": SLOTS}
    with engine(tmp_path / "run", TARGET, drafter, speculative_config=speculation) as running:
        wait_until_trees_may_grow(running)
        check(running, expected)
    deep = [len(chain) for _, chain in seen if len(chain) > 1]
    assert len(deep) > 3, "trees hold hardly a chain of two: this shows little"
    assert all(chain == vllms[: len(chain)] for vllms, chain in seen)


def check(running: TestEngine, expected: list[list[int]]) -> None:
    running.honed.before_schedule()
    hello = running.honed._hello()
    assert "trees" in hello.capabilities, hello.limits
    accepted = {}
    for budget in (SLOTS, 3):
        set_policy(running, static_k=budget, max_k=SLOTS)
        take_batches(running)
        assert running.generate(PROMPTS, **GREEDY) == expected
        batches = take_batches(running)
        rows = rounds(batches)
        assert max(row["k"] for row in rows) == budget
        assert sum(sum(batch.rounds.chain_tokens) for batch in batches) > 0, "no tree was verified"
        accepted[budget] = sum(row["accepted"] for row in rows) / len(rows)
        in_chains = sum(sum(batch.rounds.chain_accepted) for batch in batches) / len(rows)
        assert accepted[budget] > in_chains
    assert accepted[SLOTS] > accepted[3]
    assert running.honed.errors.count == 0
    assert running.core.model_executor.driver_worker.worker._honed_errors.count == 0
