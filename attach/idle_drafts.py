"""Spares vLLM's runners the draft pass of steps that draft nothing.

For k = 0 vLLM still runs the drafter, since its context K/V has to keep up with the target's tokens. A DFlash drafter's
context K/V come from the target's hidden states alone, by `precompute_and_store_context_kv`; the forward pass that follows
serves the drafts only, so it is left out. On V1 the rows are kept as well (`ContextBacklog`). On V2 they are stored at once,
since in vLLM's `propose` that comes before the pass, and is outside of the CUDA graph where the drafter runs eagerly.

On V1 every step of an engine that speculates comes with the metadata of a verification, which takes the slow path through the
rejection sampler though nothing is verified: a step without drafts is sampled as a plain one. But not where a request has a
budget for its thinking: vLLM's plain sampler takes the rows of an engine that speculates for drafts (`thinking_budget_state`,
`_apply_forcing_to_logits`), and would end another request's thinking.

Where a KV connector saves, sends or loads the drafter's K/V around each pass, everything is left as it is. Where vLLM copies
blocks that are filled in part, as it does for hybrid models, rows are stored at once.

What would replace it: a `propose` that stores and returns when `num_speculative_tokens` is 0, and a `spec_decode_metadata` that
is None where no draft is scheduled.
"""

from __future__ import annotations

from typing import Any

import torch

from honed.attach.context_backlog import MOST_ROWS, ContextBacklog
from honed.attach.runner import Runner

_NEEDED = {
    "v1": ("propose", "parallel_drafting"),
    "v2": ("propose", "_generate_draft", "_precompute_context_kv"),
}
_METADATA = 5
"""Where `propose_draft_token_ids` takes `spec_decode_metadata`, behind the scheduler's output."""


def skip_idle_drafts(runner: Runner, device: torch.device) -> bool:
    """Wrap the `propose` of a DFlash drafter; False, with nothing changed, where that isn't known to be allowed."""
    drafter = runner.drafter
    if any(not hasattr(drafter, name) for name in _NEEDED[runner.name]):
        return False
    config = drafter.vllm_config
    if config.parallel_config.data_parallel_size > 1:
        return False  # ranks agree on padding within the draft pass: none may leave it out alone
    if config.kv_transfer_config is not None:
        return False
    if runner.name == "v1" and getattr(drafter, "method", "") == "dflash":
        _keep_rows(runner, device, 0 if config.model_config.is_hybrid else MOST_ROWS)
        _sample_plainly(runner.model_runner)
    elif runner.name == "v2" and type(drafter).__name__ == "DFlashSpeculator":
        _store_rows(drafter)
    else:
        return False
    return True


def _keep_rows(runner: Runner, device: torch.device, most_rows: int) -> None:
    drafter, model = runner.drafter, runner.draft_model
    backlog, propose = ContextBacklog(model.precompute_and_store_context_kv, most_rows), drafter.propose

    def propose_if_any(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs.get("num_speculative_tokens") != 0:
            backlog.flush()
            return propose(*args, **kwargs)
        drafter.num_speculative_tokens = 0
        drafter._last_draft_probs = None
        # What `set_inputs_first_pass` says of the context, without what it says of the drafts.
        cad, positions = kwargs["common_attn_metadata"], kwargs["target_positions"]
        drafter._dflash_hidden_states = states = model.combine_hidden_states(kwargs["target_hidden_states"])
        backlog.add(
            states,
            (positions if positions.dim() == 1 else positions[0]).clone(),
            cad.slot_mapping[: len(states)].clone(),
        )
        return torch.empty(cad.batch_size(), 0, dtype=torch.int64, device=device)

    drafter.propose = propose_if_any


def _sample_plainly(model_runner: Any) -> None:
    sample, propose = model_runner._sample, model_runner.propose_draft_token_ids

    def sample_plainly(logits: Any, spec_decode_metadata: Any) -> Any:
        budgets = model_runner.input_batch.sampling_metadata.thinking_budget_state_holder
        if budgets is None or not budgets.has_tracked_requests():
            spec_decode_metadata = _unless_empty(spec_decode_metadata)
        return sample(logits, spec_decode_metadata)

    def propose_plainly(scheduler_output: Any, *args: Any) -> Any:
        if scheduler_output.num_spec_tokens_to_schedule == 0:
            args = (*args[:_METADATA], _unless_empty(args[_METADATA]), *args[_METADATA + 1 :])
        return propose(scheduler_output, *args)

    model_runner._sample, model_runner.propose_draft_token_ids = sample_plainly, propose_plainly


def _unless_empty(spec_decode_metadata: Any) -> Any:
    return spec_decode_metadata if spec_decode_metadata is not None and any(spec_decode_metadata.num_draft_tokens) else None


def _store_rows(drafter: Any) -> None:
    propose, generate = drafter.propose, drafter._generate_draft

    def generate_nothing(*args: Any, **kwargs: Any) -> None: ...

    def propose_if_any(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("num_speculative_tokens") != 0 or kwargs.get("dummy_run"):
            return propose(*args, **kwargs)
        drafter._generate_draft = generate_nothing
        try:
            return propose(*args, **(kwargs | {"is_profile": True}))  # which only means: eagerly
        finally:
            drafter._generate_draft = generate

    drafter.propose = propose_if_any
