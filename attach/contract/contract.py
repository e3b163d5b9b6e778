"""List of the parts of vLLM that the attachment needs: names, parameters, attributes, and orders of calls.

Most of them are private to vLLM, which releases every few weeks. `contract_check.py` compares the list with a release's Python
sources, without importing them. `make contract` does so for every supported release, `make test` for the installed one. Code
that needs another part of vLLM gets a line here.

Files are relative to the package `vllm`. A class also stands for its bases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Method:
    """A method, or a function where there is no class.

    It has `parameters` under these names, and `first` as its first ones, in this order. Its body calls `calls` in this order,
    possibly with other calls between them.
    """

    file: str
    owner: str
    name: str
    parameters: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Attributes:
    """Fields, properties, or attributes that methods of the class assign on `self`."""

    file: str
    owner: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Passes:
    """A call of `callee` with these keywords, somewhere in a method."""

    file: str
    owner: str
    name: str
    callee: str
    keywords: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Open:
    """A dataclass whose instances take an attribute of honed's: neither frozen nor with slots."""

    file: str
    owner: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A module's or class's name with this value."""

    file: str
    owner: str
    name: str
    value: int | str | bytes


Clause: TypeAlias = Method | Attributes | Passes | Open | Constant

_GRAPHS = "v1/worker/gpu/cudagraph_utils.py"
_GDN, _GDN_LAYER = "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py", "QwenGatedDeltaNetAttention"
_GDN_CPU = "model_executor/layers/mamba/ops/cpu/gdn_attention.py"
_SCHED, _ASYNC = "v1/core/sched/scheduler.py", "v1/core/sched/async_scheduler.py"
_CORE, _LINEAR = "v1/engine/core.py", "model_executor/layers/linear.py"
_V1, _V2 = "v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"
_PROPOSER, _SPECULATOR = "v1/spec_decode/dflash.py", "v1/worker/gpu/spec_decode/dflash/speculator.py"
_DFLASH, _DSPARK = "model_executor/models/qwen3_dflash.py", "model_executor/models/qwen3_dspark.py"
_EAGLE3, _EAGLE3_QWEN3 = "model_executor/models/llama_eagle3.py", "model_executor/models/qwen3_eagle3.py"
_MTPS = {"Qwen3_5": "model_executor/models/qwen3_5_mtp.py", "Qwen3Next": "model_executor/models/qwen3_next_mtp.py"}
_MIMO = "model_executor/models/mimo_mtp.py"
_OF_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "mtp_block", "final_layernorm")
_OF_MTP = ("fc", "layers", "norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
_V2_AR = "v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py"

EVENTS: tuple[Clause, ...] = (
    Constant("plugins/__init__.py", "", "DEFAULT_PLUGINS_GROUP", "vllm.general_plugins"),
    Method(_SCHED, "Scheduler", "__init__", first=("vllm_config",)),
    Method(_SCHED, "Scheduler", "schedule", calls=("_update_after_schedule",)),
    Method(
        _SCHED,
        "Scheduler",
        "update_from_output",
        ("scheduler_output", "model_runner_output"),
        calls=("make_spec_decoding_stats", "_update_request_with_output"),
    ),
    # It cuts a row of `sampled_token_ids` where the request ends, in place (step_log.py).
    Method(_SCHED, "Scheduler", "_update_request_with_output", ("new_token_ids",)),
    Passes(
        _SCHED,
        "Scheduler",
        "update_from_output",
        "make_spec_decoding_stats",
        ("num_draft_tokens", "num_accepted_tokens", "num_invalid_spec_tokens", "request_id"),
    ),
    Method(
        _SCHED,
        "Scheduler",
        "make_spec_decoding_stats",
        first=("spec_decoding_stats", "num_draft_tokens", "num_accepted_tokens", "num_invalid_spec_tokens", "request_id"),
    ),
    Method(_SCHED, "Scheduler", "add_request", first=("request",)),
    Method(_SCHED, "Scheduler", "_free_request", first=("request",)),
    Method(_SCHED, "Scheduler", "finish_requests", calls=("_free_request",)),
    # Tokens that are dropped after a preemption (attachment.py), and drafts that V2 keeps on the device
    # (verified_drafts.py).
    Method(_SCHED, "Scheduler", "_preempt_request", first=("request",)),
    Method(_SCHED, "Scheduler", "_update_request_as_session", first=("session",)),
    Attributes("v1/request.py", "RequestStatus", ("WAITING_FOR_STREAMING_REQ",)),
    Attributes("v1/request.py", "Request", ("drop_stale_output", "num_stale_output_tokens")),
    Attributes(_V2, "GPUModelRunner", ("req_states", "execute_model_state", "output_copy_stream", "adaptive_verification")),
    Method(_V2, "GPUModelRunner", "sample_tokens"),
    Attributes("v1/worker/gpu/states.py", "RequestState", ("draft_tokens",)),
    Attributes(_V2, "ExecuteModelState", ("input_batch",)),
    Attributes("v1/worker/gpu/input_batch.py", "InputBatch", ("num_reqs", "idx_mapping", "cu_num_logits")),
    Method("v1/worker/gpu/async_utils.py", "AsyncOutput", "get_output"),
    Method(_SCHED, "Scheduler", "has_unfinished_requests"),
    Method(_SCHED, "Scheduler", "get_request_counts"),
    Method(_SCHED, "Scheduler", "shutdown"),
    Attributes(_SCHED, "Scheduler", ("requests", "running", "num_spec_tokens", "kv_cache_manager")),
    Method(_ASYNC, "AsyncScheduler", "update_from_output"),
    Open("v1/core/sched/output.py", "SchedulerOutput"),
    Attributes(
        "v1/core/sched/output.py",
        "SchedulerOutput",
        ("num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_spec_decode_tokens", "num_invalid_spec_tokens"),
    ),
    Attributes("v1/outputs.py", "ModelRunnerOutput", ("sampled_token_ids", "req_id_to_index")),
    Attributes(
        "v1/request.py", "Request", ("request_id", "sampling_params", "num_tokens", "num_computed_tokens", "lora_request")
    ),
    Attributes("lora/request.py", "LoRARequest", ("lora_name",)),
    Attributes("sampling_params.py", "SamplingParams", ("extra_args", "temperature", "eos_token_id", "stop_token_ids")),
    Attributes(
        "config/vllm.py",
        "VllmConfig",
        (
            "model_config",
            "parallel_config",
            "scheduler_config",
            "speculative_config",
            "num_speculative_tokens",
            "use_v2_model_runner",
        ),
    ),
    Attributes("config/parallel.py", "ParallelConfig", ("data_parallel_index", "data_parallel_size", "pipeline_parallel_size")),
    Attributes(
        "config/scheduler.py",
        "SchedulerConfig",
        ("async_scheduling", "max_num_seqs", "max_num_batched_tokens", "scheduler_cls"),
    ),
    Attributes("config/speculative.py", "SpeculativeConfig", ("method", "draft_model_config", "enable_adaptive_verification")),
    Attributes("config/model.py", "ModelConfig", ("model", "served_model_name", "hf_config", "is_hybrid")),
    Attributes("config/device.py", "DeviceConfig", ("device_type",)),
    Method(_CORE, "EngineCore", "__init__", calls=("load_general_plugins", "_initialize_kv_caches", "Scheduler")),
    Method(_CORE, "EngineCore", "step", calls=("schedule", "execute_model", "sample_tokens", "update_from_output")),
    Method(_CORE, "EngineCore", "step_with_batch_queue", calls=("schedule", "execute_model", "update_from_output")),
)

DRAFT_LENGTH: tuple[Clause, ...] = (
    Method(_SCHED, "Scheduler", "_update_after_schedule", first=("scheduler_output",)),
    Method(_SCHED, "Scheduler", "update_draft_token_ids", first=("draft_token_ids",), calls=("validate_tokens",)),
    # Drafts that a grammar strikes (struck_drafts.py): cut off before they are scheduled, or padded with -1 in their step.
    Method(
        _SCHED,
        "Scheduler",
        "update_draft_token_ids_in_output",
        first=("draft_token_ids", "scheduler_output"),
        calls=("validate_tokens",),
    ),
    Method(_CORE, "EngineCore", "step_with_batch_queue", calls=("take_draft_token_ids", "update_draft_token_ids_in_output")),
    Method("v1/structured_output/utils.py", "", "strip_speculative_padding", first=("token_ids",)),
    Attributes("v1/request.py", "Request", ("use_structured_output", "is_prefill_chunk")),
    Method(_ASYNC, "AsyncScheduler", "_update_after_schedule", first=("scheduler_output",)),
    Attributes("v1/core/sched/output.py", "SchedulerOutput", ("num_spec_tokens_to_schedule", "total_num_scheduled_tokens")),
    Attributes("v1/outputs.py", "DraftTokenIds", ("req_ids", "draft_token_ids")),
    Attributes("v1/request.py", "Request", ("spec_token_ids", "num_prompt_tokens", "max_tokens", "num_output_placeholders")),
    Attributes("config/model.py", "ModelConfig", ("max_model_len",)),
    Method(_SCHED, "Scheduler", "_handle_stopped_request", first=("request",)),
    Attributes(_SCHED, "Scheduler", ("dynamic_sd_lookup",)),
    Attributes(_V2, "GPUModelRunner", ("cudagraph_manager",)),
    Attributes(_GRAPHS, "CudaGraphManager", ("graphs",)),
    Attributes(
        _GRAPHS,
        "BatchExecutionDescriptor",
        ("num_tokens", "uniform_token_count", "num_active_loras", "num_ubatches"),
    ),
    Method(_CORE, "EngineCore", "post_step", calls=("take_draft_token_ids", "update_draft_token_ids")),
    Method("v1/executor/abstract.py", "Executor", "take_draft_token_ids"),
    # Drafters that draft token after token leave out passes (compatibility.py), unless a graph holds all of them (graphs.py).
    Passes(_V2, "GPUModelRunner", "sample_tokens", "propose", ("num_speculative_tokens",)),
    Method(_V2_AR, "TargetDependentARSpeculator", "propose", ("num_speculative_tokens",)),
    Attributes(_V2_AR, "TargetDependentARSpeculator", ("decode_cudagraph_manager", "supports_decode_metadata_update")),
    Attributes("v1/worker/gpu/spec_decode/speculator.py", "DraftModelSpeculator", ("num_speculative_steps",)),
    Attributes(
        "v1/worker/gpu/spec_decode/target_dependent_ar/cudagraph_utils.py",
        "SpeculatorBatchDescriptor",
        ("num_speculative_tokens",),
    ),
    # A step without drafts skips the draft pass (idle_drafts.py).
    Method(
        "v1/worker/gpu/spec_decode/dflash/speculator.py",
        "DFlashSpeculator",
        "propose",
        ("dummy_run", "is_profile", "num_speculative_tokens"),
        calls=("_precompute_context_kv", "_generate_draft"),
    ),
    Passes(
        _V1,
        "GPUModelRunner",
        "propose_draft_token_ids",
        "propose",
        ("num_speculative_tokens", "target_positions", "target_hidden_states", "common_attn_metadata"),
    ),
    Method(
        _PROPOSER,
        "DFlashProposer",
        "set_inputs_first_pass",
        ("target_positions", "target_hidden_states", "cad"),
    ),
    Attributes("v1/attention/backend.py", "CommonAttentionMetadata", ("slot_mapping",)),
    Method(_V1, "GPUModelRunner", "_sample", first=("logits", "spec_decode_metadata")),
    Method(
        _V1,
        "GPUModelRunner",
        "propose_draft_token_ids",
        first=(
            "scheduler_output",
            "sampled_token_ids",
            "sampling_metadata",
            "hidden_states",
            "sample_hidden_states",
            "aux_hidden_states",
            "spec_decode_metadata",
            "common_attn_metadata",
        ),
    ),
    Attributes(_V1, "GPUModelRunner", ("use_async_scheduling", "use_aux_hidden_state_outputs", "input_ids", "kv_cache_config")),
    Method(_V1, "GPUModelRunner", "_get_positions", first=("num_tokens",)),
    Method(_V1, "GPUModelRunner", "_copy_draft_token_ids_to_cpu", calls=("is_tensor",)),
    Method(_DFLASH, "DFlashQwen3ForCausalLM", "combine_hidden_states", first=("hidden_states",)),
    Attributes("v1/spec_decode/metadata.py", "SpecDecodeMetadata", ("num_draft_tokens",)),
    Attributes("v1/sample/metadata.py", "SamplingMetadata", ("thinking_budget_state_holder",)),
    Method("v1/sample/thinking_budget_state.py", "ThinkingBudgetStateHolder", "has_tracked_requests"),
    Attributes("v1/worker/gpu_input_batch.py", "InputBatch", ("sampling_metadata",)),
    Attributes("config/vllm.py", "VllmConfig", ("kv_transfer_config",)),
    Attributes("config/model.py", "ModelConfig", ("is_hybrid",)),
    Method(_PROPOSER, "DFlashProposer", "propose", calls=("combine_hidden_states", "set_inputs_first_pass")),
    Attributes(
        _PROPOSER,
        "DFlashProposer",
        (
            "method",
            "parallel_drafting",
            "num_speculative_tokens",
            "vllm_config",
            "_last_draft_probs",
            "_dflash_hidden_states",
        ),
    ),
    Method(
        _DFLASH,
        "DFlashQwen3Model",
        "precompute_and_store_context_kv",
        first=("context_states", "context_positions", "context_slot_mapping"),
    ),
    Constant("v1/spec_decode/utils.py", "", "PADDING_SLOT_ID", -1),
)

_WEIGHT_UPDATE = ("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update")

_EAGLE3_MODELS = ((_EAGLE3, "Eagle3LlamaForCausalLM"), (_EAGLE3_QWEN3, "Eagle3Qwen3ForCausalLM"))
WORKERS: tuple[Clause, ...] = (
    # A call of honed's gets the time of a step. If that is over the engine ends (engine_hook.py).
    Method("v1/executor/abstract.py", "Executor", "collective_rpc", ("method", "timeout", "args")),
    Constant("envs.py", "", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", 300),
    Passes("v1/executor/multiproc_executor.py", "MultiprocExecutor", "execute_model", "collective_rpc", ("timeout",)),
    Method(_CORE, "EngineCoreProc", "_handle_client_request", first=("request_type", "request"), calls=("RuntimeError",)),
    # vLLM's sleep mode: device memory, including the weights, is gone meanwhile (engine_hook.py).
    Method("v1/executor/abstract.py", "Executor", "sleep", ("level",)),
    Method("v1/executor/abstract.py", "Executor", "wake_up", ("tags",)),
    Method("v1/executor/abstract.py", "Executor", "discard", ("tags",)),
    Attributes("v1/executor/abstract.py", "Executor", ("is_sleeping", "sleeping_tags")),
    # A sleep of level 2 discards weights that no swap brings back (deep_sleep.py).
    Method("v1/worker/gpu_worker.py", "Worker", "sleep", ("level",)),
    Method("v1/worker/gpu_worker.py", "Worker", "wake_up", ("tags",)),
    *(Method(file, "GPUModelRunner", "get_model") for file in (_V1, _V2)),
    # Memory that vLLM has planned for and not allocated (device_reserve.py).
    Attributes("v1/worker/gpu_worker.py", "Worker", ("peak_activation_memory",)),
    # vLLM's own endpoints for new weights (engine_hook.py).
    *(Method("v1/engine/async_llm.py", "AsyncLLM", name, calls=("collective_rpc",)) for name in _WEIGHT_UPDATE),
    *(Method("v1/worker/gpu_worker.py", "Worker", name) for name in (*_WEIGHT_UPDATE, "reload_weights")),
    Method(_CORE, "EngineCore", "collective_rpc", first=("method",), calls=("collective_rpc",)),
    # Which updates change a drafter before they are finished (compatibility.py).
    Attributes("config/vllm.py", "VllmConfig", ("weight_transfer_config",)),
    Attributes("config/weight_transfer.py", "WeightTransferConfig", ("backend",)),
    # An idle replica that steps along with the others calls nothing else (scheduler.py).
    Method(_SCHED, "Scheduler", "has_requests"),
    Method(_CORE, "EngineCore", "step", calls=("has_requests",)),
    Method(_CORE, "EngineCore", "step_with_batch_queue", calls=("has_requests",)),
    Method(_CORE, "EngineCore", "sleep", calls=("sleep",)),
    Method(_CORE, "EngineCore", "wake_up", calls=("wake_up",)),
    Method(_CORE, "EngineCore", "release_kv_cache_memory", calls=("discard",)),
    # Steps and calls reach all ranks through one queue: so a swap comes between the same two steps on each.
    Method("v1/executor/multiproc_executor.py", "MultiprocExecutor", "execute_model", calls=("collective_rpc",)),
    Method(
        "v1/executor/multiproc_executor.py",
        "MultiprocExecutor",
        "collective_rpc",
        ("method", "timeout", "args"),
        calls=("enqueue",),
    ),
    Method(_CORE, "EngineCore", "_initialize_kv_caches"),
    # It is told that an engine starts before its workers look for free memory (engine_hook.py).
    Method(_CORE, "EngineCore", "__init__", calls=("load_general_plugins", "executor_class", "_initialize_kv_caches")),
    Method("v1/executor/abstract.py", "Executor", "__init__", first=("vllm_config",), calls=("_init_executor",)),
    Attributes(_CORE, "EngineCore", ("model_executor", "_idle_state_callbacks")),
    Attributes(_CORE, "EngineCoreProc", ("input_queue",)),
    Method(_CORE, "EngineCoreProc", "_process_input_queue", calls=("_notify_idle_state_callbacks", "get")),
    Method(_CORE, "EngineCoreProc", "_notify_idle_state_callbacks", calls=("pop", "callback")),
    Attributes("v1/engine/__init__.py", "EngineCoreRequestType", ("WAKEUP", "EXECUTOR_FAILED")),
    Attributes(
        "config/parallel.py",
        "ParallelConfig",
        ("worker_extension_cls", "world_size", "tensor_parallel_size", "prefill_context_parallel_size"),
    ),
    Attributes("v1/worker/worker_base.py", "WorkerBase", ("rank", "device", "model_runner")),
    Attributes(_V1, "GPUModelRunner", ("drafter",)),
    Method(_V1, "GPUModelRunner", "execute_model", first=("scheduler_output",)),
    # Zeros in the place of drafts (unfit_drafts.py).
    Method(_V1, "GPUModelRunner", "sample_tokens", calls=("_input_fits_in_drafter",)),
    Attributes("v1/worker/gpu_input_batch.py", "InputBatch", ("req_ids",)),
    Attributes("v1/core/sched/output.py", "SchedulerOutput", ("finished_req_ids", "scheduled_spec_decode_tokens")),
    Attributes(_V2, "GPUModelRunner", ("speculator",)),
    Method(_V2, "GPUModelRunner", "execute_model", first=("scheduler_output",)),
    Attributes(_PROPOSER, "DFlashProposer", ("model",)),
    Attributes(_SPECULATOR, "DFlashSpeculator", ("model",)),
    Attributes(_DSPARK, "Qwen3DSparkModel", ("markov_head", "confidence_head")),
    Attributes(_DSPARK, "DSparkMarkovHead", ("markov_w1", "markov_w2")),
    Attributes(_DFLASH, "DFlashQwen3ForCausalLM", ("model",)),
    Method(_DFLASH, "DFlashQwen3ForCausalLM", "combine_hidden_states", first=("hidden_states",)),
    Attributes("v1/spec_decode/eagle.py", "EagleProposer", ("model",)),
    Attributes(_V2_AR, "TargetDependentARSpeculator", ("model",)),
    *(Attributes(file, owner, ("model",)) for file, owner in _EAGLE3_MODELS),
    *(Attributes(file, f"{kind}MTP", ("model",)) for kind, file in _MTPS.items()),
    *(Attributes(file, f"{kind}MultiTokenPredictor", _OF_MTP) for kind, file in _MTPS.items()),
    Attributes(_MIMO, "MiMoMTP", ("model",)),
    Attributes(_MIMO, "MiMoMultiTokenPredictor", ("mtp_layers", "mtp_start_layer_idx")),
    Attributes(_MIMO, "MiMoMultiTokenPredictorLayer", _OF_MIMO),
    *(Method(file, owner, "combine_hidden_states", first=("hidden_states",)) for file, owner in _EAGLE3_MODELS),
)
"""Needs of both capture and swap: a way to the workers, also of an idle engine, and to the drafter in them."""

CAPTURE: tuple[Clause, ...] = (
    *WORKERS,
    Attributes("v1/core/sched/output.py", "SchedulerOutput", ("scheduled_new_reqs",)),
    Attributes("v1/core/sched/output.py", "NewRequestData", ("req_id", "prompt_token_ids", "sampling_params", "mm_features")),
    Passes(
        _V1,
        "GPUModelRunner",
        "propose_draft_token_ids",
        "propose",
        ("target_token_ids", "target_positions", "target_hidden_states", "common_attn_metadata", "num_rejected_tokens_gpu"),
    ),
    Attributes(_PROPOSER, "DFlashProposer", ("_dflash_hidden_states",)),
    Attributes("v1/attention/backend.py", "CommonAttentionMetadata", ("query_start_loc", "query_start_loc_cpu")),
    # The target's most likely tokens, before its sampler changes the logits (top_tokens.py), unless drafts are drawn at random.
    Attributes("config/speculative.py", "SpeculativeConfig", ("draft_sample_method",)),
    Method(_V1, "GPUModelRunner", "_sample", first=("logits", "spec_decode_metadata"), calls=("sampler", "rejection_sampler")),
    Method(_V1, "GPUModelRunner", "sample_tokens", calls=("_sample", "propose_draft_token_ids")),
    Attributes("v1/spec_decode/metadata.py", "SpecDecodeMetadata", ("logits_indices",)),
    Method(_V2, "GPUModelRunner", "sample", first=("hidden_states", "input_batch"), calls=("compute_logits", "sampler")),
    Method(_V2, "GPUModelRunner", "sample_tokens", calls=("sample", "propose")),
    *(
        Method(
            file,
            owner,
            "propose",
            ("dummy_run",),
            first=(
                "input_batch",
                "attn_metadata",
                "slot_mappings",
                "last_hidden_states",
                "aux_hidden_states",
                "num_sampled",
                "num_rejected",
            ),
        )
        for file, owner in ((_SPECULATOR, "DFlashSpeculator"), (_V2_AR, "TargetDependentARSpeculator"))
    ),
    Attributes(_SPECULATOR, "DFlashSpeculator", ("hidden_states",)),
    Attributes("v1/worker/gpu/spec_decode/dspark/speculator.py", "DSparkSpeculator", ("hidden_states",)),
    Attributes(_V2_AR, "TargetDependentARSpeculator", ("hidden_states",)),
    Attributes(
        "v1/worker/gpu/input_batch.py",
        "InputBatch",
        ("req_ids", "num_reqs", "num_tokens", "query_start_loc_np", "input_ids", "positions", "logits_indices"),
    ),
    Attributes(_DFLASH, "DFlashQwen3Model", ("hidden_norm",)),
    Attributes("model_executor/layers/layernorm.py", "RMSNorm", ("weight", "variance_epsilon")),
)

SWAP: tuple[Clause, ...] = (
    *WORKERS,
    Attributes("model_executor/layers/vocab_parallel_embedding.py", "VocabParallelEmbedding", ("org_vocab_size",)),
    # New weights of the drafter through vLLM's own endpoints (arriving_weights.py).
    Method("v1/worker/gpu_worker.py", "Worker", "_set_draft_weight_update_target", calls=("set_weight_update_target",)),
    Method("v1/worker/gpu_worker.py", "Worker", "_start_weight_update", calls=("_set_draft_weight_update_target",)),
    Method("v1/worker/gpu_worker.py", "Worker", "finish_weight_update", calls=("finish_weight_update",)),
    Attributes("v1/worker/gpu_worker.py", "Worker", ("weight_transfer_engine", "_weight_update_is_draft")),
    Method(
        "distributed/weight_transfer/base.py",
        "WeightTransferEngine",
        "set_weight_update_target",
        first=("model", "model_config"),
    ),
    Attributes("distributed/weight_transfer/base.py", "WeightTransferEngine", ("model_config",)),
    Method(_SCHED, "Scheduler", "reset_prefix_cache", ("reset_running_requests",)),
    Method(_SCHED, "Scheduler", "reset_connector_cache"),
    Attributes(
        _DFLASH,
        "DFlashQwen3Model",
        ("layers", "_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights", "mask_embedding", "has_separate_mask_embedding"),
    ),
    Attributes(_DFLASH, "DFlashQwen3DecoderLayer", ("self_attn",)),
    Attributes(_DFLASH, "DFlashQwen3Attention", ("qkv_proj", "k_norm", "q_size")),
    Attributes(_LINEAR, "ColumnParallelLinear", ("tp_rank", "tp_size", "output_size_per_partition", "quant_method")),
    Attributes(_LINEAR, "RowParallelLinear", ("tp_rank", "tp_size", "input_size_per_partition", "params_dtype")),
    Attributes(_LINEAR, "QKVParallelLinear", ("num_heads", "num_kv_heads", "head_size", "num_kv_head_replicas")),
    Method(_LINEAR, "UnquantizedLinearMethod", "process_weights_after_loading", first=("layer",)),
    Method(_LINEAR, "UnquantizedLinearMethod", "apply", first=("layer", "x", "bias")),
    Method("distributed/communication_op.py", "", "tensor_model_parallel_all_gather", first=("input_", "dim")),
)

_LAYER, _SAMPLE = "model_executor/layers/attention/attention.py", "v1/sample/rejection_sampler.py"
TREES: tuple[Clause, ...] = (
    *WORKERS,
    Attributes(_SCHED, "Scheduler", ("vllm_config", "num_lookahead_tokens", "max_num_scheduled_tokens")),
    Attributes(
        "config/speculative.py", "SpeculativeConfig", ("max_num_new_slots_for_drafting", "disable_padded_drafter_batch")
    ),
    Attributes(
        "config/speculative.py",
        "SpeculativeConfig",
        ("enable_adaptive_verification", "draft_sample_method", "rejection_sample_method"),
    ),
    Attributes("sampling_params.py", "SamplingParams", ("num_logprobs",)),
    Method(_V1, "GPUModelRunner", "_input_fits_in_drafter"),
    Attributes(_LAYER, "Attention", ("attn_backend", "head_size")),
    Method(
        _V1,
        "GPUModelRunner",
        "_prepare_inputs",
        first=("scheduler_output", "num_scheduled_tokens"),
        calls=("compute_slot_mapping", "_prepare_input_ids"),
    ),
    Method(_V1, "GPUModelRunner", "_sample", first=("logits", "spec_decode_metadata")),
    Method(_V1, "GPUModelRunner", "sample_tokens", calls=("_sample", "propose_draft_token_ids")),
    Method(_V1, "GPUModelRunner", "take_draft_token_ids"),
    Attributes(
        _V1,
        "GPUModelRunner",
        ("positions", "mrope_positions", "uses_mrope", "query_start_loc", "requests", "num_spec_tokens", "kv_cache_config"),
    ),
    Attributes("v1/worker/gpu_input_batch.py", "InputBatch", ("req_id_to_index", "block_table")),
    Attributes("v1/worker/gpu_input_batch.py", "InputBatch", ("sampling_metadata",)),
    Attributes("v1/worker/block_table.py", "BlockTable", ("slot_mapping",)),
    Attributes("v1/spec_decode/metadata.py", "SpecDecodeMetadata", ("cu_num_sampled_tokens",)),
    Attributes("v1/sample/metadata.py", "SamplingMetadata", ("all_greedy", "temperature", "top_k", "top_p", "generators")),
    Attributes("v1/outputs.py", "SamplerOutput", ("sampled_token_ids",)),
    Open("v1/outputs.py", "ModelRunnerOutput"),
    Attributes("v1/outputs.py", "DraftTokenIds", ("draft_token_ids",)),
    Constant(_SAMPLE, "", "MAX_SPEC_LEN", 128),
    Method("v1/sample/ops/topk_topp_sampler.py", "", "apply_top_k_top_p", first=("logits", "k", "p")),
    Method("v1/sample/ops/topk_topp_sampler.py", "", "random_sample", first=("probs", "generators")),
    Method(_PROPOSER, "DFlashProposer", "_sample_draft_tokens", first=("hidden_states", "sampling_metadata")),
    Method(_PROPOSER, "DFlashProposer", "propose", ("num_speculative_tokens",), calls=("_sample_draft_tokens",)),
    Attributes(_PROPOSER, "DFlashProposer", ("_draft_attn_layer_names", "_enable_probabilistic_draft_probs")),
    Method(_DFLASH, "DFlashQwen3ForCausalLM", "compute_logits", first=("hidden_states",)),
    Attributes(_LAYER, "Attention", ("impl", "kv_cache", "num_heads", "num_kv_heads", "head_size")),
    Method(_LAYER, "", "unified_attention_with_output", calls=("forward",)),
    Method(
        "v1/attention/backends/cpu_attn.py",
        "CPUAttentionBackendImpl",
        "forward",
        first=("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    ),
    Method(
        "v1/attention/backends/cpu_attn.py",
        "CPUAttentionBackendImpl",
        "do_kv_cache_update",
        first=("layer", "key", "value", "kv_cache", "slot_mapping"),
    ),
    # Under another name, windows and sinks would be taken for none.
    *(
        Attributes(f"v1/attention/backends/{module}.py", f"{name}Metadata", ("num_actual_tokens", "block_table"))
        for module, name in (
            ("cpu_attn", "CPUAttention"),
            ("flash_attn", "FlashAttention"),
            ("triton_attn", "TritonAttention"),
            ("flex_attention", "FlexAttention"),
        )
    ),
    # What backends are told of the requests behind those with trees (trees/tree_layers.py)
    *(
        clause
        for module, name in (("cpu_attn", "CPUAttention"), ("flash_attn", "FlashAttention"))
        for clause in (
            Open(f"v1/attention/backends/{module}.py", f"{name}Metadata"),
            Attributes(
                f"v1/attention/backends/{module}.py",
                f"{name}Metadata",
                ("query_start_loc", "seq_lens", "slot_mapping", "scheduler_metadata", "causal"),
            ),
        )
    ),
    Method(
        "_custom_ops.py",
        "",
        "cpu_attn_get_scheduler_metadata",
        (
            "num_reqs",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "seq_lens",
            "dtype",
            "query_start_loc",
            "causal",
            "sliding_window_size",
            "isa",
            "enable_kv_split",
        ),
    ),
    Attributes("v1/attention/backend.py", "AttentionBackend", ("forward_includes_kv_cache_update",)),
    Attributes("v1/attention/backends/cpu_attn.py", "CPUAttentionBackendImpl", ("sliding_window", "sinks")),
    Attributes("v1/attention/backends/flash_attn.py", "FlashAttentionImpl", ("sliding_window", "sinks")),
    Attributes("v1/attention/backends/triton_attn.py", "TritonAttentionImpl", ("sliding_window", "sinks")),
    Attributes("v1/attention/backends/flex_attention.py", "FlexAttentionImpl", ("sliding_window",)),
    Attributes("config/compilation.py", "CompilationConfig", ("static_forward_context",)),
    Attributes("config/model.py", "ModelConfig", ("enforce_eager",)),
    # V1 with a scheduler that runs ahead
    Attributes(_V1, "GPUModelRunner", ("use_async_scheduling", "async_output_copy_stream", "prev_positions")),
    Method(_V1, "GPUModelRunner", "_prepare_input_ids", calls=("scatter_",)),
    Method(_V1, "AsyncGPUModelRunnerOutput", "get_output"),
    # V2 (trees/runner_v2.py)
    Method("v1/worker/worker_base.py", "WorkerWrapperBase", "init_device", calls=("init_device",)),
    Attributes("v1/worker/worker_base.py", "WorkerWrapperBase", ("vllm_config",)),
    Method(_V2, "GPUModelRunner", "__init__", calls=("init_speculator",)),
    Method("v1/worker/gpu/spec_decode/__init__.py", "", "init_speculator", first=("vllm_config",)),
    Method(_V2, "GPUModelRunner", "prepare_attn", first=("input_batch",), calls=("compute_slot_mappings",)),
    Method(_V2, "GPUModelRunner", "sample", calls=("rejection_sampler",)),
    Method(_V2, "GPUModelRunner", "sample_tokens", calls=("sample", "postprocess_sampled", "propose")),
    Attributes(_V2, "GPUModelRunner", ("rejection_sampler", "sampler", "num_speculative_steps", "max_num_reqs", "device")),
    Attributes(_V2, "GPUModelRunner", ("kv_cache_config", "model_config")),
    Method(
        "v1/worker/gpu/sample/sampler.py",
        "Sampler",
        "sample",
        first=(
            "logits",
            "expanded_idx_mapping",
            "idx_mapping",
            "idx_mapping_np",
            "pos",
            "input_ids",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
        ),
    ),
    Attributes("v1/worker/gpu/sample/sampler.py", "Sampler", ("compute_nans", "sampling_states")),
    Method("v1/worker/gpu/sample/states.py", "SamplingStates", "max_num_logprobs", first=("idx_mapping_np",)),
    Constant("v1/worker/gpu/sample/states.py", "", "NO_LOGPROBS", -1),
    Method(
        "v1/worker/gpu/input_batch.py",
        "",
        "get_num_sampled_and_rejected",
        first=("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len"),
    ),
    Attributes("v1/worker/gpu/states.py", "RequestState", ("prefill_len",)),
    Attributes(
        "v1/worker/gpu/sample/output.py",
        "SamplerOutput",
        ("sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected"),
    ),
    Attributes(
        "v1/worker/gpu/input_batch.py",
        "InputBatch",
        (
            "num_draft_tokens",
            "num_draft_tokens_per_req",
            "num_scheduled_tokens",
            "idx_mapping",
            "idx_mapping_np",
            "seq_lens",
            "num_computed_tokens_np",
            "prefill_len_np",
            "logits_indices",
            "cu_num_logits",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "seq_lens_cpu_upper_bound",
        ),
    ),
    Attributes(_SPECULATOR, "DFlashSpeculator", ("num_speculative_steps", "draft_attn_layer_names", "draft_logits")),
    Method(_SPECULATOR, "DFlashSpeculator", "_generate_draft", calls=("sample_draft",)),
    Method(_SPECULATOR, "DFlashSpeculator", "sample_draft", calls=("compute_draft_logits",)),
    Method(
        "v1/worker/gpu/spec_decode/dflash2/speculator.py",
        "DFlash2Speculator",
        "_score_candidates",
        first=("candidate_ids", "unary_logits", "hidden_states"),
        calls=("candidate_selector",),
    ),
    Method(
        "v1/worker/gpu/spec_decode/dflash2/speculator.py", "DFlash2Speculator", "_generate_draft", calls=("_score_candidates",)
    ),
    Attributes("v1/worker/gpu/spec_decode/dflash2/speculator.py", "DFlash2Speculator", ("top_k",)),
    # Beside CUDA graphs (trees/draft_candidates.py)
    Attributes(
        _SPECULATOR,
        "DFlashSpeculator",
        ("sample_idx_mapping", "temperature", "max_num_reqs", "device", "query_cudagraph_manager"),
    ),
    Method(_SPECULATOR, "DFlashSpeculator", "propose", calls=("run_fullgraph",)),
    Method("v1/worker/gpu/dp_utils.py", "", "dispatch_cg_and_sync_dp", calls=("dispatch",)),
    Method(_GRAPHS, "CudaGraphManager", "dispatch", ("max_query_len",), ("num_reqs", "num_tokens", "uniform_token_count")),
    Attributes(_GRAPHS, "CudaGraphManager", ("cudagraph_mode", "use_breakable_cg", "compilation_config")),
    Attributes("v1/worker/gpu/states.py", "RequestState", ("req_id_to_index",)),
    # M-RoPE
    Method("v1/worker/gpu/model_states/default.py", "DefaultModelState", "prepare_inputs", calls=("get_positions",)),
    # Gated DeltaNet (trees/recurrent_layers.py)
    Method(_GDN, _GDN_LAYER, "_forward_core", first=("mixed_qkv", "b", "a", "core_attn_out")),
    Method(_GDN, _GDN_LAYER, "_can_use_fused_gdn_mtp_decode", first=("attn_metadata",)),
    Method(_GDN, _GDN_LAYER, "_forward_core_fused_norm", calls=("_can_use_fused_gdn_mtp_decode", "_forward_core")),
    Method(_GDN, "", "qwen_gdn_attention_core", calls=("_forward_core",)),
    Method(_GDN, _GDN_LAYER, "rearrange_mixed_qkv", first=("mixed_qkv",)),
    Attributes(_GDN, _GDN_LAYER, ("A_log", "dt_bias", "conv1d", "activation", "head_k_dim", "head_v_dim", "prefix")),
    Attributes(
        "v1/attention/backends/gdn_attn.py", "GDNAttentionMetadata", ("spec_sequence_masks", "spec_state_indices_tensor")
    ),
    Method(
        _GDN_CPU,
        "",
        "_cpu_gdn_attention_spec_aware",
        first=("layer", "attn_metadata_i", "mixed_qkv", "b", "a", "core_attn_out"),
    ),
    Method(_GDN_CPU, "", "cpu_gdn_attention_core", calls=("_cpu_gdn_attention_spec_aware",)),
    Method("model_executor/layers/mamba/mamba_utils.py", "", "is_conv_state_dim_first"),
    Attributes("forward_context.py", "ForwardContext", ("attn_metadata",)),
)

CONTRACT: dict[str, tuple[Clause, ...]] = {
    "events": EVENTS,
    "draft_length": DRAFT_LENGTH,
    "capture": CAPTURE,
    "swap": SWAP,
    "trees": TREES,
}
"""Capability -> its needs."""
