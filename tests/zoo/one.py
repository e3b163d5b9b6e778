"""Runs one pair of the zoo in a process of its own (see `tests.zoo.__main__`): what holds, as one line of JSON.

events    what honed logged is what vLLM counted
greedy    tokens are those without honed and without speculation; where speculation itself changes them, those with it
capture   captured features are the hidden states that Transformers computes
drafts    honed's drafter drafts what vLLM's drafted
logits    its logits are those of vLLM's class in every step (EAGLE-3 and MTP in float32)
idle      the same after steps that draft nothing
swap      other weights and back: checksums are those of the files, tokens stay
trained   some updates on what was captured make a version that drafts more, and serves; then a roll-back
kept      after a swap amid requests that keeps the cache, that version drafts as if it had always been there
trees     with that version's draft trees, tokens are those without speculation (DFlash; hybrids in float32, on a CPU only)
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e import triton_on_cpu
from tests.e2e.engine import IS_CUDA, IS_SLOW, IS_V2, TARGET, K, TestEngine, engine, held_out

if IS_SLOW:
    triton_on_cpu.install()

import pytest
import torch

from honed.recalib.drafter.checkpoint import load_drafter, save_drafter
from honed.recalib.drafter.drafter import Drafter
from honed.recalib.drafter.unrolled import UnrolledDrafter
from honed.recalib.gate.evaluate import expected_acceptance_length
from honed.recalib.registry.weights_digest import weights_digests
from honed.recalib.samples.ring_reader import RingReader
from honed.recalib.samples.sample import TrainingSample
from honed.recalib.samples.sessions import SessionAssembler
from honed.recalib.training.micro_step import MicroTrainer, TrainingSettings
from tests.e2e.drafting import LOGITS_TOLERANCE, difference_of_logits, listen, share_of_equal_drafts
from tests.e2e.float32_states import compute_in_float32
from tests.e2e.logged import counted, rounds, set_policy, take_batches
from tests.e2e.memorising import memorised, transformers_model
from tests.e2e.swapping import swap, wait_until_trees_may_grow, wait_until_written
from tests.zoo.mtp_targets import as_qwen2
from tests.zoo.pairs import PAIRS, make

parser = argparse.ArgumentParser()
parser.add_argument("pair")
_asked = parser.parse_args()
PAIR = PAIRS[_asked.pair]
IS_MIMO = PAIR.target == "mimo"
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
"""Of training."""
os.environ["HONED_FEATURES"] = "layers"

NUM_PROMPTS, MAX_TOKENS = (2, 12) if IS_SLOW else (6, 48)
PROMPTS = held_out(NUM_PROMPTS, 60 if IS_SLOW else 200)
SLOTS = 15
"""For draft trees."""
NUM_UPDATES = 200 if PAIR.method in ("eagle3", "mtp") else 40 if IS_SLOW else 120
TOLERANCE = 1e-2 if IS_CUDA else 1e-4
"""Of captured features, relative to their size: other rows or layers would be off by more than 1. On CUDA vLLM's attention
multiplies float32 with ten bits. Where vLLM rounds, twice the distance that Transformers' own rounding makes is allowed."""
HAS_LOGITS = PAIR.method in ("eagle3", "mtp") and PAIR.dtype == "float32" and not IS_V2
"""Whether vLLM's logits can be noted and held against honed's, which are of float32."""
LEAST_SHARE = {"float32": 0.98 if IS_CUDA else 0.99, "bfloat16": 0.9}
"""Of equal drafts: honed computes in float32."""
SHARE_NOISE = 0.03
"""Of two such shares, each of some thousand drafts."""


