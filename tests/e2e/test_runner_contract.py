"""What the attachment promises on a real engine, the same for vLLM's V1 and V2 model runners.

V1 runs in this process. test_v2_runner.py runs this very file on V2 in a process of its own, where Triton's interpreter makes
everything some hundred times slower: fewer and shorter requests there.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from honed.adapt import wire
from tests.e2e.engine import DRAFTER, IS_V2, ROOT, RUNNER, TARGET, K, TestEngine, engine
from tests.e2e.logged import counted, rounds, set_policy, take_batches

pytestmark = [pytest.mark.e2e]
MAX_TOKENS = 10 if IS_V2 else 48
NUM_PROMPTS = 2 if IS_V2 else 6


def prompts() -> list[str]:
    """Held-out prompts of both domains, short enough for the interpreter."""
    texts = []
    for name in ("a", "b"):
        lines = (ROOT / "benchmarks" / "tiny" / f"prompts_{name}.jsonl").read_text().splitlines()
        texts += [json.loads(line)["prompt"][: 60 if IS_V2 else 300] for line in lines[: NUM_PROMPTS // 2]]
    return texts


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestEngine]:
    with engine(tmp_path_factory.mktemp("run"), max_num_seqs=4 if IS_V2 else 8) as running:
        assert running.honed is not None
        running.honed._recorder.is_logging_token_ids = True
        yield running


@pytest.fixture(autouse=True)
def _fresh_log(request: pytest.FixtureRequest) -> None:
    if "attached" in request.fixturenames:
        take_batches(request.getfixturevalue("attached"))


def test_the_runner_under_test_is_the_one_that_runs(attached: TestEngine) -> None:
    hello = attached.honed._hello(0)
    assert hello.runner == RUNNER
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
        if not IS_V2:  # V2 leaves its draft token ids on the device: logged as unknown
            assert row["emitted"][: row["accepted"]] == row["draft"][: row["accepted"]]
        by_request.setdefault(row["request"], []).extend(row["emitted"])
    # All but the first token (which prefill emits) come from verify rounds; the last round may overshoot the limit.
    logged = sorted(tuple(tokens[: MAX_TOKENS - 1]) for tokens in by_request.values())
    assert logged == sorted(tuple(c[1:]) for c in completions)


def test_draft_lengths_are_obeyed_per_request_and_change_no_token(attached: TestEngine) -> None:
    set_policy(attached)
    plain = attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS)
    take_batches(attached)
    ceilings = [(0, 1, 3, 7, 2, 5)[i % 6] for i in range(NUM_PROMPTS)] if not IS_V2 else [0, 3]
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
    assert {r["k"] for r in rounds(take_batches(attached))} <= {1, 2}  # 1: fewer tokens were left to generate
    set_policy(attached, static_k=0)
    before = attached.counters()
    attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS)
    assert {r["k"] for r in rounds(take_batches(attached))} == {0}
    assert attached.counters() == before
    set_policy(attached)


def test_captured_features_are_the_targets(attached: TestEngine, tmp_path: Path) -> None:
    """Every row equals fc + hidden_norm over a full-precision forward of the target, and only at the right layer."""
    from honed.recalib.checkpoint import load_drafter
    from honed.recalib.ring_reader import RingReader

    set_policy(attached)
    attached.rpc("honed_capture", 1.0, "v-test")
    completions = attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS)
    # On CUDA rows are committed a step late.
    attached.generate(prompts()[:1], temperature=0.0, max_tokens=1, extra=[{"honed_capture": 0}])
    attached.rpc("honed_capture", 0.0, "v-test")
    records = RingReader(attached.honed._settings.ring_path).poll(100_000).records
    tokenizer = attached.llm.get_tokenizer()
    drafter = load_drafter(DRAFTER, TARGET)
    layer_ids = drafter.config.target_layer_ids
    num_matched = 0
    for prompt, completion in zip(prompts(), completions, strict=True):
        ids = tokenizer(prompt).input_ids + completion
        hidden = hidden_states(ids)
        expected, shifted = (drafter.fuse(torch.cat([hidden[i + 1 + by] for i in layer_ids], dim=-1)) for by in (0, -1))
        rows = rows_of(records, ids)
        # What the last round emitted was never an input: at most a whole block has no rows.
        assert len(rows) >= len(ids) - K - 1, "committed rows are missing"
        for position, feature in rows.items():
            row = torch.tensor(feature)
            assert torch.allclose(row, expected[position], atol=2e-3, rtol=2e-3), f"row {position} is misaligned"
            assert not torch.allclose(row, shifted[position], atol=5e-2), "the neighbouring layer would have passed too"
            num_matched += 1
    assert num_matched > 50 if not IS_V2 else num_matched > 20


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


def rows_of(records: list[Any], ids: list[int]) -> dict[int, np.ndarray[Any, Any]]:
    """Captured rows by position, of the one request whose tokens these are."""
    requests: dict[str, dict[int, tuple[int, Any]]] = {}
    for record in records:
        if getattr(record, "token_ids", None) is None:
            continue
        for i, token in enumerate(record.token_ids):
            requests.setdefault(record.request, {})[record.first_position + i] = (int(token), record.features[i])
    for rows in requests.values():
        # A request's last round may have accepted more than the request had room for.
        within = {position: row for position, row in rows.items() if position < len(ids)}
        if len(within) > 8 and all(ids[position] == token for position, (token, _) in within.items()):
            return {position: feature for position, (_, feature) in within.items()}
    raise AssertionError("no captured request has these tokens: token ids and positions don't belong together")


def test_a_request_can_opt_out_of_capture(attached: TestEngine) -> None:
    attached.rpc("honed_capture", 1.0, "v-test")
    before = attached.rpc("honed_capture", 1.0, "v-test")["rows"]
    attached.generate(prompts(), temperature=0.0, max_tokens=4, extra=[{"honed_capture": 0}] * NUM_PROMPTS)
    assert attached.rpc("honed_capture", 0.0, "v-test") == {"rows": before} | {
        k: v for k, v in attached.rpc("honed_capture", 0.0, "v-test").items() if k != "rows"
    }


def perturbed_drafter(folder: Path) -> Path:
    """The tiny drafter with every weight moved, as a checkpoint."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(DRAFTER, folder)
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: (t.float() + 0.1 * t.float().std() * torch.randn(t.shape, generator=generator)).to(t.dtype)
        if t.numel() > 256
        else t
        for name, t in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def swap(running: TestEngine, version: str, folder: Path, sha256: str = "", **more: str) -> wire.CommandResult:
    """Ask for a swap as the daemon does, and let the engine's thread get on with it."""
    results: list[wire.CommandResult] = []
    commands = running.honed.commands
    commands._report = results.append
    args = {"version": version, "path": str(folder), "sha256": sha256, **more}
    commands.put(wire.Command(command_id=secrets.token_hex(8), kind="swap", args=args))
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        running.honed.before_schedule()
        if results:
            return results[0]
        time.sleep(0.005)
    raise AssertionError("the swap never ended")


