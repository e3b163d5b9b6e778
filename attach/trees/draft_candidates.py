"""The tokens that trees grow from, kept in place, so that a CUDA graph of the draft pass writes them, too.

vLLM captures the whole draft pass of a DFlash drafter as one graph, from its context to the drafts. When the graph is replayed
no Python runs, and logits that were seen at capture may be overwritten. So each depth's likely tokens are found within the
pass, right after its logits, and written to tensors that stay.

A DFlash2 drafter scores pairs: each depth's K likely tokens, after each of the K tokens of the depth above. There a node's
children follow from its own token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from honed.kernels.trees.reference import MAX_CANDIDATES, MAX_DEPTHS, NUM_CANDIDATES, usable
from honed.kernels.trees.top_candidates import top_candidates
from honed.kernels.trees.warm_up import Run, build_run, candidate_runs

# Letters: R requests of a pass, M of the largest, D draft tokens, m candidates, V vocabulary, K scored tokens of a depth.


class DraftCandidates:
    """Candidates of a V2 DFlash or DFlash2 speculator's last pass.

    Made with the speculator, since its graphs are captured before honed attaches.
    """

    def __init__(self, speculator: Any) -> None:
        self._speculator = speculator
        self.depth: int = min(speculator.num_speculative_steps, MAX_DEPTHS)
        self._num_scored = int(getattr(speculator, "top_k", 0))
        """K; 0 for a drafter that doesn't score pairs."""
        rows = (self._num_scored,) if self._num_scored else ()
        shape = (speculator.max_num_reqs, self.depth, *rows, NUM_CANDIDATES)
        self.log_probs = torch.full(shape, float("-inf"), device=speculator.device)  # [M, D, m] or [M, D, K, m]
        self.ids = torch.zeros(shape, dtype=torch.int32, device=speculator.device)  # the same
        self.places = torch.zeros_like(self.ids) if rows else None  # [M, D, K, m], places among the K of a depth
        self.has_run = False
        """Whether a pass ran since this was last set back."""
        self.is_wanted = True
        """Whether trees may grow from the next pass. A graph that was captured finds candidates in any case."""
        self.problem = ""
        """Why candidates aren't to be had any more; empty while they are."""
        if self._num_scored > MAX_CANDIDATES:
            self.problem = f"the drafter scores {self._num_scored} tokens a depth, and trees take {MAX_CANDIDATES}"

    def wrap(self) -> None:
        """Find candidates in each pass from now on."""
        if self._num_scored:
            self._wrap_scores()
            return
        compute = self._speculator.compute_draft_logits

        def compute_draft_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            self._try(self._find, logits)
            return logits

        self._speculator.compute_draft_logits = compute_draft_logits

    def _wrap_scores(self) -> None:
        score = self._speculator._score_candidates

        def score_candidates(candidate_ids: Any, *args: Any, **kwargs: Any) -> Any:
            scores = score(candidate_ids, *args, **kwargs)
            self._try(self._find_pairs, candidate_ids, scores)
            return scores

        self._speculator._score_candidates = score_candidates

    def _try(self, find: Callable[..., None], *given: Any) -> None:
        try:
            if self.is_wanted and not self.problem:
                find(*given)
        except Exception as error:  # a graph may have been captured without candidates
            self.problem = f"{type(error).__name__}: {error}"

    def watch_graphs(self) -> None:
        """Note when a graph of the pass is replayed, from now on."""
        manager = getattr(self._speculator, "query_cudagraph_manager", None)
        if manager is None:
            return
        run = manager.run_fullgraph

        def run_fullgraph(*args: Any, **kwargs: Any) -> Any:
            self.has_run = True
            return run(*args, **kwargs)

        manager.run_fullgraph = run_fullgraph

    def kernels(self, num_slots: int) -> Iterator[Run]:
        """What compiles the device's kernels for passes of any number of requests, and for trees of so many nodes."""
        speculator, device = self._speculator, self.log_probs.device
        if not self._num_scored:
            shape = self.depth, min(NUM_CANDIDATES, speculator.vocab_size), speculator.vocab_size
            # Rows of vLLM's head are padded; those mapped to a larger vocabulary aren't.
            yield from candidate_runs(*shape, speculator.dtype, device, speculator.max_num_reqs, [True], [False, True])
        yield build_run(self.depth, NUM_CANDIDATES, num_slots, device, self._num_scored)

    def _find(self, logits: torch.Tensor) -> None:  # [R * D, V]
        self.has_run = True
        steps = self._speculator.num_speculative_steps
        rows = len(logits) // steps
        by_depth = logits.view(rows, steps, -1)[:, : self.depth]
        kept = min(NUM_CANDIDATES, logits.shape[-1])
        log_probs, ids = top_candidates(by_depth, kept, self._temperatures(rows))
        self.log_probs[:rows, :, :kept] = log_probs
        self.ids[:rows, :, :kept] = ids

    def _find_pairs(self, tokens: torch.Tensor, scores: torch.Tensor) -> None:  # [R, D, K], [R, D, K, K]: after each, of each
        self.has_run = True
        assert self.places is not None
        tokens, scores = tokens[:, : self.depth], scores[:, : self.depth].float()
        rows, kept = len(tokens), min(NUM_CANDIDATES, scores.shape[-1])
        found = (scores / usable(self._temperatures(rows))[:, None, None, None]).log_softmax(-1).topk(kept, -1)
        self.log_probs[:rows, ..., :kept] = found.values
        self.ids[:rows, ..., :kept] = tokens[:, :, None].expand_as(scores).gather(-1, found.indices).int()
        self.places[:rows, ..., :kept] = found.indices.int()

    def _temperatures(self, rows: int) -> torch.Tensor:  # [R]
        speculator, steps = self._speculator, self._speculator.num_speculative_steps
        slots = speculator.sample_idx_mapping[: rows * steps : steps].clamp(min=0)  # a row that pads the graph has −1
        found: torch.Tensor = speculator.temperature[slots]
        return found