def answers(running: TestEngine) -> list[list[int]]:
    return running.generate(PROMPTS, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


def as_transformers_reads(target: Path, folder: Path) -> Path:
    """The target, or one that is the same function: Transformers has no MiMo, and no Qwen3.5 without gates."""
    if IS_MIMO:
        return as_qwen2(target, folder)
    raw = json.loads((target / "config.json").read_text())
    return TARGET if raw.get("attn_output_gate") is False else target


@torch.inference_mode()
def errors_of_capture(target: Path, layers: tuple[int, ...], samples: list[TrainingSample]) -> tuple[float, float]:
    """Largest distance of a request's features from Transformers' hidden states in float32, relative to their size.

    Where vLLM rounds, a request's distance is the median of its rows': single rows are routed to other experts then.

    Returns:
        that of the captured features, and where vLLM rounds that of Transformers' own hidden states in bfloat16.
    """
    dtypes = (torch.float32, torch.bfloat16) if PAIR.is_rounded else (torch.float32,)
    models = [transformers_model(target, dtype) for dtype in dtypes]
    ours, own = 0.0, 0.0
    for sample in samples:
        assert int(sample.positions[0]) == 0, "not a whole request: this shows nothing"
        exact, *rounded = (_read_by_a_drafter(model, sample.token_ids, layers) for model in models)
        ours = max(ours, _distance(sample.features[:, : exact.shape[1]].float(), exact))
        own = max([own, *(_distance(one, exact) for one in rounded)])
    return ours, own


def _read_by_a_drafter(model: Any, token_ids: torch.Tensor, layers: tuple[int, ...]) -> torch.Tensor:
    if IS_MIMO:
        return _before_the_last_norm(model, token_ids)
    hidden = model(token_ids[None], output_hidden_states=True).hidden_states
    inner = [hidden[layer + 1][0] for layer in layers if layer + 2 < len(hidden)]  # the last one is normed there
    return torch.cat(inner or [hidden[-1][0]], dim=-1).float()  # an MTP head reads that


def _before_the_last_norm(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    with model.model.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0])):
        model(token_ids[None])
    return seen[0][0].float()


def _distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    by_row = (found - exact).norm(dim=-1) / exact.norm(dim=-1)
    return float(by_row.median() if PAIR.is_rounded else (found - exact).norm() / exact.norm())


def trained(target: Path, drafter_dir: Path, samples: list[TrainingSample], folder: Path) -> tuple[float, Path]:
    """Train a version on what was captured; returns its acceptance length over the parent's there, and its folder."""
    drafter, parent = (load_drafter(drafter_dir, target, num_draft_tokens=K).to(DEVICE) for _ in range(2))
    settings = TrainingSettings(learning_rate=2e-3, micro_steps_per_update=1, anchors_per_micro_step=48)
    trainer = MicroTrainer(drafter, settings)
    for step in range(NUM_UPDATES):
        trainer.step([samples[step % len(samples)]], remaining=1.0 - step / NUM_UPDATES)
    save_drafter(drafter, folder, drafter_dir, getattr(torch, PAIR.dtype))
    before, after = (expected_acceptance_length(one, samples).acceptance_length() for one in (parent, drafter))
    return after / before, folder


