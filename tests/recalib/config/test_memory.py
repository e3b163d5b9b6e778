"""The estimate of a training's memory against what it takes, and the refusal with its cure."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from honed.recalib.config.drafter import Convolution, Eagle3, Experts, Markov, Mtp, Selector
from honed.recalib.config.memory import (
    GIB,
    MemoryBudgetError,
    check_fits,
    count_parameters,
    estimate,
    estimate_and_cures,
    state_bytes,
    usable_bytes,
    version_bytes,
)
from honed.recalib.drafter.checkpoint import kind_of, load_drafter, load_target_head, save_drafter
from honed.recalib.drafter.dflash import DrafterConfig
from honed.recalib.drafter.drafter import Drafter, Vocabulary
from honed.recalib.drafter.mtp import MtpDrafter
from honed.recalib.registry.vocabulary import vocabulary_tensors
from honed.recalib.samples.sample import TrainingSample
from honed.recalib.training.micro_step import MicroTrainer, TrainingSettings

CONFIG = DrafterConfig(
    vocab_size=2000,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    block_size=8,
    mask_token_id=1,
    target_layer_ids=(1, 2, 3),
    target_hidden_size=128,
)
EAGLE3 = replace(
    CONFIG,
    num_hidden_layers=1,
    block_size=6,
    eagle3=Eagle3(
        norm_before_residual=False,
        norm_before_fc=False,
        norms_features=False,
        feeds_normed=False,
        has_head_norms=False,
        num_features=3,
    ),
)
MTP = replace(CONFIG, num_hidden_layers=1, block_size=4, target_layer_ids=(), mtp=Mtp(has_gate=True))
WITH_EXPERTS = replace(MTP, mtp=Mtp(has_gate=True, experts=Experts(count=8, top_k=2, intermediate_size=64, renormalizes=True)))
MIMO = replace(MTP, attention_bias=True, mtp=Mtp(has_gate=False, is_mimo=True))
DFLASH2 = replace(CONFIG, convolution=Convolution(2, 16), selector=Selector(8, 4))
DSPARK = replace(CONFIG, markov=Markov(rank=8, drafts_from_anchor=True))
SETTINGS = TrainingSettings(anchors_per_micro_step=32, micro_steps_per_update=1)
ROWS = 600


def make_drafter(config: DrafterConfig) -> Drafter:
    torch.manual_seed(0)
    embed = torch.randn(config.vocab_size, config.hidden_size)
    drafter = kind_of(config)(config, Vocabulary(embed, embed))
    if config.mtp and config.mtp.experts:
        count, width = config.mtp.experts.count, config.mtp.experts.intermediate_size
        assert isinstance(drafter, MtpDrafter)
        drafter.take_experts(torch.randn(count, 2 * width, config.hidden_size), torch.randn(count, config.hidden_size, width))
    return drafter


def measured_bytes(settings: TrainingSettings, is_fused: bool, is_kept: bool, config: DrafterConfig = CONFIG) -> int:
    """`bytes_of` a drafter of this shape and its parent, whose head is the embedding."""
    drafter, parent = make_drafter(config), make_drafter(config)
    parent.embed_tokens = parent.lm_head = drafter.lm_head = drafter.embed_tokens
    if config == WITH_EXPERTS:
        parent.take_experts(*(buffer for name, buffer in drafter.named_buffers() if ".mlp." in name))
    return bytes_of(drafter, parent, settings, is_fused, is_kept)


def bytes_of(
    drafter: Drafter,
    parent: Drafter,
    settings: TrainingSettings,
    is_fused: bool,
    is_kept: bool,
    beside: Sequence[torch.Tensor] = (),
) -> int:
    """Most bytes of tensors that were alive at once in the second update: by then the optimizer has its moments.

    What stays (weights, moments) is counted by its tensors, what comes and goes by the allocator's own record.
    """
    config = drafter.config
    width = config.hidden_size if is_fused else config.feature_size
    generator = torch.Generator().manual_seed(0)
    sample = TrainingSample(
        features=torch.randn(ROWS, width, generator=generator),
        token_ids=torch.randint(2, CONFIG.vocab_size, (ROWS,), generator=generator),
        positions=torch.arange(ROWS),
        session="s",
        workload="w",
        is_fused=is_fused,
    )
    trainer = MicroTrainer(drafter, settings, parent)
    trainer.step([sample], kept=[is_kept])
    gc.collect()
    kept = {p.data_ptr(): p.nbytes for d in (drafter, parent) for p in (*d.parameters(), *d.buffers())}
    kept |= {tensor.data_ptr(): tensor.nbytes for tensor in beside}
    kept |= {t.data_ptr(): t.nbytes for t in trainer.state().values()}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        trainer.step([sample], kept=[is_kept])
    alive = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return sum(kept.values()) + peak


@pytest.mark.parametrize("is_kept", [False, True], ids=["fresh", "kept"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"gradient_checkpointing": True},
        {"scope": "full"},
        {"scope": "full", "gradient_checkpointing": True},
        {"anchors_per_micro_step": 8},
    ],
    ids=str,
)
def test_the_estimate_is_not_too_low_and_not_idle_talk(change: dict[str, object], is_kept: bool) -> None:
    settings = replace(SETTINGS, **change)  # type: ignore[arg-type]
    is_fused = settings.scope != "full"
    needed = estimate(CONFIG, settings, ROWS, is_fused=is_fused, is_head_tied=True).total_bytes
    measured = measured_bytes(settings, is_fused, is_kept)
    assert measured <= needed
    assert needed < 1.8 * measured


@pytest.mark.parametrize(("is_kept", "most"), [(False, 2.2), (True, 1.8)], ids=["fresh", "kept"])
@pytest.mark.parametrize(
    "change",
    [{}, {"gradient_checkpointing": True}, {"scope": "full"}, {"anchors_per_micro_step": 8}],
    ids=str,
)
@pytest.mark.parametrize("config", [EAGLE3, MTP, WITH_EXPERTS, MIMO], ids=["eagle3", "mtp", "mtp, experts", "mtp, mimo"])
def test_the_estimate_of_a_drafter_that_drafts_one_by_one(
    config: DrafterConfig, change: dict[str, object], is_kept: bool, most: float
) -> None:
    """A kept block's loss, which needs the parent's distribution, takes the most, and is what is counted."""
    settings = replace(SETTINGS, **change)  # type: ignore[arg-type]
    is_fused = settings.scope != "full"
    needed = estimate(config, settings, ROWS, is_fused=is_fused, is_head_tied=True).total_bytes
    assert measured_bytes(settings, is_fused, is_kept, config) <= needed
    assert needed < most * measured_bytes(settings, is_fused, is_kept, config)


@pytest.mark.parametrize("is_kept", [False, True], ids=["fresh", "kept"])
@pytest.mark.parametrize("config", [DFLASH2, DSPARK], ids=["dflash2", "dspark"])
def test_the_estimate_of_a_drafter_that_scores_pairs(config: DrafterConfig, is_kept: bool) -> None:
    needed = estimate(config, SETTINGS, ROWS, is_head_tied=True).total_bytes
    measured = measured_bytes(SETTINGS, True, is_kept, config)
    assert measured <= needed < 1.8 * measured


def save_pair(folder: Path, is_tied: bool, own: dict[str, str]) -> tuple[Path, Path]:
    """Checkpoints of a target and of a drafter with these tensors of its own: "copy" of the target's, or "other"."""
    target, made = folder / "target", folder / "drafter"
    for path in (target, made):
        path.mkdir()
    size = CONFIG.vocab_size, CONFIG.hidden_size
    about = {"vocab_size": size[0], "hidden_size": size[1], "num_hidden_layers": 5, "tie_word_embeddings": is_tied}
    (target / "config.json").write_text(json.dumps(about))
    theirs = {"model.embed_tokens.weight": torch.randn(size), "model.norm.weight": torch.ones(size[1])}
    theirs |= {} if is_tied else {"lm_head.weight": torch.randn(size)}
    save_file(theirs, target / "model.safetensors")
    drafter = make_drafter(CONFIG)
    raw = {name: value for name, value in asdict(CONFIG).items() if isinstance(value, int)} | {"model_type": "qwen3"}
    dflash = {"mask_token_id": CONFIG.mask_token_id, "target_layer_ids": CONFIG.target_layer_ids}
    (made / "config.json").write_text(json.dumps(raw | {"dflash_config": dflash}))
    weights = save_drafter(drafter, made, made, torch.float32)
    of_target = {"embed_tokens.weight": theirs["model.embed_tokens.weight"]}
    of_target["lm_head.weight"] = theirs.get("lm_head.weight", of_target["embed_tokens.weight"])
    brought = {name: of_target[name] if kind == "copy" else torch.randn(size) for name, kind in own.items()}
    save_file(load_file(weights) | {name: tensor.clone() for name, tensor in brought.items()}, weights)
    return made, target


