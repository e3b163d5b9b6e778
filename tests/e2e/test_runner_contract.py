"""What the attachment promises on a real engine, the same for every runner and scheduler (see engine.py).

Fewer and shorter requests on V2, which is slow here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from honed.attach.engine.guard import MAX_ERRORS
from tests.e2e.engine import ARE_DRAFTS_KNOWN, DRAFTER, IS_ASYNC, IS_CUDA, IS_SLOW, IS_V2, TARGET, K, TestEngine, held_out
from tests.e2e.logged import counted, rounds, set_policy, take_batches
from tests.e2e.swapping import wait_until_compiled, wait_until_written

pytestmark = [pytest.mark.e2e, pytest.mark.runners]
MAX_TOKENS = 10 if IS_SLOW else 48
NUM_PROMPTS = 2 if IS_SLOW else 6


def prompts() -> list[str]:
    return held_out(NUM_PROMPTS, 60 if IS_SLOW else 300)


@pytest.fixture(autouse=True)
def _fresh_log(request: pytest.FixtureRequest) -> None:
    if "attached" in request.fixturenames:
        take_batches(request.getfixturevalue("attached"))


def test_the_runner_under_test_is_the_one_that_runs(attached: TestEngine) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    hello = attached.honed._hello()
    assert hello.runner == ("v2" if IS_V2 else "v1")
    assert isinstance(attached.scheduler, AsyncScheduler) == IS_ASYNC
    assert (attached.core.batch_queue_size == 2) == IS_ASYNC
    assert set(hello.capabilities) == {"events", "draft_length", "capture", "swap"}
    assert hello.limits == []


def test_logged_events_equal_vllms_counters(attached: TestEngine) -> None:
    before = attached.counters()
    set_policy(attached)
    extra = [{"honed_workload": "x"}] * NUM_PROMPTS
    completions = attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS, extra=extra)
    rows = rounds(take_batches(attached))
    after = attached.counters()
    assert {name: after[name] - before[name] for name in after} == counted(rows)
    assert {r["workload"] for r in rows} == {"x"}
    by_request: dict[int, list[int]] = {}
    for row in rows:
        accepted, draft = row["accepted"], row["draft"]
        if ARE_DRAFTS_KNOWN:
            assert row["emitted"][:accepted] == draft[:accepted]
            assert accepted == row["k"] or row["emitted"][accepted] != draft[accepted], "it was refused for being the same"
        else:
            assert draft == [-1] * row["k"]
        by_request.setdefault(row["request"], []).extend(row["emitted"])
    # All but the first token (which prefill emits) come from verify rounds; the last round may overshoot the limit.
    logged = sorted(tuple(tokens[: MAX_TOKENS - 1]) for tokens in by_request.values())
    assert logged == sorted(tuple(c[1:]) for c in completions)


def test_draft_lengths_are_obeyed_per_request_and_change_no_token(attached: TestEngine) -> None:
    set_policy(attached)
    plain = attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS)
    take_batches(attached)
    ceilings = [(0, 1, 3, 7, 2, 5)[i % 6] for i in range(NUM_PROMPTS)] if not IS_SLOW else [0, 3]
    extra = [{"honed_max_draft_tokens": c, "honed_workload": f"k{c}"} for c in ceilings]
    cut = attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS, extra=extra)
    assert cut == plain
    longest: dict[str, int] = {}
    for row in rounds(take_batches(attached)):
        longest[row["workload"]] = max(longest.get(row["workload"], 0), row["k"])
    assert longest == {f"k{c}": c for c in ceilings}


def test_a_static_policy_sets_every_round(attached: TestEngine) -> None:
    set_policy(attached, static_k=2)
    attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS)
    lengths = [r["k"] for r in rounds(take_batches(attached))]
    assert max(lengths) == 2
    assert lengths.count(2) > len(lengths) / 2  # fewer: a request could take no more
    set_policy(attached, static_k=0)
    before = attached.counters()
    attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS)
    assert {r["k"] for r in rounds(take_batches(attached))} == {0}
    assert attached.counters() == before
    set_policy(attached)


def test_each_step_says_why_its_lengths_are_what_they_are(attached: TestEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    honed = attached.honed

    def reasons(**policy: Any) -> set[str]:
        set_policy(attached, **policy)
        attached.generate(prompts()[:2], temperature=0.0, max_tokens=4)
        return {reason for batch in take_batches(attached) for reason in batch.steps.decision}

    assert reasons(kind="goodput", static_k=2) == {"cold"}
    assert reasons(kind="off") == {"off"}
    assert reasons(kind="static", static_k=2) == {"static"}
    with monkeypatch.context() as broken:
        broken.setattr(honed._decider, "decide", None)
        assert reasons(kind="static", static_k=2) == {"unplanned"}
    assert 0 < honed.errors.count <= MAX_ERRORS
    try:
        honed.errors.count = MAX_ERRORS + 1
        assert reasons(kind="static", static_k=2) == {"error"}
        assert reasons(kind="off") == {"error"}
    finally:
        honed.errors.count = 0


@pytest.mark.parametrize("num_drafts", [K, 0])
def test_captured_features_are_the_targets(attached: TestEngine, tmp_path: Path, num_drafts: int) -> None:
    """Every row equals fc + hidden_norm over a full-precision forward of the target, and only at the right layer.

    Also in steps that draft nothing, as while a drafter that has drifted is retrained.
    """
    from honed.recalib.drafter.checkpoint import load_drafter
    from honed.recalib.samples.ring_reader import RingReader

    set_policy(attached, static_k=num_drafts)
    wait_until_compiled(attached)
    reader = RingReader(attached.honed._settings.ring_path)
    reader.poll(100_000)
    attached.rpc("honed_capture", 1.0, "v-test")
    completions = attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS)
    # On CUDA rows are committed a step late.
    attached.generate(prompts()[:1], temperature=0.0, max_tokens=1, extra=[{"honed_capture": 0}])
    attached.rpc("honed_capture", 0.0, "v-test")
    wait_until_written(attached)
    records = reader.poll(100_000).records
    tokenizer = attached.llm.get_tokenizer()
    drafter = load_drafter(DRAFTER, TARGET)
    layer_ids = drafter.config.target_layer_ids
    num_matched, exact = 0, 1e-2 if IS_CUDA else 2e-3  # there Triton multiplies float32 with ten bits
    for prompt, completion in zip(prompts(), completions, strict=True):
        ids = tokenizer(prompt).input_ids + completion
        hidden = hidden_states(ids)
        expected, shifted = (drafter.fuse(torch.cat([hidden[i + 1 + by] for i in layer_ids], dim=-1)) for by in (0, -1))
        rows = rows_of(records, ids)
        # What the last round emitted was never an input: at most a whole block has no rows.
        assert len(rows) >= len(ids) - num_drafts - 1, "committed rows are missing"
        for position, feature in rows.items():
            row = torch.tensor(feature)
            assert torch.allclose(row, expected[position], atol=exact, rtol=exact), f"row {position} is misaligned"
            assert not torch.allclose(row, shifted[position], atol=5e-2), "the neighbouring layer would have passed too"
            num_matched += 1
    assert num_matched > 50 if not IS_SLOW else num_matched > 20


def hidden_states(ids: list[int]) -> list[torch.Tensor]:
    """The target's hidden states [T, H] from transformers in float32: what goes into layer 0, then each layer's output.

    Read by hooks: `output_hidden_states` gives the last layer's after the final norm.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32, local_files_only=True)
    found: list[torch.Tensor] = []
    layers = model.model.layers
    layers[0].register_forward_pre_hook(lambda _, args: found.append(args[0][0]))
    for layer in layers:
        layer.register_forward_hook(lambda _, __, out: found.append((out[0] if isinstance(out, tuple) else out)[0]))
    with torch.no_grad():
        model(torch.tensor([ids]))
    return found


