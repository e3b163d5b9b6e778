"""What is relied on in vLLM is checked against what is there; a misfit is one sentence, never an exception."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from honed.attach.contract.compatibility import (
    SHORTENED,
    SHORTENED_ON_V2,
    can_shorten_block,
    can_skip_draft_pass,
    check,
    check_features,
    check_scheduler,
    updates_drafter_in_place,
)


class Fits:
    def __init__(self, vllm_config: Any) -> None: ...
    def schedule(self, throttle_prefills: bool = False) -> None: ...
    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None: ...
    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: Any,
        request_id: str,
    ) -> None: ...
    def add_request(self, request: Any) -> None: ...
    def _free_request(self, request: Any) -> None: ...
    def _update_request_with_output(self, request: Any, new_token_ids: Any) -> None: ...
    def _handle_stopped_request(self, request: Any) -> None: ...
    def _preempt_request(self, request: Any, timestamp: float) -> None: ...
    def _update_request_as_session(self, session: Any, update: Any) -> None: ...
    def has_unfinished_requests(self) -> bool: ...
    def get_request_counts(self) -> tuple[int, int]: ...
    def _update_after_schedule(self, scheduler_output: Any) -> None: ...
    def update_draft_token_ids(self, draft_token_ids: Any) -> None: ...
    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None: ...
    def finish_requests(self, request_ids: Any, finished_status: Any) -> None: ...
    def shutdown(self) -> None: ...


def test_a_scheduler_that_fits_gets_everything() -> None:
    findings = check_scheduler(Fits, "0.32.0+cpu")
    assert findings.capabilities == ("events", "draft_length")
    assert findings.limits == ()


def test_vllms_own_schedulers_fit() -> None:
    pytest.importorskip("vllm")
    import vllm
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    for base in (Scheduler, AsyncScheduler):
        assert check_scheduler(base, vllm.__version__).limits == ()


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "dev", ""])
def test_an_unknown_version_is_only_observed(version: str) -> None:
    findings = check_scheduler(Fits, version)
    assert findings.capabilities == ("events",)
    assert "0.32" in findings.limits[0]


def test_a_renamed_method_takes_only_what_needs_it() -> None:
    renamed = type("Renamed", (Fits,), {"update_draft_token_ids": None})
    findings = check_scheduler(renamed, "0.32.0")
    assert findings.capabilities == ("events",)
    assert findings.limits == ("draft_length is off: Renamed.update_draft_token_ids is missing",)


def test_a_renamed_parameter_is_named() -> None:
    class Other(Fits):
        def _free_request(self, req: Any) -> None: ...

    findings = check_scheduler(Other, "0.33.1")
    assert findings.capabilities == ("draft_length",)
    assert "Other._free_request has no parameter request" in findings.limits[0]


def config(method: str = "dflash", pipeline: int = 1, tensor: int = 1, **speculative: Any) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(method=method, **speculative),
        parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline, tensor_parallel_size=tensor, data_parallel_size=1),
    )


@pytest.mark.parametrize("method", ["dflash", "eagle3", "mtp"])
def test_a_drafter_of_a_known_kind_can_be_captured_and_swapped(method: str) -> None:
    assert check_features(config(method)).capabilities == ("capture", "swap")


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (config("eagle"), "eagle"),
        (config(pipeline=2), "pipeline"),
        (SimpleNamespace(speculative_config=None), "--speculative-config"),
    ],
)
def test_what_cannot_be_is_said(given: Any, word: str) -> None:
    findings = check_features(given)
    assert findings.capabilities == ()
    assert word in findings.limits[0]


def test_of_an_unknown_vllm_nothing_but_events_is_touched() -> None:
    known, unknown = check(Fits, config(), "0.32.0"), check(Fits, config(), "0.34.0")
    assert known.capabilities == ("events", "draft_length", "capture", "swap")
    assert known.limits == ()
    assert unknown.capabilities == ("events",)
    assert (known.is_known, unknown.is_known) == (True, False)
    assert "only observing" in unknown.limits[0]


def test_a_length_that_vllm_itself_cuts_is_left_to_it() -> None:
    findings = check(Fits, config(enable_adaptive_verification=True), "0.33.0")
    assert findings.capabilities == ("events", "swap", "estimates")
    assert [limit.split(" is off")[0] for limit in findings.limits] == ["capture", "draft_length"]
    eagle = check(Fits, config("eagle", enable_adaptive_verification=True), "0.33.0")
    assert (eagle.capabilities, eagle.is_known) == (("events", "estimates"), True)


def test_ranks_that_have_to_choose_alike_are_fed_nothing() -> None:
    findings = check(Fits, config(tensor=2, enable_adaptive_verification=True), "0.33.0")
    assert findings.capabilities == ("events", "swap")
    assert "estimates are off: under tensor parallelism" in findings.limits[-1]


def test_schedulers_that_nobody_keeps_in_step_are_left_alone() -> None:
    scheduler = pytest.importorskip("honed.attach.scheduler")
    scheduler._check_launcher(SimpleNamespace(distributed_executor_backend="mp", world_size=2))
    scheduler._check_launcher(SimpleNamespace(distributed_executor_backend="external_launcher", world_size=1))
    with pytest.raises(RuntimeError, match="--distributed-executor-backend mp"):
        scheduler._check_launcher(SimpleNamespace(distributed_executor_backend="external_launcher", world_size=2))


@pytest.mark.fault("a step with fewer drafts than were accepted, in a hybrid on a CPU")
@pytest.mark.parametrize(("is_hybrid", "device", "can"), [(True, "cpu", False), (True, "cuda", True), (False, "cpu", True)])
def test_lengths_of_hybrids_on_a_cpu_are_left_to_vllm(is_hybrid: bool, device: str, can: bool) -> None:
    """There vLLM's own code raises in the step: the engine ends."""
    given = config()
    given.model_config, given.device_config = SimpleNamespace(is_hybrid=is_hybrid), SimpleNamespace(device_type=device)
    findings = check(Fits, given, "0.32.0")
    assert ("draft_length" in findings.capabilities) == can
    assert {"events", "capture", "swap"} <= set(findings.capabilities)
    assert any("Gated DeltaNet" in limit for limit in findings.limits) != can


