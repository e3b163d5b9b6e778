"""Our trainable drafter drafts what vLLM's DFlash proposer drafts, token for token, from the same hidden states.

Also when steps in between drafted nothing, and honed spared them the draft pass: what the drafter reads of those steps'
tokens has to be there all the same.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from honed.attach.runner.idle_drafts import skip_idle_drafts
from honed.attach.runner.runner import runner_of
from honed.recalib.drafter.checkpoint import load_drafter
from honed.recalib.drafter.dflash import DFlashDrafter
from tests.tools import ROOT

PAIR = ROOT / "benchmarks" / "tiny"
NUM_DRAFT_TOKENS = 7
TIE_MARGIN = 1e-3

pytest.importorskip("vllm", reason="vLLM is not installed")


@dataclass
class Request:
    """What the proposer was given for one request: rows by position, and (anchor position, anchor, drafts) per round."""

    aux: dict[int, Tensor] = field(default_factory=dict)
    token_ids: dict[int, int] = field(default_factory=dict)
    rounds: list[tuple[int, int, list[int]]] = field(default_factory=list)
    num_idle: int = 0


def record(runner: Any, requests: dict[str, Request], steps: Counter[str], is_idling: bool) -> None:
    """Wrap `propose` on the instance; when idling, three steps of five ask for no drafts."""
    stock, calls = runner.drafter.propose, itertools.count()
    runner.rejection_sampler.register_forward_hook(lambda *_: steps.update(["verifying"]))

    def propose(**given: Any) -> Tensor:
        if is_idling and next(calls) % 5 in (1, 2, 3):
            given["num_speculative_tokens"] = 0
        drafts: Tensor = stock(**given)
        steps["drafting" if drafts.shape[1] else "idle"] += 1
        ends = given["common_attn_metadata"].query_start_loc.tolist()
        rejected = given["num_rejected_tokens_gpu"]
        for i, request_id in enumerate(runner.input_batch.req_ids):
            request = requests[request_id]
            end = ends[i + 1] - (int(rejected[i]) if rejected is not None else 0)
            for row in range(ends[i], end):
                position = int(given["target_positions"][row])
                request.aux[position] = given["target_hidden_states"][row].clone()
                request.token_ids[position] = int(given["target_token_ids"][row])
            last = int(given["target_positions"][end - 1])
            if drafts.shape[1]:
                request.rounds.append((last + 1, int(given["next_token_ids"][i]), drafts[i].tolist()))
            else:
                request.num_idle += 1
        return drafts

    runner.drafter.propose = propose


@pytest.fixture(scope="module", params=["always drafting", "idling"])
def requests(request: pytest.FixtureRequest) -> Iterator[dict[str, Request]]:
    """Real prompts of both domains, served together and one by one."""
    is_idling = request.param == "idling"
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    from vllm import LLM, SamplingParams

    prompts = [
        json.loads(line)["prompt"]
        for name in ("prompts_a.jsonl", "prompts_b.jsonl")
        for line in (PAIR / name).read_text().splitlines()[:3]
    ]
    speculative = {"method": "dflash", "model": str(PAIR / "drafter"), "num_speculative_tokens": NUM_DRAFT_TOKENS}
    llm = LLM(
        str(PAIR / "target"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        enable_prefix_caching=False,
        speculative_config=speculative,
    )
    recorded: dict[str, Request] = defaultdict(Request)
    steps: Counter[str] = Counter()
    if is_idling:
        assert llm.collective_rpc(lambda worker: skip_idle_drafts(runner_of(worker.model_runner), worker.device)) == [True]
    llm.collective_rpc(lambda worker: record(worker.model_runner, recorded, steps, is_idling))
    greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    llm.generate(prompts[:4], greedy, use_tqdm=False)
    for prompt in prompts[4:]:
        llm.generate([prompt], greedy, use_tqdm=False)
    assert (sum(one.num_idle for one in recorded.values()) > 60) == is_idling
    if is_idling:  # what verifies nothing isn't sampled as if it did
        assert 0 < steps["verifying"] <= steps["drafting"]
    else:
        assert steps["verifying"] == steps["drafting"]
    yield dict(recorded)
    llm.llm_engine.engine_core.shutdown()


def replay(drafter: DFlashDrafter, request: Request) -> Tensor:  # [N, K, V]
    """All rounds of one request through our drafter, in one pass."""
    last = max(position for position, _, _ in request.rounds)
    tokens = dict(request.token_ids) | {position: anchor for position, anchor, _ in request.rounds}
    rows = range(last + 1)
    aux = torch.stack([request.aux.get(row, torch.zeros(drafter.config.feature_size)) for row in rows])
    anchors = torch.tensor([position for position, _, _ in request.rounds])
    return drafter(drafter.fuse(aux), torch.arange(last + 1), torch.tensor([tokens[row] for row in rows]), anchors)


def test_drafts_are_those_of_vllm(requests: dict[str, Request]) -> None:
    drafter = load_drafter(PAIR / "drafter", PAIR / "target")
    num_rounds = num_differing = 0
    for request in requests.values():
        with torch.inference_mode():
            logits = replay(drafter, request)
        for ours, (position, _, theirs) in zip(logits, request.rounds, strict=True):
            num_rounds += 1
            for k, token_id in enumerate(theirs):
                if int(ours[k].argmax()) != token_id:
                    margin = float(ours[k].max() - ours[k][token_id])
                    assert margin < TIE_MARGIN, f"round at {position}, draft {k}: off by {margin}"
                    num_differing += 1
    assert len(requests) == 6
    assert num_rounds > 40
    assert num_differing <= 2, "near-ties are rare"


def test_one_key_norm_serves_all_layers_of_the_pair() -> None:
    """vLLM 0.32's CPU build norms every layer's context keys with layer 0's `k_norm`: a pair with several would be drafted
    wrongly there."""
    drafter = load_drafter(PAIR / "drafter", PAIR / "target")
    norms = [tensor for name, tensor in drafter.state_dict().items() if name.endswith("k_norm.weight")]
    assert len(norms) == 3
    assert all(torch.equal(norm, norms[0]) for norm in norms)


def test_each_sequence_was_seen_whole(requests: dict[str, Request]) -> None:
    """Recorded rows leave no gap, else the replay would prove nothing."""
    for request in requests.values():
        assert set(request.aux) == set(range(len(request.aux)))
        assert len(request.aux) >= max(position for position, _, _ in request.rounds)  # idle steps may follow the last round
