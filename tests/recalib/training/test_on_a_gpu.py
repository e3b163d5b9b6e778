"""Every kind of drafter trained and judged on a CUDA device, beside the same on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from honed.recalib.config.drafter import DrafterConfig
from honed.recalib.drafter.dflash import DFlashDrafter
from honed.recalib.drafter.drafter import Drafter, Vocabulary
from honed.recalib.drafter.eagle3 import Eagle3Drafter
from honed.recalib.drafter.mimo import MimoDrafter
from honed.recalib.drafter.mtp import MtpDrafter
from honed.recalib.gate.evaluate import expected_acceptance_length
from honed.recalib.samples.sample import TrainingSample
from honed.recalib.training.micro_step import MicroTrainer, TrainingSettings

DEVICES = [
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    )
]
WIDTH, WORDS, REDUCED = 64, 300, 120
SHAPE: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
}
DFLASH = SHAPE | {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_target_layers": 3,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2]},
}
EAGLE3 = SHAPE | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "eagle_aux_hidden_state_layer_ids": [1, 2],
    "num_speculative_tokens": 5,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40, "use_sliding_window": True}
CONVOLUTION = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": 5}
EXPERTS = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
KINDS: dict[str, tuple[type[Drafter], dict[str, Any]]] = {
    "dflash": (DFlashDrafter, DFLASH),
    "dflash, causal": (DFlashDrafter, DFLASH | {"dflash_config": DFLASH["dflash_config"] | {"causal": True}}),
    "dflash, windows": (DFlashDrafter, DFLASH | SLIDING),
    "dflash, reduced vocabulary": (DFlashDrafter, DFLASH | {"draft_vocab_size": REDUCED}),
    "dflash2": (
        DFlashDrafter,
        DFLASH | {"architectures": ["DFlash2DraftModel"], "dflash_config": DFLASH["dflash_config"] | CONVOLUTION},
    ),
    "dspark": (DFlashDrafter, DFLASH | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 4}),
    "eagle3": (Eagle3Drafter, EAGLE3),
    "eagle3, reduced vocabulary": (Eagle3Drafter, EAGLE3 | {"draft_vocab_size": REDUCED}),
    "mtp": (
        MtpDrafter,
        SHAPE
        | {
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "mtp_num_hidden_layers": 1,
        },
    ),
}
KINDS["mtp, experts"] = (MtpDrafter, KINDS["mtp"][1] | EXPERTS)
KINDS["mtp, mimo"] = (MimoDrafter, SHAPE | {"model_type": "mimo", "num_hidden_layers": 3, "head_dim": None})
SETTINGS = TrainingSettings(
    precision="float32", learning_rate=3e-3, warmup_updates=1, micro_steps_per_update=2, anchors_per_micro_step=24
)


def make_drafter(kind: str) -> Drafter:
    """A drafter with random weights."""
    torch.manual_seed(3)
    made, raw = KINDS[kind]
    config = DrafterConfig.from_json(raw)
    embed_tokens, lm_head, words = torch.randn(WORDS, WIDTH), torch.randn(WORDS, WIDTH), None
    if config.draft_vocab_size:
        words = torch.arange(WORDS)[-REDUCED:]
        lm_head = lm_head[words]
    drafter = made(config, Vocabulary(embed_tokens, lm_head, words))
    if isinstance(drafter, MtpDrafter) and config.mtp and config.mtp.experts:
        drafter.take_experts(0.2 * torch.randn(4, 32, WIDTH), 0.2 * torch.randn(4, WIDTH, 16))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return drafter


def make_sample(seed: int, num_tokens: int = 300, width: int = 2 * WIDTH) -> TrainingSample:
    """Tokens that repeat, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    return TrainingSample(
        features=torch.randn(num_tokens, width, generator=generator),
        token_ids=torch.randint(WORDS - REDUCED, WORDS, (11,), generator=generator).repeat(num_tokens)[:num_tokens],
        positions=torch.arange(num_tokens),
        session=f"s{seed}",
        workload="w",
        num_prompt_tokens=20,
        is_fused=False,
    )


def samples_of(kind: str) -> list[TrainingSample]:
    width = WIDTH if kind.startswith("mtp") else 2 * WIDTH
    return [make_sample(seed, num_tokens, width) for seed, num_tokens in enumerate((300, 77))]


@pytest.fixture(autouse=True)
def _no_tf32() -> Iterator[None]:
    """Products of float32 keep float32's bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scope", ["kv-frozen", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_cpu(kind: str, scope: Any, device: str) -> None:
    here, there = make_drafter(kind), make_drafter(kind).to(device)
    samples = samples_of(kind)
    for drafter in (here, there):
        MicroTrainer(drafter, replace(SETTINGS, scope=scope)).step(samples)
    found = {name: p.grad for name, p in there.named_parameters() if p.grad is not None}
    wanted = {name: p.grad for name, p in here.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys() != set()
    for name, gradient in wanted.items():
        error = float((found[name].cpu() - gradient).norm() / gradient.norm())
        assert error < 5e-3, f"{name}: {error:.1e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_it_learns_in_bfloat16_is_drafted(kind: str, device: str) -> None:
    """Sixty updates on two samples; then it is judged there and on the CPU."""
    drafter, samples = make_drafter(kind).to(device), samples_of(kind)
    if device == "cuda":  # as the trainer has them there
        drafter.embed_tokens, drafter.lm_head = drafter.embed_tokens.bfloat16(), drafter.lm_head.bfloat16()
    trainer = MicroTrainer(drafter, replace(SETTINGS, precision="auto", micro_steps_per_update=1))
    losses = [trainer.step(samples, remaining=1.0 - step / 60).loss for step in range(60)]
    assert losses[-1] < 0.5 * losses[0]
    judged = expected_acceptance_length(drafter, samples).acceptance_length()
    parent = expected_acceptance_length(make_drafter(kind), samples).acceptance_length()
    assert judged > parent + 0.5
    on_cpu = expected_acceptance_length(deepcopy(drafter).cpu().float(), samples).acceptance_length()
    assert judged == pytest.approx(on_cpu, rel=0.1), "bfloat16 there, float32 here"
