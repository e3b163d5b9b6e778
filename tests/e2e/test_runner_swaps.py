"""What the attachment promises of swaps on a real engine, the same for every runner and scheduler (see engine.py)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from honed.adapt.protocol import wire
from honed.recalib.config.engine_gpus import engine_gpus
from honed.recalib.registry.weights_digest import weights_digests
from tests.e2e.engine import ARE_DRAFTS_KNOWN, DRAFTER, IS_SLOW, TestEngine, engine, held_out
from tests.e2e.logged import check_tokens, counted, keys_of, rounds, set_policy, take_batches
from tests.e2e.swapping import Drafts, perturbed_drafter, renamed_drafter, swap, worker_of

pytestmark = [pytest.mark.e2e, pytest.mark.runners]
MAX_TOKENS = 16 if IS_SLOW else 48
PROMPTS = held_out(2, 60) if IS_SLOW else held_out(6, 300)


def test_an_engine_tells_what_it_will_still_want_of_its_gpus(attached: TestEngine) -> None:
    """A CPU build has none. Where there is one, the peak of vLLM's activations is in it."""
    attached.honed.before_schedule()
    (found,) = engine_gpus(attached.honed._settings.busy_path.parent.parent)
    assert found.is_alive
    assert found.reserves is not None
    assert [reserve >= 1 << 30 for reserve in found.reserves.values()] == [True] * torch.cuda.is_available()


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
    attached.honed.before_schedule()
    before = attached.checksum()
    result = swap(attached, f"bad-{damage}", folder, sha256)
    assert not result.ok
    assert "\n" not in result.error
    assert len(result.error) > 20
    assert attached.checksum() == before


