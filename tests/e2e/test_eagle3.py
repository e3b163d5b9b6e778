"""An EAGLE-3 drafter on a real engine: lengths, capture of fused rows, training, and a swap that keeps the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.make_pairs.kinds import eagle3_json, fresh_eagle3, write_eagle3
from honed.adapt.models.drafter_tensor_names import makes_context
from honed.recalib.drafter.checkpoint import load_drafter, save_drafter
from honed.recalib.drafter.unrolled import UnrolledDrafter
from honed.recalib.samples.ring_reader import RingReader
from honed.recalib.samples.sample import TrainingSample
from honed.recalib.samples.sessions import SessionAssembler
from honed.recalib.training.micro_step import MicroTrainer, Scope, TrainingSettings
from tests.e2e.drafting import LOGITS_TOLERANCE, Seen, difference_of_logits, listen, share_of_equal_drafts
from tests.e2e.engine import IS_SLOW, TARGET, K, TestEngine, engine, held_out
from tests.e2e.logged import counted, rounds, set_policy, take_batches
from tests.e2e.swapping import swap, wait_until_written

pytestmark = pytest.mark.e2e
PROMPTS, MAX_TOKENS = (held_out(2, 60), 12) if IS_SLOW else (held_out(6, 300), 48)


@pytest.fixture(scope="module")
def drafter_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, under the names that are published."""
    folder = tmp_path_factory.mktemp("eagle3") / "drafter"
    raw = eagle3_json(TARGET, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    torch.manual_seed(0)
    write_eagle3(fresh_eagle3(TARGET, raw), folder, raw, torch.float32)
    return folder


@pytest.fixture(scope="module")
def plain_answers() -> list[list[int]]:
    """The answers without speculation."""
    with engine(None, speculative_config=None) as plain:
        return answers(plain)


@pytest.fixture(scope="module")
def running(
    plain_answers: list[list[int]], drafter_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestEngine]:
    """The engine; begun last, since vLLM keeps one set of counters a process."""
    speculative = {"method": "eagle3", "model": str(drafter_dir), "num_speculative_tokens": K}
    with engine(tmp_path_factory.mktemp("run"), drafter=drafter_dir, speculative_config=speculative) as started:
        started.honed._recorder.is_logging_token_ids = True
        set_policy(started)  # attaches to the worker
        yield started


def answers(running: TestEngine) -> list[list[int]]:
    return running.generate(PROMPTS, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def captured(running: TestEngine, plain_answers: list[list[int]]) -> tuple[dict[str, Seen], list[TrainingSample]]:
    """All that the drafter was given, and the samples that honed took of it."""
    assert running.honed._workers.findings.capabilities == ("events", "draft_length", "capture", "swap")
    set_policy(running, capture_share=1.0)
    seen, stock = listen(running, has_logits=True), running.honed
    assert answers(running) == plain_answers
    stock.before_schedule()
    wait_until_written(running)
    reader, assembler = RingReader(stock._settings.ring_path), SessionAssembler()
    stretches = [one for record in reader.poll(1 << 16).records for one in assembler.add(record)]
    set_policy(running)
    return dict(seen), [one.to_training_sample(is_fused=True) for one in (*stretches, *assembler.finish())]


@torch.no_grad()
def test_captured_rows_are_fused_ones_of_whole_requests(
    captured: tuple[dict[str, Seen], list[TrainingSample]], drafter_dir: Path
) -> None:
    seen, samples = captured
    assert len(samples) == len(PROMPTS)
    drafter = load_drafter(drafter_dir, TARGET)
    by_tokens = {tuple(one.token_ids[position] for position in sorted(one.token_ids)): one for one in seen.values()}
    for sample in samples:
        rows = by_tokens[tuple(sample.token_ids.tolist())]
        wanted = drafter.fuse(torch.stack([rows.aux[int(position)] for position in sample.positions]))
        torch.testing.assert_close(sample.features, wanted, rtol=1e-3, atol=1e-4)


def test_the_logits_of_every_step_are_those_of_vllm(
    captured: tuple[dict[str, Seen], list[TrainingSample]], drafter_dir: Path
) -> None:
    drafter = load_drafter(drafter_dir, TARGET, num_draft_tokens=K)
    assert isinstance(drafter, UnrolledDrafter)
    assert difference_of_logits(drafter, captured[0]) < LOGITS_TOLERANCE


def trained(drafter_dir: Path, samples: list[TrainingSample], scope: Scope, folder: Path) -> Path:
    """A version that learned these samples."""
    drafter = load_drafter(drafter_dir, TARGET, num_draft_tokens=K)
    settings = TrainingSettings(scope=scope, learning_rate=2e-3, micro_steps_per_update=1, anchors_per_micro_step=48)
    trainer = MicroTrainer(drafter, settings)
    for step in range(150):
        trainer.step([samples[step % len(samples)]], remaining=1.0 - step / 150)
    save_drafter(drafter, folder, drafter_dir, torch.float32)
    return folder


def layers_of(captured: tuple[dict[str, Seen], list[TrainingSample]]) -> list[TrainingSample]:
    """The same requests with unfused rows, as an engine with HONED_FEATURES=layers captures them."""
    return [
        TrainingSample(
            features=torch.stack([one.aux[position] for position in sorted(one.aux)]),
            token_ids=torch.tensor([one.token_ids[position] for position in sorted(one.aux)]),
            positions=torch.tensor(sorted(one.aux)),
            session=name,
            workload="w",
            is_fused=False,
        )
        for name, one in captured[0].items()
    ]


@pytest.mark.parametrize("scope", ["kv-frozen", "full"])
def test_a_swap_amid_requests_drafts_as_if_the_new_weights_had_always_been_there(
    running: TestEngine,
    captured: tuple[dict[str, Seen], list[TrainingSample]],
    plain_answers: list[list[int]],
    drafter_dir: Path,
    tmp_path: Path,
    scope: Scope,
) -> None:
    """With the cache kept: the frozen path leaves every cached row right. Weights that change it, as a control, don't."""
    from vllm import SamplingParams

    samples = captured[1] if scope == "kv-frozen" else layers_of(captured)
    version = trained(drafter_dir, samples, scope, tmp_path / scope)
    old, new = load_file(drafter_dir / "model.safetensors"), load_file(version / "model.safetensors")
    moved = {name for name in old if not torch.equal(old[name], new[name])}
    assert any(makes_context(name, "eagle3") for name in moved) == (scope == "full")
    llm, seen, done = running.llm.llm_engine, listen(running), {}
    take_batches(running)
    before, since = running.counters(), dict[str, int]()
    for number, prompt in enumerate(PROMPTS):
        llm.add_request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True))
    for step in range(1000):
        if step == 12:
            since = {name: max(one.drafts) + 1 for name, one in seen.items()}
            assert swap(running, scope, version).ok
        done |= {out.request_id: list(out.outputs[0].token_ids) for out in llm.step() if out.finished}
        if not llm.has_unfinished_requests():
            break
    assert [done[str(number)] for number in range(len(PROMPTS))] == plain_answers
    after = running.counters()
    assert {name: after[name] - before[name] for name in after} == counted(rounds(take_batches(running)))
    assert after["num_accepted_tokens"] - before["num_accepted_tokens"] > 30, "it was trained on these very requests"
    share = share_of_equal_drafts(load_drafter(version, TARGET, num_draft_tokens=K), dict(seen), since)
    assert (share > 0.99) == (scope == "kv-frozen"), f"{share:.3f} of the drafts are the new version's"
    assert swap(running, "stock", drafter_dir, drops_cache=True).ok
    assert running.honed.errors.count == 0


