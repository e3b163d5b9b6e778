"""Draft trees on vLLM's V1 runner: tokens are those without speculation, events what vLLM counts; three controls must fail."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch

from honed.kernels.trees.reference import DraftTrees
from honed.kernels.trees.tree_build import tree_build
from tests.e2e.beside_trees import answers_in_turn, backend_calls
from tests.e2e.device_waits import device_waits, of_honed
from tests.e2e.engine import DRAFTER, IS_ASYNC, IS_CUDA, IS_V2, TARGET, K, TestEngine, engine, held_out
from tests.e2e.failing import fail_sometimes
from tests.e2e.logged import counted, rounds, set_policy, take_batches, without_tree
from tests.e2e.swapping import wait_until_compiled, wait_until_trees_may_grow, wait_until_written
from tests.e2e.test_engine_modes import grammar
from tests.e2e.test_sampling_unchanged import mend_vllm_cpu
from tests.e2e.turns import check_turns, take_turns

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(IS_V2, reason="V2 has tests of its own"),
]
SLOTS, MAX_TOKENS = 31, 40
PROMPTS = held_out(8, 300)


def speculation(slots: int) -> dict[str, Any]:
    return {"method": "dflash", "model": str(DRAFTER), "num_speculative_tokens": slots}


@contextmanager
def tree_engine(folders: pytest.TempPathFactory, slots: int, **options: Any) -> Iterator[TestEngine]:
    """Start an engine that verifies trees and logs token ids."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HONED_TREES", "1")
        if not IS_CUDA:
            mend_vllm_cpu(patch)
        with engine(folders.mktemp("trees") / "run", speculative_config=speculation(slots), **options) as running:
            running.honed._recorder.is_logging_token_ids = True
            wait_until_trees_may_grow(running)
            yield running


