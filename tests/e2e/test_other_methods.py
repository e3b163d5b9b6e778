"""Speculative methods whose drafters honed doesn't train, on a real engine: events and lengths are right, tokens stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.e2e.engine import RUNNER, TARGET, TestEngine, engine, held_out
from tests.e2e.logged import counted, rounds, set_policy, take_batches

IN_STEP = "schedulers that run ahead are tested with the drafters that honed trains"
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(RUNNER != "v1", reason=IN_STEP)]
K, MAX_TOKENS = 4, 40
PROMPTS = held_out(4, 300)
PROMPTS = [prompt + prompt[:150] for prompt in PROMPTS]  # something to look up
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "draft_model": {"method": "draft_model", "model": str(TARGET)},
    "suffix": {"method": "suffix"},
}
"""Suffix drafts as many tokens as it finds, at most K: it must be asked for K."""


def answers(running: TestEngine) -> list[list[int]]:
    return running.generate(PROMPTS, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def plain_answers() -> list[list[int]]:
    """The answers without speculation."""
    with engine(None, speculative_config=None) as plain:
        return answers(plain)


@pytest.fixture(params=METHODS)
def running(
    request: pytest.FixtureRequest, plain_answers: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestEngine]:
    if request.param == "suffix":
        pytest.importorskip("arctic_inference", reason="pip install arctic-inference==0.1.1 takes minutes: it compiles")
    speculative = METHODS[request.param] | {"num_speculative_tokens": K}
    with engine(tmp_path_factory.mktemp("run"), speculative_config=speculative) as started:
        yield started


def test_events_are_vllm_s_and_lengths_are_kept(running: TestEngine, plain_answers: list[list[int]]) -> None:
    from vllm import SamplingParams

    findings = running.honed._workers.findings
    assert findings.capabilities == ("events", "draft_length")
    assert "training is for method" in findings.untrained[0]
    set_policy(running, static_k=K, max_k=K)
    before = running.counters()
    assert answers(running) == plain_answers
    logged, after = counted(rounds(take_batches(running))), running.counters()
    assert {name: after[name] - before[name] for name in after} == logged
    assert logged["num_accepted_tokens"] > 20, "little was accepted: this shows little"

    llm, before, done, lengths = running.llm.llm_engine, running.counters(), {}, (K, 0, 0, 2, K, 0, 1, K)
    for number, prompt in enumerate(PROMPTS):
        llm.add_request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True))
    for step in range(1000):
        set_policy(running, static_k=lengths[step % len(lengths)], max_k=K, generation=100 + step)
        done |= {out.request_id: list(out.outputs[0].token_ids) for out in llm.step() if out.finished}
        if not llm.has_unfinished_requests():
            break
    assert [done[str(number)] for number in range(len(PROMPTS))] == plain_answers
    rows, after = rounds(take_batches(running)), running.counters()
    assert {name: after[name] - before[name] for name in after} == counted(rows)
    assert {row["k"] for row in rows} >= {0, 1, 2, K}
    assert running.honed.errors.count == 0


def test_an_engine_that_does_not_speculate_is_attached_too(
    plain_answers: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with engine(tmp_path_factory.mktemp("run"), speculative_config=None) as started:
        assert answers(started) == plain_answers
        assert started.honed.errors.count == 0
        hello = started.honed._hello()
    assert (hello.method, hello.num_spec_tokens) == ("", 0)
    assert "there is nothing to tune" in hello.limits[0]
