"""Draft trees where the engine has little room: split prompts, preempted, aborted and stopped requests, trees of 63 nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.engine import IS_V2, TestEngine, engine, held_out
from tests.e2e.logged import counted, rounds, set_policy, take_batches
from tests.e2e.test_engine_modes import metric
from tests.e2e.test_trees import tree_engine

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(IS_V2, reason="V2 has tests of its own")]
SLOTS, MAX_TOKENS = 63, 56
PROMPTS = [text[-size:] for text, size in zip(held_out(6, 700), (700, 700, 300, 300, 300, 300), strict=True)]
SMALL: dict[str, Any] = {"max_model_len": 256, "block_size": 32, "max_num_seqs": 4}
ROOM = {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 4 * (SLOTS + 1) + 64, "enable_chunked_prefill": True}
ASKED: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
STOPS = ["):", "the "]


def stopped(running: TestEngine) -> list[tuple[str, str]]:
    """Texts that end at a stop string, or at their last token, and why they end."""
    from vllm import SamplingParams

    found = running.llm.generate(PROMPTS, SamplingParams(**ASKED, stop=STOPS), use_tqdm=False)
    return [(one.outputs[0].text, str(one.outputs[0].finish_reason)) for one in found]


def check_that_trees_were_verified(running: TestEngine) -> list[Any]:
    batches = take_batches(running)
    assert any(sum(batch.rounds.chain_tokens) for batch in batches), "no tree was verified: this test shows nothing"
    assert running.honed.errors.count == 0
    return batches


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    """What an engine without speculation answers. It ends before the other begins: vLLM has one set of counters a process."""
    with engine(None, speculative_config=None, **SMALL) as running:
        return {"plain": running.generate(PROMPTS, **ASKED), "stopped": stopped(running)}


@pytest.fixture(scope="module")
def trees(references: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestEngine]:
    with tree_engine(tmp_path_factory, SLOTS, **SMALL, **ROOM) as running:
        yield running


@pytest.fixture(autouse=True)
def _every_tree_is_full(trees: TestEngine) -> None:
    take_batches(trees)
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)


def test_split_prompts_and_preempted_requests(
    trees: TestEngine, references: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, is_split = trees.scheduler.schedule, []

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        counts = output.num_scheduled_tokens
        is_split.extend(counts[new.req_id] < len(new.prompt_token_ids) for new in output.scheduled_new_reqs)
        return output

    monkeypatch.setattr(trees.scheduler, "schedule", scheduled)
    before, preempted = trees.counters(), metric(trees, "vllm:num_preemptions")
    assert trees.generate(PROMPTS, **ASKED) == references["plain"]
    after, batches = trees.counters(), check_that_trees_were_verified(trees)
    rows = rounds(batches)
    assert {name: after[name] - before[name] for name in after} == counted(rows)
    assert max(row["k"] for row in rows) > 31  # never more than a request can still take
    assert metric(trees, "vllm:num_preemptions") > preempted, "nothing was preempted: this test shows nothing"
    assert any(is_split), "no prompt was split: this test shows nothing"


def test_one_request_alone(trees: TestEngine, references: dict[str, Any]) -> None:
    for prompt, expected in list(zip(PROMPTS, references["plain"], strict=True))[:2]:
        assert trees.generate([prompt], **ASKED) == [expected]
        check_that_trees_were_verified(trees)


def test_requests_that_are_aborted_leave_the_others_alone(trees: TestEngine, references: dict[str, Any]) -> None:
    from vllm import SamplingParams

    llm_engine, done = trees.llm.llm_engine, {}
    for number, prompt in enumerate(PROMPTS):
        llm_engine.add_request(str(number), prompt, SamplingParams(**ASKED))
    for step in range(10_000):
        for out in llm_engine.step():
            if out.finished:
                done[int(out.request_id)] = list(out.outputs[0].token_ids)
        if step in (6, 9):  # running ones, and one that waits
            llm_engine.abort_request({6: ["0", "5"], 9: ["1"]}[step])
        if not llm_engine.has_unfinished_requests():
            break
    assert not {0, 1, 5} & set(done), "too late: this test shows nothing"
    assert done == {number: ids for number, ids in enumerate(references["plain"]) if number not in (0, 1, 5)}
    assert len(trees.honed._requests) == 0
    check_that_trees_were_verified(trees)


def test_a_stop_string_amid_a_path_ends_the_text_there(trees: TestEngine, references: dict[str, Any]) -> None:
    reasons = {reason for _, reason in references["stopped"]}
    assert "stop" in reasons, "nothing was stopped: this test shows nothing"
    assert stopped(trees) == references["stopped"]
    check_that_trees_were_verified(trees)