@pytest.mark.parametrize("damage", ["missing_file", "truncated", "wrong_sum", "wrong_shape", "missing_tensor", "not_finite"])
def test_a_bad_checkpoint_is_refused_and_changes_nothing(attached: TestEngine, tmp_path: Path, damage: str) -> None:
    from safetensors.torch import load_file, save_file

    folder, sha256 = tmp_path / "bad", ""
    shutil.copytree(DRAFTER, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if damage == "missing_file":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "wrong_sum":
        sha256 = "0" * 64
    elif damage == "wrong_shape":
        save_file(tensors | {"norm.weight": torch.ones(7)}, file)
    elif damage == "missing_tensor":
        save_file({n: t for n, t in tensors.items() if n != "norm.weight"}, file)
    else:
        save_file(tensors | {"norm.weight": torch.full_like(tensors["norm.weight"], torch.nan)}, file)
    before = attached.rpc("honed_checksum")
    result = swap(attached, f"bad-{damage}", folder, sha256)
    assert not result.ok
    assert "\n" not in result.error
    assert len(result.error) > 20
    assert attached.rpc("honed_checksum") == before


def drafts_of(running: TestEngine) -> list[list[int]]:
    """Every block that is drafted for two prompts, as `propose` gives it, in an order that doesn't depend on batching."""
    set_policy(running)
    drafter = worker_of(running)._honed_side.runner.drafter
    seen: list[list[int]] = []
    propose = drafter.propose

    def listening(*args: Any, **kwargs: Any) -> Any:
        drafted = propose(*args, **kwargs)
        seen.extend(drafted.tolist())
        return drafted

    drafter.propose = listening
    running.generate(prompts()[:2], temperature=0.0, max_tokens=MAX_TOKENS)
    drafter.propose = propose
    assert len(seen) > 4
    return sorted(seen)


def worker_of(running: TestEngine) -> Any:
    worker = running.core.model_executor.driver_worker
    return getattr(worker, "worker", worker)


def target_parameters(running: TestEngine) -> list[tuple[str, torch.Tensor]]:
    return list(worker_of(running).model_runner.get_model().named_parameters())


def test_versions_that_take_turns_are_held_and_exact(attached: TestEngine, tmp_path: Path) -> None:
    folders = {"stock": DRAFTER, "other": perturbed_drafter(tmp_path / "other")}
    plain = attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS)
    sums: dict[str, str] = {}
    for number, version in enumerate(("other", "stock", "other", "stock")):
        beside = "stock" if version == "other" else "other"
        turns = {"beside_version": beside, "beside_path": str(folders[beside]), "home_version": "stock", "lease_s": "600"}
        result = swap(attached, version, folders[version], drops_cache="1", **turns)
        assert result.ok, result.error
        assert (result.figures["stage_ms"] > 0) == (number == 0)  # read once, both of them
        assert attached.rpc("honed_checksum") == sums.setdefault(version, attached.rpc("honed_checksum"))
        assert attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS) == plain
    assert sums["stock"] != sums["other"]
    swapper = worker_of(attached)._honed_side.swapper
    assert set(swapper._held) == {"stock", "other"}
    assert swap(attached, "stock", DRAFTER).ok
    assert not swapper._held  # the last swap lets go of the memory
    assert attached.rpc("honed_checksum") == sums["stock"]


