"""Draft trees where the target has recurrent layers, as Qwen3-Next has them.

In float32 (see `float32_states`) tokens are those without speculation. vLLM's own kernels for a CPU compute in bfloat16, where
tokens depend on what else is in the step, with drafts or without. Answers are then held against the target itself, as
Transformers computes it in float32: how far below the likeliest token each emitted one is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from honed.attach.trees import recurrent_layers
from tests.e2e.engine import IS_CUDA, IS_SLOW, IS_V2, TestEngine, engine, held_out
from tests.e2e.float32_states import compute_in_float32
from tests.e2e.logged import counted, rounds, take_batches
from tests.e2e.memorising import memorised, transformers_model
from tests.e2e.swapping import wait_until_trees_may_grow
from tests.e2e.test_sampling_unchanged import mend_vllm_cpu
from tests.zoo.pairs import PAIRS, make

pytestmark = [
    pytest.mark.e2e,
]
SLOTS = 15
BLOCK = 768
"""Tokens after which vLLM caches a state of these targets."""
PROMPTS = held_out(2 if IS_SLOW else 6, 60 if IS_SLOW else 160)
ASKED: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16 if IS_SLOW else 40, "ignore_eos": True}


class Served(NamedTuple):
    """An engine with trees, and what is known of its target without speculation."""

    running: TestEngine
    model: Any
    """The target in float32."""
    prompts: list[list[int]]
    answers: list[list[int]]

    @torch.inference_mode()
    def distance_of(self, answers: list[list[int]]) -> float:
        """Mean distance of tokens from the likeliest one after the same text, in logits."""
        found = []
        for prompt, answer in zip(self.prompts, answers, strict=True):
            logits = self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
            found.append(logits.amax(-1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0])
        return float(torch.cat(found).mean())


def answers_of(running: TestEngine, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    return running.generate([{"prompt_token_ids": prompt} for prompt in prompts], **(ASKED | params))


@contextmanager
def serving(family: str, dtype: str, is_cached: bool, folder: Path) -> Iterator[Served]:
    """Serve a pair; with prefixes cached, prompts end a little before a block does."""
    target_dir, drafter_dir = make(family, folder)
    options = {"dtype": dtype, "max_num_seqs": 4, "max_model_len": 1024, **PAIRS[family].options}
    with pytest.MonkeyPatch.context() as patch:
        if not IS_CUDA:
            mend_vllm_cpu(patch)
            if dtype == "float32":
                compute_in_float32(patch)
        with engine(None, target_dir, drafter_dir, speculative_config=None, **options) as running:
            tokenizer = running.llm.get_tokenizer()
            prompts = [tokenizer.encode(text) for text in PROMPTS]
            if is_cached:
                prompts = [(prompts[i % 2] * BLOCK)[: BLOCK - 9 + 2 * i] for i in range(4)]
            answers = answers_of(running, prompts)
        model = transformers_model(target_dir)
        version = memorised(drafter_dir, target_dir, list(zip(prompts, answers, strict=True)), model, folder / "version")
        speculation = {"method": "dflash", "model": str(version), "num_speculative_tokens": SLOTS}
        patch.setenv("HONED_TREES", "1")
        if IS_V2:
            from honed.attach.trees.runner_v2 import prepare_workers

            prepare_workers()
        options |= {"speculative_config": speculation, "enable_prefix_caching": is_cached}
        with engine(folder / "run", target_dir, version, **options) as running:
            wait_until_trees_may_grow(running)
            yield Served(running, model, prompts, answers)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(*request.param, folder=tmp_path_factory.mktemp("hybrid")) as found:
        yield found


can_be_float32 = pytest.mark.skipif(IS_CUDA, reason="vLLM's kernels for these layers take no float32 on CUDA")
in_float32 = pytest.mark.parametrize(
    "served", [pytest.param(("qwen3-next", "float32", False), marks=can_be_float32)], indirect=True
)


@in_float32
def test_tokens_are_those_without_speculation_and_paths_are_long(served: Served) -> None:
    running = served.running
    hello = running.honed._hello()
    assert "trees" in hello.capabilities, hello.limits
    take_batches(running)
    before, answers = running.counters(), answers_of(running, served.prompts)
    after, batches = running.counters(), take_batches(running)
    rows = rounds(batches)
    assert {name: after[name] - before[name] for name in after} == counted(rows)
    assert running.honed.errors.count == 0
    accepted = [row["accepted"] for row in rows]
    assert answers == served.answers
    assert max(accepted) > 4, "paths are short: this shows little"
    assert any(max(batch.rounds.nodes, default=0) >= 1 for batch in batches), "no path left the chain's first node"


@in_float32
def test_what_compiles_kernels_changes_no_state(served: Served) -> None:
    layers = served.running.core.model_executor.driver_worker.worker._honed_trees.layers._recurrent
    states = [tensor for layer in layers._layers.values() for tensor in layer.kv_cache]
    before, runs = [tensor.clone() for tensor in states], list(layers.kernels(7))
    for run in runs:
        run()
    assert len(runs) == 1, "layers of one kind"
    assert all(torch.equal(tensor, was) for tensor, was in zip(states, before, strict=True))


@in_float32
@pytest.mark.parametrize("left_out", ["states after paths", "outputs of nodes"])
def test_without_the_paths_own_states_tokens_are_others(served: Served, left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: else the test above would show nothing."""
    layers = recurrent_layers.RecurrentLayers
    if left_out == "outputs of nodes":
        overwrite = layers._overwrite

        def overwrite_a_copy(self: Any, name: str, step: Any, taken: Any, out: torch.Tensor) -> None:
            overwrite(self, name, step, taken, out.clone())

        monkeypatch.setattr(layers, "_overwrite", overwrite_a_copy)
    else:
        monkeypatch.setattr(layers, "commit", lambda *_: None)
    assert answers_of(served.running, served.prompts) != served.answers
    assert served.running.honed.errors.count == 0


