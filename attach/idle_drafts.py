"""Spares vLLM's runners the draft pass of steps that draft nothing.

For k = 0 vLLM still runs the drafter, since its context K/V has to keep up with the target's tokens. A DFlash drafter's
context K/V come from the target's hidden states alone, by `precompute_and_store_context_kv`; the forward pass that follows
serves the drafts only, so it is left out. On V1 the rows are kept as well (`ContextBacklog`). On V2 they are stored at once,
since in vLLM's `propose` that comes before the pass, and is outside of the CUDA graph where the drafter runs eagerly.

On V1 every step of an engine that speculates comes with the metadata of a verification, which takes the slow path through the
rejection sampler though nothing is verified: a step without drafts is sampled as a plain one.

What would replace it: a `propose` that stores and returns when `num_speculative_tokens` is 0, and a `spec_decode_metadata` that
is None where no draft is scheduled.
"""

from __future__ import annotations

from typing import Any

import torch

from honed.attach.context_backlog import ContextBacklog
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
    if drafter.vllm_config.parallel_config.data_parallel_size > 1:
        return False  # ranks agree on padding within the draft pass: none may leave it out alone
    if runner.name == "v1" and getattr(drafter, "method", "") == "dflash":
        _keep_rows(runner, device)
        _sample_plainly(runner.model_runner)
    elif runner.name == "v2" and type(drafter).__name__ == "DFlashSpeculator":
        _store_rows(drafter)
    else:
        return False
    return True


def _keep_rows(runner: Runner, device: torch.device) -> None:
    drafter, model = runner.drafter, runner.draft_model
    backlog, propose = ContextBacklog(model.precompute_and_store_context_kv), drafter.propose

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
        return sample(logits, _unless_empty(spec_decode_metadata))

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