def test_a_configuration_that_cannot_be_read_stops_capture_alone() -> None:
    odd = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"num_hidden_layers": "many"}))
    findings = check_features(config(draft_model_config=odd))
    assert findings.capabilities == ("swap",)
    assert "honed can't tell whether this pair can be trained" in findings.untrained[0]
    unread = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: 1 / 0))
    assert check_features(config(draft_model_config=unread)).capabilities == ("capture", "swap"), "as if nothing were known"


@pytest.mark.parametrize(
    ("is_v2", "replicas", "stages", "can"),
    [(False, 1, 1, True), (True, 1, 1, False), (False, 2, 1, False), (False, 1, 2, False)],
)
def test_a_block_is_shortened_where_it_saves_time_and_stalls_nobody(is_v2: bool, replicas: int, stages: int, can: bool) -> None:
    given = config()
    given.use_v2_model_runner = is_v2
    given.parallel_config.data_parallel_size, given.parallel_config.pipeline_parallel_size = replicas, stages
    assert can_shorten_block(given) == can


@pytest.mark.fault("a drafter that must be asked for all of its tokens")
@pytest.mark.parametrize(
    ("method", "model_type", "can"),
    [
        *((method, "", True) for method in ("ngram", "draft_model", "eagle", "eagle3", "mtp", "dflash")),
        *((method, "", False) for method in ("suffix", "medusa", "ngram_gpu", "extract_hidden_states", "custom_class", "new")),
        ("mtp", "step3p5_mtp", False),
    ],
)
def test_a_block_is_shortened_for_drafters_that_take_fewer_tokens(method: str, model_type: str, can: bool) -> None:
    """The others of V1 assert that they are asked for K: the engine would end."""
    draft_config = SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type))
    given = config(method, draft_model_config=draft_config)
    given.use_v2_model_runner = False
    assert can_shorten_block(given) == can
    given.speculative_config.parallel_drafting = True
    assert can_shorten_block(given) == (method == "dflash"), "they make rows for K tokens in one pass"