def check_likely(running: TestEngine, prompts: list[str], max_tokens: int, temperature: float = 1.0) -> int:
    """Check each captured token against the target's logits; return how many emitted tokens weren't the most likely ones."""
    from transformers import AutoModelForCausalLM

    from honed.recalib.samples.ring_reader import RingReader

    wait_until_compiled(running)
    reader = RingReader(running.honed._settings.ring_path)
    reader.poll(100_000)
    running.rpc("honed_capture", 1.0, "v-test")
    answers = running.generate(prompts, temperature=temperature, seed=7, max_tokens=max_tokens, ignore_eos=True)
    running.generate(prompts[:1], temperature=0.0, max_tokens=1, extra=[{"honed_capture": 0}])  # on CUDA they come a step late
    running.rpc("honed_capture", 0.0, "v-test")
    wait_until_written(running)
    records = reader.poll(100_000).records
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32, local_files_only=True)
    tokenizer, num_others = running.llm.get_tokenizer(), 0
    for prompt, answer in zip(prompts, answers, strict=True):
        prompt_ids = tokenizer(prompt).input_ids
        ids = prompt_ids + answer
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        likely = rows_of(records, ids, "likely")
        assert {token for position, token in likely.items() if position < len(prompt_ids) - 1} <= {-1}
        emitted = {position: token for position, token in likely.items() if position >= len(prompt_ids) - 1}
        if not temperature:
            assert set(emitted.values()) == {-1}, "the emitted ones are the most likely ones"
            continue
        for position, token in emitted.items():
            assert token >= 0, f"row {position} has none"
            short = float(logits[position].max() - logits[position, token])
            assert short < (1e-1 if IS_CUDA else 1e-3), f"the token after row {position} isn't the most likely one by {short}"
            num_others += position + 1 < len(ids) and ids[position + 1] != token
    return num_others