def test_swapped_weights_draft_as_a_fresh_load_does(attached: TestEngine, tmp_path: Path) -> None:
    other = perturbed_drafter(tmp_path / "other")
    plain = attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS)
    stock_sum, stock_drafts = attached.rpc("honed_checksum"), drafts_of(attached)
    target_weights = [p for n, p in target_parameters(attached) if "embed_tokens" in n or "lm_head" in n]
    addresses, sums = [p.data_ptr() for p in target_weights], [float(p.double().sum()) for p in target_weights]

    result = swap(attached, "other", other)
    assert result.ok, result.error
    assert result.figures["pause_ms"] > 0
    swapped_sum, swapped_drafts = attached.rpc("honed_checksum"), drafts_of(attached)
    assert swapped_sum != stock_sum
    assert swapped_drafts != stock_drafts
    assert attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS) == plain, "a swap changed the output"
    assert [p.data_ptr() for p in target_weights] == addresses
    assert [float(p.double().sum()) for p in target_weights] == sums

    assert swap(attached, "stock", DRAFTER).ok
    assert attached.rpc("honed_checksum") == stock_sum
    assert drafts_of(attached) == stock_drafts

    # Last: when an engine ends it takes vLLM's process groups with it, and the other one can't load weights any more.
    with engine(tmp_path / "fresh-run", drafter=other, max_num_seqs=4 if IS_V2 else 8) as fresh:
        fresh.honed.before_schedule()
        assert fresh.rpc("honed_checksum") == swapped_sum
        assert drafts_of(fresh) == swapped_drafts