def stepped(running: TestEngine, before_step: Callable[[int], None], max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    """The answers again, or longer ones; `before_step` is called with each step's number."""
    from vllm import SamplingParams

    llm, done = running.llm.llm_engine, dict[str, list[int]]()
    for number, prompt in enumerate(PROMPTS):
        llm.add_request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    for step in range(1000):
        before_step(step)
        done |= {out.request_id: list(out.outputs[0].token_ids) for out in llm.step() if out.finished}
        if not llm.has_unfinished_requests():
            break
    return [done[str(number)] for number in range(len(PROMPTS))]


def share_from_the_start(running: TestEngine, version: Path, target: Path, expected: list[list[int]]) -> float:
    """Share of the drafts that are the version's where it serves from the requests' start."""
    assert swap(running, "version", version).ok
    seen = listen(running)
    found = stepped(running, lambda step: None, max_tokens=2 * MAX_TOKENS)
    assert [answer[:MAX_TOKENS] for answer in found] == expected
    return share_of_equal_drafts(load_drafter(version, target, num_draft_tokens=K), dict(seen))


def share_after_swap(running: TestEngine, before: Path, after: Path, target: Path, expected: list[list[int]]) -> float:
    """Share of the drafts after a swap amid requests, cache kept, that are those of the new version."""
    assert swap(running, "stock", before).ok
    seen, since = listen(running), dict[str, int]()

    def swap_once(step: int) -> None:
        if step == 4:
            since.update({name: max(one.drafts) + 1 for name, one in seen.items()})
            assert swap(running, "version", after).ok

    found = stepped(running, swap_once, max_tokens=2 * MAX_TOKENS)
    assert [answer[:MAX_TOKENS] for answer in found] == expected
    return share_of_equal_drafts(load_drafter(after, target, num_draft_tokens=K), dict(seen), since)


def share_after_idle_steps(running: TestEngine, drafter: Drafter, expected: list[list[int]]) -> float:
    """Share of equal drafts where some steps draft nothing: their rows have to be in the drafter's cache later."""
    seen, lengths = listen(running), (K, 0, 0, K, K)

    def set_length(step: int) -> None:
        set_policy(running, static_k=lengths[step % len(lengths)], generation=100 + step)

    found = stepped(running, set_length, max_tokens=2 * MAX_TOKENS)
    set_policy(running, capture_share=1.0, generation=2000)
    assert [answer[:MAX_TOKENS] for answer in found] == expected
    return share_of_equal_drafts(drafter, dict(seen))


def with_trees(target: Path, version: Path, expected: list[list[int]], folder: Path) -> dict[str, Any]:
    """Whether tokens are those without speculation, and accepted tokens a round; or why this engine verifies no trees."""
    options = {"dtype": "float32", "max_num_seqs": 4, **PAIR.options}
    with pytest.MonkeyPatch.context() as patch:
        if PAIR.dtype != "float32":
            compute_in_float32(patch)
            with engine(None, target, version, speculative_config=None, **options) as plain:
                expected, tokenizer = answers(plain), plain.llm.get_tokenizer()
            texts = [(tokenizer.encode(prompt), answer) for prompt, answer in zip(PROMPTS, expected, strict=True)]
            version = memorised(version, target, texts, transformers_model(target), folder.with_name("memorised"))
        patch.setenv("HONED_TREES", "1")
        if IS_V2:
            from honed.attach.trees.runner_v2 import prepare_workers

            prepare_workers()
        speculative = {"method": "dflash", "model": str(version), "num_speculative_tokens": SLOTS}
        with engine(folder, target, version, speculative_config=speculative, **options) as running:
            wait_until_trees_may_grow(running)
            hello = running.honed._hello()
            if "trees" not in hello.capabilities:
                return {"no_trees": hello.limits}
            set_policy(running, static_k=SLOTS, max_k=SLOTS)
            take_batches(running)
            found, rows = answers(running), rounds(take_batches(running))
            accepted = sum(row["accepted"] for row in rows) / len(rows)
            return {"trees": found == expected and running.honed.errors.count == 0, "tree_accepted": round(accepted, 2)}


def perturbed(drafter_dir: Path, target: Path, folder: Path) -> Path:
    """The drafter with its trained weights moved."""
    drafter = load_drafter(drafter_dir, target)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    save_drafter(drafter, folder, drafter_dir, torch.float32)
    return folder


def run(folder: Path) -> dict[str, Any]:
    target, drafter_dir = make(_asked.pair, folder)
    speculative: dict[str, Any] = {"method": PAIR.method, "num_speculative_tokens": K}
    speculative |= {} if PAIR.has_mtp else {"model": str(drafter_dir)}
    options = {"dtype": PAIR.dtype, "max_num_seqs": 4, "speculative_config": speculative, **PAIR.options}
    is_exact = PAIR.dtype == "float32"
    with engine(None, target, drafter_dir, **(options | ({"speculative_config": None} if is_exact else {}))) as plain:
        expected = answers(plain)
    with engine(folder / "run", target, drafter_dir, **options) as running:
        findings = running.honed._workers.findings
        assert "capture" in findings.capabilities, findings.untrained
        running.honed._recorder.is_logging_token_ids = True
        set_policy(running, capture_share=1.0)
        seen = listen(running, has_logits=HAS_LOGITS)
        before, found = running.counters(), answers(running)
        after = running.counters()
        logged = counted(rounds(take_batches(running)))
        result: dict[str, Any] = {
            "events": {name: after[name] - before[name] for name in after} == logged,
            "greedy": found == expected,
        }
        running.honed.before_schedule()
        wait_until_written(running)
        reader, assembler = RingReader(running.honed._settings.ring_path), SessionAssembler()
        stretches = [one for record in reader.poll(1 << 16).records for one in assembler.add(record)]
        samples = [one.to_training_sample(is_fused=False) for one in (*stretches, *assembler.finish())]
        assert len(samples) == NUM_PROMPTS, f"{len(samples)} requests were captured"
        drafter = load_drafter(drafter_dir, target, num_draft_tokens=K)
        error, rounding = errors_of_capture(
            as_transformers_reads(target, folder / "read"), drafter.config.target_layer_ids, samples
        )
        result["capture_error"] = round(error, 6)
        result["capture"] = result["capture_error"] <= max(TOLERANCE, 2.0 * rounding)
        result["equal_drafts"] = round(share_of_equal_drafts(drafter, dict(seen)), 4)
        result["drafts"] = result["equal_drafts"] >= LEAST_SHARE[PAIR.dtype]

        if HAS_LOGITS:
            assert isinstance(drafter, UnrolledDrafter)
            result["logits_apart"] = float(f"{difference_of_logits(drafter, dict(seen)):.2g}")
            result["logits"] = result["logits_apart"] < LOGITS_TOLERANCE
        result["idle_share"] = round(share_after_idle_steps(running, drafter, expected), 4)
        result["idle"] = result["idle_share"] >= LEAST_SHARE[PAIR.dtype]

        def serves(version: str, files: Path) -> bool:
            done = swap(running, version, files)
            assert done.ok, done.error
            is_whole = running.checksum() in weights_digests(files / "model.safetensors")
            return is_whole and answers(running) == expected

        stock = running.checksum()
        other = perturbed(drafter_dir, target, folder / "other")
        result["swap"] = serves("other", other) and serves("stock", drafter_dir) and running.checksum() == stock
        gain, version = trained(target, drafter_dir, samples, folder / "version")
        result["gain"] = round(gain, 3)
        before = running.counters()
        is_served = serves("version", version)
        after = running.counters()
        result["accepted"] = after["num_accepted_tokens"] - before["num_accepted_tokens"]
        result["fresh_share"] = round(share_from_the_start(running, version, target, expected), 4)
        result["kept_share"] = round(share_after_swap(running, drafter_dir, version, target, expected), 4)
        least = LEAST_SHARE[PAIR.dtype] if is_exact else result["fresh_share"] - SHARE_NOISE
        is_fresh = result["fresh_share"] >= LEAST_SHARE[PAIR.dtype] - (0.0 if is_exact else SHARE_NOISE)
        result["kept"] = is_fresh and result["kept_share"] >= least
        is_back = serves("stock", drafter_dir) and running.checksum() == stock
        result["trained"] = gain > 1.0 and is_served and is_back and running.honed.errors.count == 0
    if PAIR.method == "dflash" and (is_exact or not IS_CUDA):
        result |= with_trees(target, version, expected, folder / "trees")
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="honed-zoo-", ignore_cleanup_errors=True) as made:
        print(json.dumps(run(Path(made))), flush=True)
    os._exit(0)  # vLLM's threads may hold the process up
