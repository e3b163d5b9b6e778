"""Likely tokens of a draft pass, kept where a replayed CUDA graph writes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from honed.attach.trees.draft_candidates import DraftCandidates
from honed.kernels.trees.reference import NUM_CANDIDATES

REQUESTS, STEPS, WORDS = 3, 20, 50


def speculator(logits: torch.Tensor) -> Any:
    """What a DFlash speculator of V2's has for it; request r of a pass has slot 2 - r, and the last row only pads."""
    slots = torch.tensor([2, 1, -1]).repeat_interleave(STEPS)
    return SimpleNamespace(
        num_speculative_steps=STEPS,
        max_num_reqs=REQUESTS,
        device="cpu",
        sample_idx_mapping=slots,
        temperature=torch.tensor([5.0, 0.5, 2.0]),
        compute_draft_logits=lambda *_: logits,
        query_cudagraph_manager=SimpleNamespace(run_fullgraph=lambda desc: desc),
    )


def test_candidates_have_their_requests_temperature_and_depths_that_trees_take() -> None:
    logits = torch.randn(REQUESTS * STEPS, WORDS, generator=torch.Generator().manual_seed(3))
    drafter = speculator(logits)
    found = DraftCandidates(drafter)
    found.wrap()
    assert drafter.compute_draft_logits("states", 0) is logits
    assert found.has_run
    assert found.depth == 16  # of 20
    by_depth = logits.view(REQUESTS, STEPS, WORDS)[:, :16]
    for request, temperature in ((0, 2.0), (1, 0.5)):
        expected = (by_depth[request] / temperature).log_softmax(-1).topk(NUM_CANDIDATES)
        torch.testing.assert_close(found.log_probs[request], expected.values)
        assert torch.equal(found.ids[request].long(), expected.indices)


def test_pairs_have_a_row_for_each_token_of_the_depth_above() -> None:
    scored, generator = 10, torch.Generator().manual_seed(5)
    tokens = torch.rand(REQUESTS, STEPS, WORDS, generator=generator).argsort(-1)[..., :scored]
    scores = torch.randn(REQUESTS, STEPS, scored, scored, generator=generator)
    drafter = speculator(torch.zeros(1))
    drafter.top_k, drafter._score_candidates = scored, lambda *_: scores
    found = DraftCandidates(drafter)
    found.wrap()
    assert drafter._score_candidates(tokens, "unary", "states") is scores
    assert found.has_run
    assert found.places is not None
    for request, temperature in ((0, 2.0), (1, 0.5)):
        for depth in (0, 9, 15):
            for before in (0, 7):
                expected = (scores[request, depth, before] / temperature).log_softmax(-1).topk(NUM_CANDIDATES)
                torch.testing.assert_close(found.log_probs[request, depth, before], expected.values)
                assert torch.equal(found.places[request, depth, before].long(), expected.indices)
                assert torch.equal(found.ids[request, depth, before].long(), tokens[request, depth, expected.indices])


def test_more_scored_tokens_than_trees_take_are_refused() -> None:
    drafter = speculator(torch.zeros(1))
    drafter.top_k = 17
    assert DraftCandidates(drafter).problem == "the drafter scores 17 tokens a depth, and trees take 16"


def test_a_replayed_graph_counts_as_a_pass() -> None:
    drafter = speculator(torch.zeros(REQUESTS * STEPS, WORDS))
    found = DraftCandidates(drafter)
    found.wrap()
    found.watch_graphs()
    assert not found.has_run
    assert drafter.query_cudagraph_manager.run_fullgraph("graph") == "graph"
    assert found.has_run


def test_a_failure_is_told_and_never_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no room")

    drafter = speculator(torch.zeros(REQUESTS * STEPS, WORDS))
    found = DraftCandidates(drafter)
    found.wrap()
    monkeypatch.setattr("honed.attach.trees.draft_candidates.top_candidates", fail)
    assert len(drafter.compute_draft_logits("states", 0)) == REQUESTS * STEPS
    assert found.problem == "RuntimeError: no room"
