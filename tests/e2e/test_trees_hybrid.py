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

from tests.e2e.engine import IS_CUDA, IS_SLOW, IS_V2, RUNNER, TestEngine, engine, held_out
from tests.e2e.float32_states import compute_in_float32
from tests.e2e.logged import counted, rounds, take_batches
from tests.e2e.memorising import memorised, transformers_model
from tests.e2e.test_sampling_unchanged import mend_vllm_cpu
from tests.zoo.pairs import PAIRS, make

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(RUNNER == "v1-async", reason="trees run on V1 in step only"),
    pytest.mark.xdist_group("trees of hybrids"),
]
SLOTS = 15
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


@contextmanager
def serving(family: str, dtype: str, folder: Path) -> Iterator[Served]:
    target_dir, drafter_dir = make(family, folder)
    options = {"dtype": dtype, "max_num_seqs": 4, **PAIRS[family].options}
    with pytest.MonkeyPatch.context() as patch:
        if not IS_CUDA:
            mend_vllm_cpu(patch)
            if dtype == "float32":
                compute_in_float32(patch)
        with engine(None, target_dir, drafter_dir, speculative_config=None, **options) as running:
            tokenizer = running.llm.get_tokenizer()
            prompts = [tokenizer.encode(text) for text in PROMPTS]
            answers = running.generate(PROMPTS, **ASKED)
        model = transformers_model(target_dir)
        version = memorised(drafter_dir, target_dir, list(zip(prompts, answers, strict=True)), model, folder / "version")
        speculation = {"method": "dflash", "model": str(version), "num_speculative_tokens": SLOTS}
        patch.setenv("HONED_TREES", "1")
        if IS_V2:
            from honed.attach.trees.runner_v2 import prepare_workers

            prepare_workers()
        with engine(folder / "run", target_dir, version, speculative_config=speculation, **options) as running:
            running.honed.before_schedule()
            yield Served(running, model, prompts, answers)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(*request.param, tmp_path_factory.mktemp("hybrid")) as found:
        yield found


in_float32 = pytest.mark.parametrize("served", [("qwen3-next", "float32")], indirect=True)


@in_float32
def test_tokens_are_those_without_speculation_and_paths_are_long(served: Served) -> None:
    running = served.running
    hello = running.honed._hello()
    assert "trees" in hello.capabilities, hello.limits
    take_batches(running)
    before, answers = running.counters(), running.generate(PROMPTS, **ASKED)
    after, batches = running.counters(), take_batches(running)
    rows = rounds(batches)
    assert {name: after[name] - before[name] for name in after} == counted(rows)
    assert running.honed.errors.count == 0
    accepted = [row["accepted"] for row in rows]
    assert answers == served.answers
    assert max(accepted) > 4, "paths are short: this shows little"
    assert any(max(batch.rounds.nodes, default=0) >= 1 for batch in batches), "no path left the chain's first node"


@in_float32
@pytest.mark.parametrize("left_out", ["commit", "_overwrite"])
def test_without_the_paths_own_states_tokens_are_others(served: Served, left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: else the test above would show nothing."""
    from honed.attach.trees.recurrent_layers import RecurrentLayers

    monkeypatch.setattr(RecurrentLayers, left_out, lambda *_: None)
    assert served.running.generate(PROMPTS, **ASKED) != served.answers


@pytest.mark.parametrize("served", [("qwen3-next", "bfloat16")], indirect=True)
def test_tokens_are_the_targets_where_vllm_rounds(served: Served) -> None:
    running, own = served.running, served.distance_of(served.answers)
    assert "trees" in running.honed._hello().capabilities
    found = served.distance_of(running.generate(PROMPTS, **ASKED))
    assert found < 2.0 * own
    assert sum(row["accepted"] for row in rounds(take_batches(running))) > 0
    assert running.honed.errors.count == 0
