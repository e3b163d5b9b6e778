"""Spares vLLM's V1 runner the draft pass of steps that draft nothing.

For k = 0 vLLM still runs the drafter, since its context K/V has to keep up with the target's tokens. A DFlash drafter's
context K/V come from the target's hidden states alone, by `precompute_and_store_context_kv`; the forward pass that follows
serves the drafts only, so it is left out. And nobody reads those K/V before something is drafted again: the rows are kept, and
stored in one go then, or when there are `MOST_ROWS` of them.

A block that is freed and given to another request meanwhile may come up twice among the kept rows: the later row wins, as
it would have. Letters: T = context rows of a step, H = the drafter's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from honed.attach.runner import Runner

MOST_ROWS = 512
PADDING_SLOT_ID = -1
"""vLLM's: a row with this slot is not stored."""

_NEEDED = ("propose", "set_inputs_first_pass", "_context_positions_buffer", "_context_slot_mapping_buffer", "parallel_drafting")


class ContextBacklog:
    """Context rows that the drafter hasn't stored yet.

    Args:
        store: (states [T, H], positions [T], slots [T]): the draft model's `precompute_and_store_context_kv`.
    """

    def __init__(self, store: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> None:
        self._store = store
        self._rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def add(self, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep a step's rows; the tensors must not change afterwards."""
        self._rows.append((states, positions, slots))
        self._num_rows += len(states)
        if self._num_rows > MOST_ROWS:
            self.flush()

    def flush(self) -> None:
        """Store what was kept."""
        if not self._rows:
            return
        rows, num_rows, self._rows, self._num_rows = self._rows, self._num_rows, [], 0
        if len(rows) == 1:
            self._store(*rows[0])
        elif num_rows > 2 * MOST_ROWS:  # a long prompt among them: comparing all pairs would cost more
            for one in rows:
                self._store(*one)
        else:
            states, positions, slots = (torch.cat(column) for column in zip(*rows, strict=True))
            self._store(states, positions, latest_only(slots))


def latest_only(slots: torch.Tensor) -> torch.Tensor:
    """Set all but the last of equal slots [n] to PADDING_SLOT_ID, without waiting for the device."""
    is_same = slots[:, None] == slots[None, :]
    return slots.masked_fill(is_same.triu_(1).any(dim=1), PADDING_SLOT_ID)


def skip_idle_drafts(runner: Runner, device: torch.device) -> bool:
    """Wrap the `propose` of a V1 runner's DFlash drafter; False, with nothing changed, where that isn't known to be allowed."""
    if runner.name != "v1":
        return False
    drafter, model = runner.drafter, runner.draft_model
    if getattr(drafter, "method", "") != "dflash" or any(not hasattr(drafter, name) for name in _NEEDED):
        return False
    if drafter.vllm_config.parallel_config.data_parallel_size > 1:
        return False  # ranks agree on padding within the draft pass: none may leave it out alone
    backlog, propose = ContextBacklog(model.precompute_and_store_context_kv), drafter.propose

    def propose_if_any(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs.get("num_speculative_tokens") != 0:
            backlog.flush()
            return propose(*args, **kwargs)
        drafter.num_speculative_tokens = 0
        drafter._last_draft_probs = None
        given = ("target_token_ids", "next_token_ids", "target_positions", "token_indices_to_sample", "num_rejected_tokens_gpu")
        cad = kwargs["common_attn_metadata"]
        states = model.combine_hidden_states(kwargs["target_hidden_states"])
        drafter.set_inputs_first_pass(target_hidden_states=states, cad=cad, **{name: kwargs[name] for name in given})
        rows = len(states)
        backlog.add(
            states, drafter._context_positions_buffer[:rows].clone(), drafter._context_slot_mapping_buffer[:rows].clone()
        )
        return torch.empty(cad.batch_size(), 0, dtype=torch.int64, device=device)

    drafter.propose = propose_if_any
    return True