def answers(running: TestEngine, prompts: list[str] = PROMPTS, **params: Any) -> list[list[int]]:
    return running.generate(prompts, **({"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True} | params))


def beside_a_grammar(running: TestEngine) -> list[list[int]]:
    """Greedy answers, of which every other one has a grammar."""
    return each(running, PROMPTS, [{"temperature": 0.0, **(grammar() if i % 2 else {})} for i in range(len(PROMPTS))])


def each(running: TestEngine, prompts: list[str], params: list[dict[str, Any]]) -> list[list[int]]:
    """Answers to requests with parameters of their own."""
    from vllm import SamplingParams

    sampling = [SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **of_one) for of_one in params]
    found = running.llm.generate(prompts, sampling, use_tqdm=False)
    running.end_steps()
    return [list(one.outputs[0].token_ids) for one in found]


PENALTIES = {"presence_penalty": 0.7, "repetition_penalty": 1.2}
NUM_SAMPLED, TOP_K, NUM_DRAWN = 400, 4, 3
LONG = [(text * 9)[:1000] for text in PROMPTS[:4]]


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    """What an engine without speculation answers. It ends before the other begins: vLLM has one set of counters a process."""
    with engine(None, speculative_config=None) as running:
        return {
            "plain": answers(running),
            "penalties": answers(running, **PENALTIES),
            "grammar": beside_a_grammar(running),
            "long": answers(running, LONG, max_tokens=500),
            "short": [answers(running, PROMPTS[:4], max_tokens=n) for n in (1, 2, 3)],
        }


@pytest.fixture(scope="module")
def plain(references: dict[str, Any]) -> list[list[int]]:
    found: list[list[int]] = references["plain"]
    return found


@pytest.fixture(scope="module")
def trees(references: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestEngine]:
    with tree_engine(tmp_path_factory, SLOTS, max_num_seqs=16, enable_prefix_caching=True) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh_log(request: pytest.FixtureRequest) -> None:
    if "trees" in request.fixturenames:
        take_batches(request.getfixturevalue("trees"))


def test_it_says_that_it_verifies_trees(trees: TestEngine) -> None:
    hello = trees.honed._hello()
    assert "trees" in hello.capabilities
    assert hello.limits == []
    assert hello.num_spec_tokens == SLOTS


def test_room_is_reserved_for_what_the_drafter_drafts(trees: TestEngine) -> None:
    """Not for every slot: those would keep other requests and prompts out of the step."""
    scheduler, config = trees.scheduler, trees.llm.llm_engine.vllm_config
    assert scheduler.vllm_config.speculative_config.max_num_new_slots_for_drafting == K
    assert config.speculative_config.max_num_new_slots_for_drafting == SLOTS
    assert config.num_lookahead_tokens - scheduler.num_lookahead_tokens == SLOTS - K


@pytest.mark.parametrize("budget", [SLOTS, 15, 7, 3, 1])
def test_tokens_are_those_without_speculation_and_events_are_vllms(
    trees: TestEngine, plain: list[list[int]], budget: int
) -> None:
    set_policy(trees, static_k=budget, max_k=SLOTS)
    before = trees.counters()
    assert answers(trees) == plain
    after = trees.counters()
    batches = take_batches(trees)
    rows = rounds(batches)
    assert {name: after[name] - before[name] for name in after} == counted(rows)
    assert max(row["k"] for row in rows) == budget
    assert trees.honed.errors.count == 0
    for batch in batches:
        columns, at = batch.rounds, 0
        for k, accepted, chain, kept in zip(
            columns.num_draft_tokens, columns.num_accepted_tokens, columns.chain_tokens, columns.chain_accepted, strict=True
        ):
            nodes = columns.nodes[at : at + accepted] if chain else []
            at += len(nodes)
            assert kept <= accepted
            assert len(nodes) == (accepted if chain else 0)
            assert all(node < k for node in nodes)


@pytest.mark.fault("another kernel for each number of nodes")
def test_more_nodes_accept_more_than_the_chain(trees: TestEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All from kernels of one size: those of another would be compiled within a step."""
    lengths, sizes = {}, set[tuple[int, int]]()

    def build(log_probs: torch.Tensor, ids: torch.Tensor, budgets: torch.Tensor, max_nodes: int) -> DraftTrees:
        sizes.add((log_probs.shape[1], max_nodes))
        return tree_build(log_probs, ids, budgets, max_nodes)

    monkeypatch.setattr("honed.attach.trees.grow.tree_build", build)
    for budget in (3, 7, 15, 31):
        set_policy(trees, static_k=budget, max_k=SLOTS)
        before = trees.counters()
        answers(trees)
        after = trees.counters()
        accepted, drafts = (after[name] - before[name] for name in ("num_accepted_tokens", "num_drafts"))
        lengths[budget] = 1 + accepted / drafts
        rows = [batch.rounds for batch in take_batches(trees)]
        chain = 1 + sum(sum(r.chain_accepted) for r in rows) / sum(sum(c > 0 for c in r.chain_tokens) for r in rows)
        assert lengths[budget] > chain
    assert lengths[3] < lengths[7] < lengths[15] < lengths[31]
    assert sizes == {(K, SLOTS)}


@pytest.mark.parametrize("budget", [15, 3])
def test_chains_trees_and_none_in_one_step(trees: TestEngine, plain: list[list[int]], budget: int) -> None:
    set_policy(trees, static_k=budget, max_k=SLOTS)
    ceilings = [0, 3, 31, -1]
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0, "extra_args": {"honed_max_draft_tokens": ceilings[i // 2], "honed_workload": f"w{i}"}}
        if i % 2
        else {"temperature": 0.0, "logprobs": 1, "extra_args": {"honed_workload": f"w{i}"}}
        for i in range(len(PROMPTS))
    ]
    assert each(trees, PROMPTS, asked) == plain
    batches = take_batches(trees)
    is_tree: dict[str, set[bool]] = {}
    chains = set[int]()
    for batch in batches:
        columns = batch.rounds
        trees_chains = columns.chain_tokens or [0] * len(columns.step)
        for label, k, chain in zip(columns.workload, columns.num_draft_tokens, trees_chains, strict=True):
            is_tree.setdefault(batch.workloads[label], set()).add(chain > 0)
            chains |= set() if chain else {k}
    assert max(chains) == min(budget, K)
    assert all(is_tree[f"w{i}"] == {False} for i in (0, 1, 2, 4, 6))
    assert all(True in is_tree[f"w{i}"] for i in (3, 5, 7))


@pytest.mark.skipif(IS_CUDA, reason="what a CPU's backend is given is noted")
def test_chains_behind_trees_are_attended_without_tree_rows(
    trees: TestEngine, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_policy(trees, static_k=15, max_k=SLOTS)
    given, greedy = backend_calls(trees, monkeypatch), {"temperature": 0.0}
    assert each(trees, PROMPTS, [greedy if i < 5 else greedy | {"logprobs": 1} for i in range(len(PROMPTS))]) == plain
    behind = [call for call in given if call.are_trees_first]
    assert behind != []
    assert all(call.rows == call.num_requests * (K + 1) <= 3 * (K + 1) for call in behind[: len(behind) // 2])
    assert all(call.rows > call.tree_rows for call in given if not call.are_trees_first)
    assert trees.honed.errors.count == 0


@pytest.mark.skipif(IS_CUDA, reason="what a CPU's backend is given is noted")
def test_prompts_in_chunks_behind_a_tree_are_attended_without_its_rows(
    trees: TestEngine, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    set_policy(trees, static_k=15, max_k=SLOTS)
    given, asked = backend_calls(trees, monkeypatch), SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert answers_in_turn(trees, monkeypatch, PROMPTS[:3], [asked] * 3, 16) == plain[:3]
    assert all(call.are_trees_first for call in given)
    assert {(call.rows, call.num_requests) for call in given} >= {(32, 2)}
    assert trees.honed.errors.count == 0


def test_steps_with_chains_and_with_trees_take_turns(
    trees: TestEngine, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_turns(trees, monkeypatch)
    before = trees.counters()
    assert answers(trees) == plain
    after, batches = trees.counters(), take_batches(trees)
    rows = rounds(batches)
    assert {name: after[name] - before[name] for name in after} == counted(rows)
    check_turns(batches)
    assert not without_tree(batches, K)
    assert trees.honed.errors.count == 0


def test_one_request_alone_and_sixteen_at_once(trees: TestEngine, plain: list[list[int]]) -> None:
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    assert [answers(trees, [prompt])[0] for prompt in PROMPTS[:3]] == plain[:3]
    assert answers(trees, PROMPTS * 2) == plain * 2
    assert max(size for batch in take_batches(trees) for size in batch.steps.num_requests) == 16


def test_penalties_keep_vllms_own_chain(trees: TestEngine, references: dict[str, Any]) -> None:
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    assert answers(trees, **PENALTIES) == references["penalties"]
    batches = take_batches(trees)
    assert not any(sum(batch.rounds.chain_tokens) for batch in batches)
    assert max(row["k"] for row in rounds(batches)) == K


def test_a_grammar_holds_beside_trees(trees: TestEngine, references: dict[str, Any]) -> None:
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    assert beside_a_grammar(trees) == references["grammar"]
    chains = [chain for batch in take_batches(trees) for chain in batch.rounds.chain_tokens]
    assert 0 in chains
    assert max(chains) > 0
    assert trees.honed.errors.count == 0


@pytest.mark.gpu
@pytest.mark.skipif(not (IS_CUDA and IS_ASYNC), reason="needs a CUDA device, and a scheduler that runs ahead")
def test_trees_never_wait_for_the_device(trees: TestEngine) -> None:
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    answers(trees)  # what is set up once is set up
    with device_waits() as waited:
        answers(trees)
    assert of_honed(waited) == []


@pytest.mark.fault("a draft tree for drafts that vLLM has forgotten")
def test_an_empty_step_between_two_that_draft(trees: TestEngine, plain: list[list[int]]) -> None:
    from vllm import SamplingParams

    set_policy(trees, static_k=15, max_k=SLOTS)
    llm_engine, ended = trees.llm.llm_engine, list[Any]()
    for number, prompt in enumerate(PROMPTS):
        llm_engine.add_request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True))
    for step in range(1000):
        ended += [one for one in llm_engine.step() if one.finished]
        if step % 3 == 2:
            ended += trees.empty_step(PROMPTS[0])
        if not llm_engine.has_unfinished_requests():
            break
    trees.end_steps()
    answered = {int(one.request_id): list(one.outputs[0].token_ids) for one in ended if one.request_id != "leaves"}
    assert answered == dict(enumerate(plain))
    assert trees.honed.errors.count == 0


def test_a_seed_gives_the_same_tokens_again_beside_other_requests(trees: TestEngine) -> None:
    set_policy(trees, static_k=15, max_k=SLOTS)
    found = []
    for others in (PROMPTS[:0], PROMPTS[1:3]):
        trees.scheduler.reset_prefix_cache()
        asked = [{"temperature": 0.8, "seed": 7}, *[{"temperature": 0.8}] * len(others)]
        found.append(each(trees, [PROMPTS[0], *others], asked)[0])
    assert found[0] == found[1]


def test_a_cached_prefix_that_was_compacted_is_right(trees: TestEngine, plain: list[list[int]]) -> None:
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    assert answers(trees) == plain
    # The answers' own blocks are hit now, some of whose rows were moved there by trees.
    tokenizer = trees.llm.get_tokenizer()
    longer: list[Any] = [
        {"prompt_token_ids": tokenizer(text).input_ids + tokens[:32]} for text, tokens in zip(PROMPTS, plain, strict=True)
    ]
    again = trees.generate(longer, temperature=0.0, max_tokens=8, ignore_eos=True)
    assert again == [tokens[32:40] for tokens in plain]


def test_the_end_of_the_context_and_of_requests(trees: TestEngine, references: dict[str, Any]) -> None:
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    assert answers(trees, LONG, max_tokens=500) == references["long"]
    assert [answers(trees, PROMPTS[:4], max_tokens=n) for n in (1, 2, 3)] == references["short"]


def test_swaps_in_between_change_no_token(trees: TestEngine, plain: list[list[int]], tmp_path: Path) -> None:
    from tests.e2e.swapping import perturbed_drafter, swap

    set_policy(trees, static_k=15, max_k=SLOTS)
    assert swap(trees, "other", perturbed_drafter(tmp_path / "other")).ok
    assert answers(trees) == plain
    assert swap(trees, "stock", DRAFTER).ok
    assert answers(trees) == plain


def test_what_is_captured_are_the_rows_of_the_text(trees: TestEngine, plain: list[list[int]]) -> None:
    check_capture(trees, plain, MAX_TOKENS)


def test_the_target_s_most_likely_tokens_are_captured_from_the_rows_of_trees(trees: TestEngine) -> None:
    from tests.e2e.test_runner_contract import check_likely

    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    trees.scheduler.reset_prefix_cache()
    assert check_likely(trees, PROMPTS[:4], MAX_TOKENS) > 4


def check_capture(running: TestEngine, expected: list[list[int]], max_tokens: int, prompts: list[str] = PROMPTS) -> None:
    """Captured rows have the text's tokens and the target's hidden states, whatever rows of a tree they were computed in."""
    from honed.recalib.drafter.checkpoint import load_drafter
    from honed.recalib.samples.ring_reader import RingReader
    from tests.e2e.test_runner_contract import hidden_states, rows_of

    set_policy(running, static_k=SLOTS, max_k=SLOTS)
    running.scheduler.reset_prefix_cache()
    wait_until_compiled(running)
    running.rpc("honed_capture", 1.0, "v-test")
    found = running.generate(prompts, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    running.rpc("honed_capture", 0.0, "v-test")
    assert found == expected
    wait_until_written(running)
    records = RingReader(running.honed._settings.ring_path).poll(100_000).records
    tokenizer, drafter = running.llm.get_tokenizer(), load_drafter(DRAFTER, TARGET)
    for prompt, completion in zip(prompts[:3], found, strict=False):
        ids = tokenizer(prompt).input_ids + completion
        hidden = hidden_states(ids)
        wanted = drafter.fuse(torch.cat([hidden[i + 1] for i in drafter.config.target_layer_ids], dim=-1))
        rows = rows_of(records, ids)
        assert len(rows) >= len(ids) - K - 1, "committed rows are missing"
        for position, feature in rows.items():
            assert torch.allclose(torch.tensor(feature), wanted[position], atol=2e-3, rtol=2e-3), f"row {position}"


def trees_of(running: TestEngine) -> Any:
    return running.core.model_executor.driver_worker.worker._honed_trees


@pytest.mark.parametrize("control", ["no compaction", "causal mask"])
def test_without_it_tokens_differ(
    trees: TestEngine, plain: list[list[int]], control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    layers = trees_of(trees).layers
    if control == "no compaction":
        monkeypatch.setattr(layers, "compact", lambda *_: None)
    else:
        monkeypatch.setattr(layers, "_guarded", lambda *_: None)  # what vLLM computes stays
    trees.scheduler.reset_prefix_cache()
    found = answers(trees)
    trees.scheduler.reset_prefix_cache()
    assert sum(a == b for a, b in zip(found, plain, strict=True)) < len(plain) / 2


def test_without_rows_in_order_acceptance_falls(
    trees: TestEngine, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    accepted = []
    for is_broken in (False, True):
        if is_broken:
            monkeypatch.setattr(trees_of(trees), "_in_order", lambda _: {})
        trees.scheduler.reset_prefix_cache()
        before = trees.counters()["num_drafts"]
        assert answers(trees) == plain
        accepted.append(trees.counters()["num_drafts"] - before)
    trees.scheduler.reset_prefix_cache()
    assert accepted[1] > 1.05 * accepted[0]  # as many tokens took more rounds


@pytest.mark.fault("the largest trees for all where nobody decides")
@pytest.mark.parametrize(
    ("fields", "has_trees"),
    [
        ({"kind": "off"}, False),
        ({"kind": "goodput", "static_k": SLOTS, "max_k": SLOTS, "ttl_s": 0.0}, False),
        ({"static_k": 15, "max_k": SLOTS, "ttl_s": 0.0}, False),
        ({"static_k": K, "max_k": SLOTS}, True),
    ],
)
def test_where_nobody_decides_the_drafters_chain_is_verified_or_trees_of_its_size(
    trees: TestEngine, plain: list[list[int]], fields: dict[str, Any], has_trees: bool
) -> None:
    set_policy(trees, **fields)
    take_batches(trees)
    assert answers(trees) == plain
    batches = take_batches(trees)
    assert max(row["k"] for row in rounds(batches)) == K
    assert any(any(batch.rounds.chain_tokens) for batch in batches) == has_trees


def test_trees_leave_half_of_a_steps_tokens(trees: TestEngine, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    take_batches(trees)
    monkeypatch.setattr(trees.honed, "_most_rows", 8 * (K + 5))
    assert answers(trees) == plain
    lengths = [row["k"] for row in rounds(take_batches(trees))]
    assert max(lengths) > K
    assert lengths.count(K + 4) > len(lengths) / 4


@pytest.mark.fault("a tree that failed, logged as a chain whose drafts were wrong")
@pytest.mark.parametrize("where", ["_place", "_walk", "_grow", "_in_order", "_attend"])
def test_a_failure_costs_acceptance_and_no_token(
    trees: TestEngine, plain: list[list[int]], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_policy(trees, static_k=15, max_k=SLOTS)
    mine = trees_of(trees)
    trees.scheduler.reset_prefix_cache()
    take_batches(trees)
    monkeypatch.setattr("honed.attach.trees.runner_v1.MOST_FAILURES", 1000)
    calls = fail_sometimes(monkeypatch, mine.layers if where == "_attend" else mine, where, every=7, at=3)
    try:
        assert answers(trees) == plain
        assert len(calls) > 3
        untold = without_tree(take_batches(trees), K)
        assert all(row["trimmed"] == row["k"] - row["accepted"] for row in untold), "its nodes count as a chain's drafts"
        assert untold != [] or where in ("_grow", "_in_order")
    finally:
        mine._num_failures = 0
        trees.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_drawn_tokens_have_the_targets_probabilities(trees: TestEngine, temperature: float) -> None:
    """The first three tokens of four each: all 64 outcomes are as likely as the target says (a G-test at 1e-4)."""
    budget = 7
    set_policy(trees, static_k=budget, max_k=SLOTS)
    # A request drafts no more than it can take: with room for whole trees, also in the round of the first token.
    asked = {"temperature": temperature, "top_k": TOP_K, "max_tokens": NUM_DRAWN + budget, "ignore_eos": True}
    found = Counter(tuple(row[:NUM_DRAWN]) for row in trees.generate([PROMPTS[0]] * NUM_SAMPLED, **asked))
    batches = take_batches(trees)
    assert max(row["k"] for row in rounds(batches)) == budget
    columns = [batch.rounds for batch in batches]
    beside = sum(a > c for one in columns for a, c in zip(one.num_accepted_tokens, one.chain_accepted, strict=True))
    assert beside > NUM_SAMPLED / 20, "hardly a node beside the chain was taken: this shows little"
    exact = probabilities(trees.llm.get_tokenizer()(PROMPTS[0]).input_ids, temperature)
    assert set(found) <= set(exact)
    cells = [(0, 0.0)]
    for outcome, share in sorted(exact.items(), key=lambda one: one[1]):  # rare ones together
        if cells[-1][1] >= 5.0:
            cells.append((0, 0.0))
        seen, expected = cells[-1]
        cells[-1] = seen + found[outcome], expected + share * NUM_SAMPLED
    deviance = 2.0 * sum((n * math.log(n / e) if n else 0.0) - n + e for n, e in cells)
    assert len(cells) > 5
    assert deviance < chi_square(len(cells) - 1, 1e-4)


def chi_square(freedom: int, tail: float) -> float:
    """The value that a chi-square variate exceeds with this probability, as Wilson and Hilferty approximate it."""
    unit = 2.0 / (9.0 * freedom)
    return freedom * (1.0 - unit + NormalDist().inv_cdf(1.0 - tail) * math.sqrt(unit)) ** 3


def probabilities(ids: list[int], temperature: float) -> dict[tuple[int, ...], float]:
    """Compute the probabilities of the next three tokens. Sampling takes each from the target's top four."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_DRAWN):
        with torch.inference_mode():
            best = model(torch.tensor([[*ids, *drawn] for drawn in found])).logits[:, -1].topk(TOP_K)
        shares = (best.values / temperature).softmax(-1).tolist()
        found = {
            (*drawn, token): before * share
            for (drawn, before), tokens, row in zip(found.items(), best.indices.tolist(), shares, strict=True)
            for token, share in zip(tokens, row, strict=True)
        }
    return found


def test_after_too_many_failures_the_drafters_chain_is_verified(
    trees: TestEngine, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of this engine: its trees are over."""

    def fails(*args: Any) -> Any:
        raise RuntimeError("broken on purpose")

    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    monkeypatch.setattr(trees_of(trees), "_walk", fails)
    assert answers(trees) == plain
    take_batches(trees)
    assert answers(trees) == plain
    assert max(row["k"] for row in rounds(take_batches(trees))) == K
    hello = trees.honed._hello()
    assert "trees" not in hello.capabilities
    assert any("trees are off: they failed too often" in limit for limit in hello.limits)


def test_slots_that_trees_cannot_use_stay_empty(
    tmp_path: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with slots for trees, where trees can't be attached, verifies its drafter's chain."""
    monkeypatch.setenv("HONED_TREES", "1")
    monkeypatch.setattr("honed.attach.trees.runner_v1._misfit", lambda _: "a reason")
    with engine(tmp_path / "run", speculative_config=speculation(SLOTS)) as running:
        assert answers(running) == plain
        assert "trees are off: a reason" in running.honed._hello().limits
        lengths = [row["k"] for row in rounds(take_batches(running))]
    assert max(lengths) == K