def test_lengths_are_kept_and_steps_without_drafts_leave_later_ones_right(
    running: TestEngine, plain_answers: list[list[int]], drafter_dir: Path
) -> None:
    """Each length costs its own passes of the drafter; 0 costs the one that fills its cache."""
    from vllm import SamplingParams

    llm, seen, done = running.llm.llm_engine, listen(running), {}
    take_batches(running)
    before, lengths = running.counters(), (K, 0, 0, 2, 0, K, 5, 0, 0, 0, K, K)
    for number, prompt in enumerate(PROMPTS):
        llm.add_request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True))
    for step in range(1000):
        set_policy(running, static_k=lengths[step % len(lengths)], generation=100 + step)
        done |= {out.request_id: list(out.outputs[0].token_ids) for out in llm.step() if out.finished}
        if not llm.has_unfinished_requests():
            break
    set_policy(running)
    assert [done[str(number)] for number in range(len(PROMPTS))] == plain_answers
    rows, after = rounds(take_batches(running)), running.counters()
    assert {name: after[name] - before[name] for name in after} == counted(rows)
    assert {0, 2, 5, K} <= {row["k"] for row in rows}
    assert share_of_equal_drafts(load_drafter(drafter_dir, TARGET, num_draft_tokens=K), dict(seen)) > 0.99
    assert running.honed.errors.count == 0