def test_a_copy_that_fails_half_way_leaves_no_known_version(
    attached: TestEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine told that it ran the version of before, so nobody restored one."""
    assert swap(attached, "stock", DRAFTER).ok
    before = attached.checksum()
    swapper = worker_of(attached)._honed_side.swapper

    def fails(inner: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(swapper, "_refresh_fused", fails)
    failed = swap(attached, "other", perturbed_drafter(tmp_path / "other"))
    assert (failed.ok, "out of memory" in failed.error) == (False, True)
    assert attached.honed._status(0).drafter_version == wire.LOST_DRAFTER
    monkeypatch.undo()
    assert swap(attached, "stock", DRAFTER).ok
    assert attached.honed._status(0).drafter_version == "stock"
    assert attached.checksum() == before


@pytest.mark.parametrize("fails", [False, True])
def test_a_kv_connector_gives_back_no_context_of_the_old_weights(
    attached: TestEngine, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    scheduler, calls = attached.scheduler, list[str]()
    reset = scheduler.reset_prefix_cache

    def reset_prefix_cache(**arguments: bool) -> bool:
        calls.append("prefix")
        if fails:
            raise RuntimeError("a request waits for a remote KV transfer")
        return bool(reset(**arguments))

    monkeypatch.setattr(scheduler, "reset_prefix_cache", reset_prefix_cache)
    monkeypatch.setattr(scheduler, "reset_connector_cache", lambda: calls.append("connector"))
    assert swap(attached, "stock", DRAFTER).ok
    assert calls == []
    assert swap(attached, "stock", DRAFTER, drops_cache=True).ok
    assert calls == ["prefix", "connector"]


def test_an_engine_without_requests_that_steps_along_takes_a_swap(attached: TestEngine, tmp_path: Path) -> None:
    """As a replica does whose experts another one needs: it is never idle, and has nothing to schedule."""
    attached.honed.before_schedule()
    before, asked = attached.checksum(), attached.core.step_fn
    assert swap(attached, "other", perturbed_drafter(tmp_path / "other"), step=asked).ok
    assert attached.checksum() != before
    assert swap(attached, "stock", DRAFTER, step=asked).ok
    assert attached.checksum() == before


def answers_of(running: TestEngine) -> list[list[int]]:
    return running.generate(PROMPTS, temperature=0.0, max_tokens=MAX_TOKENS)


def test_versions_that_take_turns_are_held_and_exact(attached: TestEngine, tmp_path: Path) -> None:
    folders = {"stock": DRAFTER, "other": perturbed_drafter(tmp_path / "other")}
    plain = answers_of(attached)
    sums: dict[str, str] = {}
    for number, version in enumerate(("other", "stock", "other", "stock")):
        beside = "stock" if version == "other" else "other"
        weights = wire.DrafterWeights(version=beside, path=str(folders[beside]))
        turns = wire.Turns(beside=weights, home_version="stock", lease_s=600.0)
        result = swap(attached, version, folders[version], drops_cache=True, turns=turns)
        assert result.ok, result.error
        assert (result.figures["stage_ms"] > 0) == (number == 0)  # read once, both of them
        assert attached.checksum() == sums.setdefault(version, attached.checksum())
        assert answers_of(attached) == plain
    assert sums["stock"] != sums["other"]
    swapper = worker_of(attached)._honed_side.swapper
    assert set(swapper._held) == {"stock", "other"}
    assert swap(attached, "stock", DRAFTER).ok
    assert not swapper._held  # the last swap lets go of the memory
    assert attached.checksum() == sums["stock"]


@pytest.mark.parametrize("drops_cache", [False, True])
def test_a_swap_while_requests_stream_changes_no_token(attached: TestEngine, tmp_path: Path, drops_cache: bool) -> None:
    """Back and forth under running requests: tokens, counts, and in the log each round with the version that drafted it.

    `drops_cache` preempts every running request: when vLLM schedules ahead, the step under way comes back to nobody.
    """
    from vllm import SamplingParams

    other = perturbed_drafter(tmp_path / "other")
    set_policy(attached)
    assert swap(attached, "stock", DRAFTER).ok
    plain, llm = answers_of(attached), attached.llm.llm_engine
    take_batches(attached)
    before, done = attached.counters(), {}
    with Drafts(attached, "stock") as drafts:
        for number, prompt in enumerate(PROMPTS):
            llm.add_request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
        keys = keys_of(attached)
        for step in range(1000):
            if step in (1, 4):  # the first while the prompts are under way, when vLLM schedules ahead
                assert llm.has_unfinished_requests(), "too late: this test shows nothing"
                turn = {"drops_cache": drops_cache}
                assert swap(attached, *(("other", other) if step == 1 else ("stock", DRAFTER)), **turn).ok
            done |= {out.request_id: list(out.outputs[0].token_ids) for out in llm.step() if out.finished}
            if not llm.has_unfinished_requests():
                break
    assert [done[str(number)] for number in range(len(PROMPTS))] == plain
    rows, after = rounds(take_batches(attached)), attached.counters()
    assert {name: after[name] - before[name] for name in after} == counted(rows)
    tokenizer = attached.llm.get_tokenizer()
    texts = [tokenizer(prompt).input_ids + completion for prompt, completion in zip(PROMPTS, plain, strict=True)]
    check_tokens(rows, dict(zip(keys, texts, strict=True)))
    by_version = {v: [r["draft"] for r in rows if r["version"] == v and r["k"]] for v in ("stock", "other")}
    assert all(by_version.values()), "a version verified nothing: this test shows nothing"
    if ARE_DRAFTS_KNOWN:
        for version, logged in by_version.items():
            made = drafts.of(version)
            assert all(any(block[: len(draft)] == draft for block in made) for draft in logged), f"not drafted by {version}"
        assert any(draft not in [b[: len(draft)] for b in drafts.of("stock")] for draft in by_version["other"])
    assert attached.honed.errors.count == 0


def drafts_of(running: TestEngine) -> list[list[int]]:
    """Every block that is drafted for two prompts, as `propose` gives it, in an order that doesn't depend on batching."""
    set_policy(running)
    with Drafts(running) as drafts:
        running.generate(PROMPTS[:2], temperature=0.0, max_tokens=MAX_TOKENS)
    assert len(drafts.seen) > 4
    return sorted(drafts.of(""))


def target_parameters(running: TestEngine) -> list[tuple[str, torch.Tensor]]:
    return list(worker_of(running).model_runner.get_model().named_parameters())


def test_swapped_weights_draft_as_a_fresh_load_does(attached: TestEngine, tmp_path: Path) -> None:
    other = perturbed_drafter(tmp_path / "other")
    plain = answers_of(attached)
    stock_sum, stock_drafts = attached.checksum(), drafts_of(attached)
    target_weights = [p for n, p in target_parameters(attached) if "embed_tokens" in n or "lm_head" in n]
    addresses, sums = [p.data_ptr() for p in target_weights], [float(p.double().sum()) for p in target_weights]

    result = swap(attached, "other", other)
    assert result.ok, result.error
    assert result.figures["pause_ms"] > 0
    swapped_sum, swapped_drafts = attached.checksum(), drafts_of(attached)
    assert swapped_sum != stock_sum
    assert swapped_drafts != stock_drafts
    assert answers_of(attached) == plain, "a swap changed the output"
    assert [p.data_ptr() for p in target_weights] == addresses
    assert [float(p.double().sum()) for p in target_weights] == sums

    assert swap(attached, "stock", DRAFTER).ok
    assert attached.checksum() == stock_sum
    assert drafts_of(attached) == stock_drafts

    renamed = renamed_drafter(other, tmp_path / "renamed")
    result = swap(attached, "renamed", renamed)
    assert result.ok, result.error
    assert attached.checksum() == swapped_sum
    assert swapped_sum in weights_digests(renamed / "model.safetensors"), "it can be verified"

    # Last: when an engine ends it takes vLLM's process groups with it, and the other one can't load weights any more.
    with engine(tmp_path / "fresh-run", drafter=renamed, max_num_seqs=4 if IS_SLOW else 8) as fresh:
        fresh.honed.before_schedule()
        assert fresh.checksum() == swapped_sum
        assert drafts_of(fresh) == swapped_drafts
