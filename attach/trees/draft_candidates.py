"""The tokens that trees grow from, kept in place, so that a CUDA graph of the draft pass writes them, too.

vLLM captures the whole draft pass of a DFlash drafter as one graph, from its context to the drafts. When the graph is replayed
no Python runs, and logits that were seen at capture may be overwritten. So each depth's likely tokens are found within the
pass, right after its logits, and written to tensors that stay.
"""

from __future__ import annotations

from typing import Any

import torch

from honed.attach.trees.grow import NUM_CANDIDATES
from honed.kernels.trees.reference import MAX_DEPTHS
from honed.kernels.trees.top_candidates import top_candidates

# Letters: R requests of a pass, M of the largest, D draft tokens, m candidates, V vocabulary.


class DraftCandidates:
    """Candidates of a V2 DFlash speculator's last pass.

    Made with the speculator, since its graphs are captured before honed attaches.
    """

    def __init__(self, speculator: Any) -> None:
        self._speculator = speculator
        self.depth: int = min(speculator.num_speculative_steps, MAX_DEPTHS)
        shape = speculator.max_num_reqs, self.depth, NUM_CANDIDATES
        self.log_probs = torch.full(shape, float("-inf"), device=speculator.device)  # [M, D, m]
        self.ids = torch.zeros(shape, dtype=torch.int32, device=speculator.device)  # [M, D, m]
        self.has_run = False
        """Whether a pass ran since this was last set back."""
        self.problem = ""
        """Why candidates aren't to be had any more; empty while they are."""

    def wrap(self) -> None:
        """Find candidates in each pass from now on."""
        compute = self._speculator.compute_draft_logits

        def compute_draft_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            try:
                if not self.problem:
                    self._find(logits)
            except Exception as error:  # a graph may have been captured without candidates
                self.problem = f"{type(error).__name__}: {error}"
            return logits

        self._speculator.compute_draft_logits = compute_draft_logits

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

    def _find(self, logits: torch.Tensor) -> None:  # [R * D, V]
        self.has_run = True
        speculator, steps = self._speculator, self._speculator.num_speculative_steps
        rows = len(logits) // steps
        slots = speculator.sample_idx_mapping[: rows * steps : steps].clamp(min=0)  # a row that pads the graph has −1
        by_depth = logits.view(rows, steps, -1)[:, : self.depth]
        kept = min(NUM_CANDIDATES, logits.shape[-1])
        log_probs, ids = top_candidates(by_depth, kept, speculator.temperature[slots])
        self.log_probs[:rows, :, :kept] = log_probs
        self.ids[:rows, :, :kept] = ids
