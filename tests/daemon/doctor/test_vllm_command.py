"""vLLM's command lines, in every way of writing that vLLM takes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest

from honed.daemon.doctor.vllm_command import is_server, parse
from honed.daemon.install import vllm_args

SPECULATIVE = '{"method":"dflash","model":"d","num_speculative_tokens":7}'


@pytest.mark.parametrize(
    "text",
    [
        f"vllm serve m --speculative-config '{SPECULATIVE}' --scheduler-cls s --enable-lora -pp 2",
        f"/opt/v/bin/python /opt/v/bin/vllm serve --enable-lora m -sc '{SPECULATIVE}' --scheduler_cls=s -pp=2",
        f"python -m vllm.entrypoints.openai.api_server --model m --speculative_config '{SPECULATIVE}' --scheduler-cls s "
        "--pipeline-parallel-size 2 --enable_lora",
        "vllm serve m --spec-method dflash --spec-model d --spec-tokens 7 --scheduler-cls s --enable-lora -pp 2",
        "vllm serve m --speculative-config.method dflash --speculative-config.model=d -sc.num-speculative-tokens 7 "
        "--scheduler-cls s --enable-lora -pp 2",
    ],
)
def test_the_same_said_in_different_ways(text: str) -> None:
    words = shlex.split(text)
    assert is_server(words)
    found = parse(words)
    assert (found.model, found.method, found.drafter) == ("m", "dflash", "d")
    assert found.speculative["num_speculative_tokens"] == 7
    assert (found.scheduler_cls, found.worker_extension_cls) == ("s", "")
    assert found.is_lora
    assert found.pipeline_parallel_size == 2
    assert found.unreadable == ()


@pytest.mark.parametrize(
    ("drafter", "method"),
    [
        ("z-lab/Qwen3-8B-DFlash-b16", "dflash"),
        ("/models/qwen3-8b-speculator.dflash2/", "dflash"),
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", "eagle"),
        ("AngelSlim/Qwen3-8B_eagle3", "eagle3"),
        ("deepseek-ai/dspark_qwen3_8b_block7", "dspark"),
        ("[ngram]", "ngram"),
        ("Qwen/Qwen3-0.6B", "draft_model"),
        ("", ""),
    ],
)
def test_where_no_method_is_named_it_is_the_one_that_vllm_takes(drafter: str, method: str) -> None:
    assert parse(["vllm", "serve", "m", "--spec-model", drafter] if drafter else ["vllm", "serve", "m"]).method == method
    assert parse(["vllm", "serve", "m", "--spec-model", drafter, "--spec-method", "mtp"]).method == "mtp"


SPECULATORS = {
    "speculators_model_type": "eagle3",
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}], "verifier": {"name_or_path": "org/target"}},
    "transformer_layer_config": {"model_type": "llama"},
}


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ([], {}),
        (["--spec-tokens", "3"], {}),
        (["--spec-method", "ngram", "--spec-model", "d"], {"speculators_model_type": "dflash2"}),
        ([], {"speculators_model_type": "peagle"}),
    ],
)
def test_a_model_in_speculators_format_brings_its_target_and_its_method(
    tmp_path: Path, words: list[str], changes: dict[str, Any]
) -> None:
    """Compared with vLLM's own function."""
    found = parse(["vllm", "serve", str(tmp_path), *words])
    (tmp_path / "config.json").write_text(json.dumps(SPECULATORS | changes))
    ours = found.resolved(SPECULATORS | changes)
    theirs = pytest.importorskip("vllm.transformers_utils.config", reason="vLLM is not installed")
    model, _, speculative = theirs.maybe_override_with_speculators(str(tmp_path), None, False, None, found.speculative)
    assert (ours.model, ours.method, ours.drafter) == (model, speculative["method"], speculative["model"])
    assert ours.speculative["num_speculative_tokens"] == speculative["num_speculative_tokens"]


@pytest.mark.parametrize("config", [None, {}, {"speculators_config": None}, SPECULATORS | {"speculators_config": {}}])
def test_any_other_model_is_the_target(config: dict[str, Any] | None) -> None:
    found = parse(["vllm", "serve", "m", "--spec-model", "d", "--spec-method", "dflash"])
    assert found.resolved(config) == found


def test_each_kind_of_mtp_head_has_a_name_for_the_same_method() -> None:
    vllm = pytest.importorskip("vllm.config.speculative", reason="vLLM is not installed")
    kinds = get_args(vllm.MTPModelTypes)
    assert "qwen3_next_mtp" in kinds
    for name in get_args(vllm.SpeculativeMethod):
        ours = parse(["vllm", "serve", "m", "--spec-method", name, "--spec-tokens", "3"]).method
        assert ours == ("mtp" if name in kinds else name)


@pytest.mark.parametrize("text", ["", "vllm", "vllm bench m", "python -m vllm", "cat vllm serve.log", "python serve.py"])
def test_other_programs_are_no_servers(text: str) -> None:
    assert not is_server(shlex.split(text))


@pytest.mark.parametrize("wrapper", ["timeout 900", "sudo -u vllm", "/usr/bin/uv run", "bash start.sh", "python supervise.py"])
@pytest.mark.parametrize(
    "text", ["python3.12 -u -X dev -m vllm.entrypoints.openai.api_server --model m", "/opt/v/bin/vllm serve m"]
)
def test_what_starts_a_server_is_none_but_its_command_is_read(wrapper: str, text: str) -> None:
    assert is_server(shlex.split(text))
    assert not is_server(shlex.split(f"{wrapper} {text}"))
    assert parse(shlex.split(f"{wrapper} {text}")).model == "m"


def test_a_switch_takes_no_value_and_a_negative_number_is_one() -> None:
    found = parse(["vllm", "serve", "--enable-lora", "m", "--seed", "-1", "--gpu-memory-utilization", "0.85"])
    assert (found.model, found.is_lora) == ("m", True)


def test_a_configuration_that_the_shell_took_the_quotes_of_is_named() -> None:
    found = parse(["vllm", "serve", "m", "--speculative-config", "{method:dflash}"])
    assert found.unreadable == ("--speculative-config '{method:dflash}' is no JSON object",)
    assert found.speculative == {}


def test_a_configuration_file_is_noted() -> None:
    assert parse(["vllm", "serve", "--config", "vllm.yaml"]).config_file == "vllm.yaml"


def test_what_vllm_args_prints_is_understood() -> None:
    made = vllm_args.make(Path("/run/honed"), model="m", drafter="d", num_draft_tokens=7)
    found = parse([*shlex.split(vllm_args.server_command()), *made.flags])
    assert (found.scheduler_cls, found.worker_extension_cls) == (vllm_args.SCHEDULER, vllm_args.WORKER_EXTENSION)
    assert (found.model, found.drafter, found.method) == ("m", "d", "dflash")
