"""Skips the draft pass in vLLM's runners for steps that draft nothing.

For k = 0 vLLM still runs the drafter, since its context K/V has to keep up with the target's tokens. A DFlash drafter's
context K/V come from the target's hidden states alone, by `combine_hidden_states` and `precompute_and_store_context_kv`. The
forward pass that follows serves only the drafts, so it is skipped. On V1 the rows are also kept as the target gave them
(`ContextBacklog`). On V2 they are stored at once: vLLM's `propose` does that before the pass, and outside of the CUDA graph
where the drafter runs eagerly.

On V1 every step of a speculating engine carries verification metadata. It takes the slow path through the rejection sampler
though nothing is verified: a step without drafts is sampled as a plain one. The exception is a request with a thinking budget.
vLLM's plain sampler takes the rows of a speculating engine for drafts (`thinking_budget_state`, `_apply_forcing_to_logits`),
and would end another request's thinking. Where the step drafts nothing either, the runner doesn't lay out a draft pass (next
token, number of rejected ones). An engine that runs ahead of its scheduler (`use_async_scheduling`) needs those counts itself,
so it keeps vLLM's own path.

Nothing is changed where a KV connector saves, sends or loads the drafter's K/V around each pass. Rows are stored at once where
vLLM copies partly filled blocks, as for hybrid models. The same holds where the cache has several groups, whose blocks share
memory (`allocate_kv_cache`): a block of the drafter's may be the target's by the next step.

These would replace it: a `propose` that stores and returns when `num_speculative_tokens` is 0, and a `spec_decode_metadata`
that is None where no draft is scheduled.
"""

from __future__ import annotations

from typing import Any

import torch

from honed.attach.runner.context_backlog import MOST_ROWS, ContextBacklog
from honed.attach.runner.runner import Runner

_ON_V2 = ("DFlashSpeculator", "DFlash2Speculator", "DSparkSpeculator")
_NEEDED = {
    "v1": ("propose", "parallel_drafting"),
    "v2": ("propose", "_generate_draft", "_precompute_context_kv"),
}


def skip_idle_drafts(runner: Runner, device: torch.device) -> bool:
    """Wrap the `propose` of a DFlash or DSpark drafter.

    Returns:
        False, with nothing changed, where that isn't known to be safe.
    """
    drafter = runner.drafter
    if any(not hasattr(drafter, name) for name in _NEEDED[runner.name]):
        return False
    config = drafter.vllm_config
    if config.parallel_config.data_parallel_size > 1:
        return False  # ranks agree on padding within the draft pass: none may skip it alone
    if config.kv_transfer_config is not None:
        return False
    if runner.name == "v1" and getattr(drafter, "method", "") == "dflash":
        is_apart = len(runner.model_runner.kv_cache_config.kv_cache_groups) == 1 and not config.model_config.is_hybrid
        _keep_rows(runner, device, MOST_ROWS if is_apart else 0)
        _sample_plainly(runner)
    elif runner.name == "v2" and type(drafter).__name__ in _ON_V2:
        _store_rows(drafter)
    else:
        return False
    return True


def _keep_rows(runner: Runner, device: torch.device, most_rows: int) -> None:
    drafter, model, model_runner = runner.drafter, runner.draft_model, runner.model_runner
    propose = drafter.propose

    def store(states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        model.precompute_and_store_context_kv(model.combine_hidden_states(states), positions, slots)

    backlog = ContextBacklog(store, most_rows)

    def propose_if_any(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs.get("num_speculative_tokens") != 0:
            backlog.flush()
            return propose(*args, **kwargs)
        drafter.num_speculative_tokens = 0
        drafter._last_draft_probs = drafter._dflash_hidden_states = None
        # As `set_inputs_first_pass` does for the context, without its part for the drafts.
        cad, states, positions = (kwargs[name] for name in ("common_attn_metadata", "target_hidden_states", "target_positions"))
        backlog.add(
            states if model_runner.use_aux_hidden_state_outputs else states.clone(),  # aux states were concatenated just now
            (positions if positions.dim() == 1 else positions[0]).clone(),
            cad.slot_mapping[: len(states)].clone(),
        )
        return torch.empty(cad.batch_size(), 0, dtype=torch.int64, device=device)

    drafter.propose = propose_if_any


def _sample_plainly(runner: Runner) -> None:
    model_runner = runner.model_runner
    sample, propose = model_runner._sample, model_runner.propose_draft_token_ids

    def sample_plainly(logits: Any, spec_decode_metadata: Any) -> Any:
        budgets = model_runner.input_batch.sampling_metadata.thinking_budget_state_holder
        if budgets is None or not budgets.has_tracked_requests():
            spec_decode_metadata = _unless_empty(spec_decode_metadata)
        return sample(logits, spec_decode_metadata)

    def propose_plainly(
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Any,
        sample_hidden_states: Any,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        *others: Any,
    ) -> Any:
        if is_idle := scheduler_output.num_spec_tokens_to_schedule == 0:
            spec_decode_metadata = _unless_empty(spec_decode_metadata)
        if not is_idle or spec_decode_metadata is not None or model_runner.use_async_scheduling:
            return propose(
                scheduler_output,
                sampled_token_ids,
                sampling_metadata,
                hidden_states,
                sample_hidden_states,
                aux_hidden_states,
                spec_decode_metadata,
                common_attn_metadata,
                *others,
            )
        num_tokens = scheduler_output.total_num_scheduled_tokens
        runner.drafter.propose(
            num_speculative_tokens=0,
            target_token_ids=model_runner.input_ids.gpu[:num_tokens],
            target_positions=model_runner._get_positions(num_tokens),
            target_hidden_states=torch.cat([layer[:num_tokens] for layer in aux_hidden_states], dim=-1)
            if model_runner.use_aux_hidden_state_outputs
            else hidden_states[:num_tokens],
            common_attn_metadata=common_attn_metadata,
            num_rejected_tokens_gpu=None,
        )
        return [[] for _ in range(common_attn_metadata.batch_size())]  # on the host already: nothing to copy

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
            return propose(*args, **(kwargs | {"is_profile": True}))  # only means: eagerly
        finally:
            drafter._generate_draft = generate

    drafter.propose = propose_if_any