@pytest.mark.parametrize("is_tied", [False, True], ids=["head", "tied head"])
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"lm_head.weight": "other"},
        {"embed_tokens.weight": "other", "lm_head.weight": "other"},
        {"embed_tokens.weight": "copy", "lm_head.weight": "copy"},
    ],
    ids=["none", "own head", "own embedding and head", "copies"],
)
def test_embeddings_and_heads_are_counted_as_they_are_held(tmp_path: Path, own: dict[str, str], is_tied: bool) -> None:
    """The target's once, a tied pair as one tensor; the drafter's own for the drafter and for its parent."""
    made, target = save_pair(tmp_path, is_tied, own)
    head = load_target_head(target)
    drafter, parent = (load_drafter(made, target, head) for _ in range(2))
    needed = estimate(drafter.config, SETTINGS, ROWS, **vocabulary_tensors(made, target)._asdict())
    shared = [head.embed_tokens, head.lm_head]
    held = {t.data_ptr(): t.nbytes for t in (*shared, *(t for d in (drafter, parent) for t in (d.embed_tokens, d.lm_head)))}
    assert needed.parts["target"] == sum(held.values())
    measured = bytes_of(drafter, parent, SETTINGS, True, True, shared)
    assert measured <= needed.total_bytes < 1.8 * measured