@pytest.mark.fault("a drafter that must be asked for all of its tokens")
def test_what_is_said_of_drafters_is_so_in_vllms_code() -> None:
    pytest.importorskip("vllm")
    import importlib

    proposers = {
        "ngram": "ngram_proposer",
        "suffix": "suffix_decoding",
        "medusa": "medusa",
        "ngram_gpu": "ngram_proposer_gpu",
        "extract_hidden_states": "extract_hidden_states",
        **dict.fromkeys(("draft_model", "eagle", "eagle3", "mtp", "dflash"), "llm_base_proposer"),
    }
    for method, module in proposers.items():
        source = inspect.getsource(importlib.import_module(f"vllm.v1.spec_decode.{module}"))
        assert ("assert num_speculative_tokens ==" in source) == (method not in SHORTENED), method


@pytest.mark.parametrize(
    ("method", "has_modules", "replicas", "can"),
    [
        *((method, False, 1, True) for method in SHORTENED_ON_V2),
        *((method, False, 1, False) for method in ("dflash", "dspark", "draft_model", "ngram_gpu", "extract_hidden_states")),
        ("mtp", True, 1, False),
        ("eagle3", False, 2, False),
    ],
)
def test_on_v2_a_block_is_shortened_where_a_token_is_a_pass(method: str, has_modules: bool, replicas: int, can: bool) -> None:
    given = config(method)
    given.use_v2_model_runner, given.parallel_config.data_parallel_size = True, replicas
    given.speculative_config.use_multi_module_mtp = lambda: has_modules
    assert can_shorten_block(given) == can
    given.speculative_config.parallel_drafting = True
    assert not can_shorten_block(given), "one pass drafts them all"


def test_what_is_said_of_drafters_on_v2_is_so_in_vllms_code() -> None:
    pytest.importorskip("vllm")
    import importlib

    speculators = {
        "eagle3": "eagle.speculator.EagleSpeculator",
        "mtp": "mtp.speculator.MTPSpeculator",
        "gemma4": "gemma4.speculator.Gemma4Speculator",
        "draft_model": "standalone_ar.speculator.StandaloneARSpeculator",
        "modules": "multi_module_mtp.speculator.MultiModuleMTPSpeculator",
        "dflash": "dflash.speculator.DFlashSpeculator",
    }
    shortened = set()
    for name, path in speculators.items():
        module, _, owner = path.rpartition(".")
        speculator = getattr(importlib.import_module(f"vllm.v1.worker.gpu.spec_decode.{module}"), owner)
        if "if num_speculative_tokens <= 1:" in inspect.getsource(speculator.propose):
            shortened.add(name)
    assert shortened == {"eagle3", "mtp", "gemma4"}


def test_where_nothing_is_drafted_no_length_is_chosen() -> None:
    findings = check(Fits, config("extract_hidden_states"), "0.32.0")
    assert "draft_length" not in findings.capabilities
    assert any("drafts nothing" in limit for limit in findings.limits)


@pytest.mark.parametrize(
    ("is_v2", "method", "data_parallel_size", "can"),
    [(True, "dflash", 1, True), (False, "dflash", 1, False), (True, "eagle3", 1, False), (True, "dflash", 2, False)],
)
def test_on_v2_a_step_without_drafts_needs_no_draft_pass(is_v2: bool, method: str, data_parallel_size: int, can: bool) -> None:
    vllm_config = config(method)
    vllm_config.use_v2_model_runner, vllm_config.parallel_config.data_parallel_size = is_v2, data_parallel_size
    assert can_skip_draft_pass(vllm_config) == can


@pytest.mark.parametrize(
    ("method", "backend", "is_in_place"),
    [
        ("dflash", "nccl", False),
        ("dspark", "", False),
        ("dflash", "sparse_nccl", True),
        ("eagle3", "nccl", True),
        ("mtp", "", True),
    ],
)
def test_an_update_that_fails_may_leave_a_drafter_half_new(method: str, backend: str, is_in_place: bool) -> None:
    vllm_config = config(method)
    vllm_config.weight_transfer_config = SimpleNamespace(backend=backend) if backend else None
    assert updates_drafter_in_place(vllm_config) == is_in_place