@pytest.mark.parametrize("num_drafts", [K, 0])
def test_the_target_s_most_likely_tokens_are_captured_where_it_samples(attached: TestEngine, num_drafts: int) -> None:
    set_policy(attached, static_k=num_drafts)
    assert check_likely(attached, prompts(), MAX_TOKENS) > NUM_PROMPTS
    assert check_likely(attached, prompts()[:1], MAX_TOKENS, temperature=0.0) == 0


def rows_of(records: list[Any], ids: list[int], what: str = "features") -> dict[int, Any]:
    """Captured rows by position, of the one request whose tokens these are."""
    requests: dict[str, dict[int, tuple[int, Any]]] = {}
    for record in records:
        if getattr(record, "token_ids", None) is None:
            continue
        for i, token in enumerate(record.token_ids):
            requests.setdefault(record.request, {})[record.first_position + i] = (int(token), getattr(record, what)[i])
    for rows in requests.values():
        # A request's last round may have accepted more than the request had room for.
        within = {position: row for position, row in rows.items() if position < len(ids)}
        if len(within) > 8 and all(ids[position] == token for position, (token, _) in within.items()):
            return {position: feature for position, (_, feature) in within.items()}
    raise AssertionError("no captured request has these tokens: token ids and positions don't belong together")


def test_a_request_can_opt_out_of_capture(attached: TestEngine) -> None:
    wait_until_compiled(attached)
    attached.rpc("honed_capture", 1.0, "v-test")
    before = attached.rpc("honed_capture", 1.0, "v-test")["rows"]
    attached.generate(prompts(), temperature=0.0, max_tokens=4, extra=[{"honed_capture": 0}] * NUM_PROMPTS)
    assert attached.rpc("honed_capture", 0.0, "v-test") == {"rows": before} | {
        k: v for k, v in attached.rpc("honed_capture", 0.0, "v-test").items() if k != "rows"
    }