def test_a_head_that_is_no_copy_only_in_places_is_the_drafters_own(tmp_path: Path) -> None:
    made, target = save_pair(tmp_path, True, {"lm_head.weight": "copy"})
    assert vocabulary_tensors(made, target) == (True, 0)
    tensors = load_file(made / "model.safetensors")
    tensors["lm_head.weight"][::3] += 1.0
    save_file(tensors, made / "model.safetensors")
    assert vocabulary_tensors(made, target) == (True, CONFIG.vocab_size * CONFIG.hidden_size)
    (target / "model.safetensors").unlink()
    assert vocabulary_tensors(made, target) == (False, None), "unknown"


def test_a_reduced_vocabularys_head_is_counted_without_its_files() -> None:
    words, width = 500, CONFIG.hidden_size
    config = replace(CONFIG, draft_vocab_size=words)
    unknown = estimate(config, SETTINGS, ROWS).parts["target"]
    assert unknown == estimate(config, SETTINGS, ROWS, own_values=words * width).parts["target"]
    assert unknown == 4 * width * (2 * CONFIG.vocab_size + 3 * words)


def test_parameters_are_counted_exactly() -> None:
    eagle3 = EAGLE3.eagle3
    assert eagle3 is not None
    whole = replace(eagle3, norm_before_fc=True, norms_features=True)
    kinds = (
        *(CONFIG, replace(CONFIG, attention_bias=True), DFLASH2, DSPARK),
        *(replace(EAGLE3, eagle3=one) for one in (eagle3, whole)),
        *(WITH_EXPERTS, MIMO),
        *(replace(MTP, attention_bias=has, mtp=Mtp(has_gate=has)) for has in (False, True)),
        *(replace(EAGLE3, attention_bias=True, eagle3=replace(eagle3, has_head_norms=has)) for has in (False, True)),
    )
    for config in kinds:
        drafter = make_drafter(config)
        for scope in ("kv-frozen", "full"):
            settings = replace(SETTINGS, scope=scope)  # type: ignore[arg-type]
            MicroTrainer(drafter, settings)
            trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
            frozen = sum(p.numel() for p in drafter.parameters()) - trained
            assert count_parameters(config, settings) == (frozen, trained)


@pytest.mark.parametrize("scope", ["kv-frozen", "full"])
def test_the_saved_state_and_a_version_are_as_large_as_said(scope: str) -> None:
    settings = replace(SETTINGS, scope=scope)  # type: ignore[arg-type]
    drafter = make_drafter(CONFIG)
    trainer = MicroTrainer(drafter, settings)
    generator = torch.Generator().manual_seed(0)
    sample = TrainingSample(
        features=torch.randn(ROWS, CONFIG.feature_size, generator=generator),
        token_ids=torch.randint(2, CONFIG.vocab_size, (ROWS,), generator=generator),
        positions=torch.arange(ROWS),
        session="s",
        workload="w",
        is_fused=False,
    )
    trainer.step([sample])
    written = sum(tensor.nbytes for tensor in trainer.state().values())
    assert 0 <= written - state_bytes(CONFIG, settings) < 10_000, "beside these: counts and a generator"
    assert version_bytes(CONFIG, settings) == 2 * sum(p.numel() for p in drafter.parameters())


def test_checkpointing_and_bfloat16_take_less() -> None:
    needed = estimate(CONFIG, SETTINGS, ROWS).total_bytes
    assert estimate(CONFIG, replace(SETTINGS, gradient_checkpointing=True), ROWS).total_bytes < needed
    assert estimate(CONFIG, SETTINGS, ROWS, compute_bytes=2, shared_bytes=2).total_bytes < needed


def test_what_does_not_fit_is_refused_with_cause_and_cure() -> None:
    needed, cures = estimate_and_cures(CONFIG, SETTINGS, ROWS)
    check_fits(needed, needed.total_bytes, "cpu", cures)
    with pytest.raises(MemoryBudgetError, match=r"needs \d+ MiB \(weights .* cpu has \d+ MiB .*gradient_checkpointing = true"):
        check_fits(needed, needed.total_bytes - 1, "cpu", cures)
    smaller = cures[2][1].total_bytes
    with pytest.raises(MemoryBudgetError, match=r"anchors_per_micro_step = 8, trainer\.micro_steps_per_update = 4"):
        check_fits(needed, smaller, "cpu", cures)
    with pytest.raises(MemoryBudgetError, match="a device with more memory"):
        check_fits(needed, 1 << 20, "cpu", cures)


def test_nine_tenths_are_usable_but_for_what_engines_will_still_want() -> None:
    assert usable_bytes(100 * GIB) == 90 * GIB
    assert usable_bytes(100 * GIB, reserve=10 * GIB) == 90 * GIB
    assert usable_bytes(100 * GIB, reserve=30 * GIB) == 70 * GIB
    assert usable_bytes(100 * GIB, limit_bytes=50 * GIB, reserve=30 * GIB) == 50 * GIB
    assert usable_bytes(100 * GIB, limit_bytes=50 * GIB, reserve=200 * GIB) == 0