@pytest.mark.parametrize("served", [("qwen3-next", "bfloat16", False)], indirect=True)
def test_tokens_are_the_targets_where_vllm_rounds(served: Served) -> None:
    running, own = served.running, served.distance_of(served.answers)
    assert "trees" in running.honed._hello().capabilities
    found = served.distance_of(answers_of(running, served.prompts))
    assert found < 2.0 * own
    assert sum(row["accepted"] for row in rounds(take_batches(running))) > 0
    assert running.honed.errors.count == 0


def states_at_block_end(running: TestEngine, prompts: list[list[int]], **params: Any) -> torch.Tensor:  # [prompts, H, V, K]
    """What vLLM keeps of a recurrent layer at the end of each request's first block, and could start another request from."""
    runner = running.core.model_executor.driver_worker.worker.model_runner
    groups = runner.kv_cache_config.kv_cache_groups
    number = next(i for i, group in enumerate(groups) if type(group.kv_cache_spec).__name__ == "MambaSpec")
    layer = runner.vllm_config.compilation_config.static_forward_context[groups[number].layer_names[-1]]
    table, after, seen = runner.block_tables.block_tables[number].gpu, runner.model_state.postprocess_state, dict[str, Any]()

    def recording(*args: Any, **kwargs: Any) -> None:
        after(*args, **kwargs)
        for name, slot in runner.req_states.req_id_to_index.items():
            if name not in seen and int(runner.req_states.num_computed_tokens.gpu[slot]) >= BLOCK:
                seen[name] = layer.kv_cache[1][int(table[slot, 0])].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.model_state, "postprocess_state", recording)
        running.llm.reset_prefix_cache()
        answers_of(running, prompts, **params)
    return torch.stack([seen[name] for name in sorted(seen, key=lambda name: int(name.partition("-")[0]))])


@pytest.mark.skipif(not IS_V2, reason="vLLM's CPU build can't cache these targets' prefixes beside drafts on V1")
@can_be_float32
@pytest.mark.parametrize("served", [("qwen3-next", "float32", True)], indirect=True)
def test_where_a_block_ends_in_a_path_its_own_state_is_cached(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    running = served.running
    worker = running.core.model_executor.driver_worker.worker
    config = worker.model_runner.vllm_config.cache_config
    assert (config.mamba_cache_mode, config.mamba_block_size) == ("align", BLOCK)
    assert answers_of(running, served.prompts) == served.answers
    texts = [prompt + answer for prompt, answer in zip(served.prompts, served.answers, strict=True)]
    commit = recurrent_layers.RecurrentLayers.commit

    def spoil_and_commit(self: Any, *args: Any) -> None:
        """Leave nothing of what vLLM kept for a chain of the same rows, which an accepted path may be, too."""
        for name, made in self._made.items():
            recurrent_layers._views(self._layers[name])[1][made.slots[:, 1:].flatten()] = 0.0
        commit(self, *args)

    monkeypatch.setattr(recurrent_layers.RecurrentLayers, "commit", spoil_and_commit)
    wanted = states_at_block_end(running, [text[:BLOCK] for text in texts], max_tokens=1)
    found = states_at_block_end(running, served.prompts)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)
    assert running.honed.errors.count == 0
    monkeypatch.setattr(worker._honed_trees.layers._recurrent, "_block_size", 0)
    without = states_at_block_end(running, served.prompts)
    assert (without - wanted).abs().amax() > 1e-2, "no block ended within a path: this shows nothing"
