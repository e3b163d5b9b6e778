"""The EAGLE-3 drafter against a transformer layer that reads a whole sequence at once, block by block."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from honed.adapt.models.drafter_tensor_names import makes_context
from honed.adapt.models.trainable import EAGLE3_ARCHITECTURES
from honed.recalib.config.drafter import DrafterConfig
from honed.recalib.drafter.checkpoint import CheckpointError, load_drafter, save_drafter
from honed.recalib.drafter.drafter import Vocabulary
from honed.recalib.drafter.eagle3 import Eagle3Drafter
from honed.recalib.drafter.layers import rotary_tables, rotate
from honed.recalib.gate.evaluate import draft_blocks, expected_acceptance_length
from honed.recalib.samples.sample import TrainingSample, pack
from honed.recalib.training.micro_step import MicroTrainer, TrainingSettings
from tests.recalib.drafter.rounds import ANCHORS, ROWS, check_blocks

SMALL = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "num_speculative_tokens": 4,
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"norm_output": True, "norm_before_fc": True},
    {"fc_norm": True, "attention_bias": True},
    {"architectures": ["Eagle3Qwen3ForCausalLM"], "attention_bias": True},
]


def make_drafter(words: int = 0, **changes: Any) -> Eagle3Drafter:
    """A drafter with random weights."""
    torch.manual_seed(3)
    config = DrafterConfig.from_json(SMALL | changes | ({"draft_vocab_size": words} if words else {}))
    some = torch.randperm(50)[:words].sort().values if words else None
    drafter = Eagle3Drafter(config, Vocabulary(torch.randn(50, 16), torch.randn(words or 50, 16), some))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return drafter


def make_sample(num_rows: int = ROWS, seed: int = 0, width: int = 48, first: int = 0) -> TrainingSample:
    generator = torch.Generator().manual_seed(seed)
    return TrainingSample(
        features=torch.randn(num_rows, width, generator=generator),
        token_ids=torch.randint(50, (num_rows,), generator=generator),
        positions=first + torch.arange(num_rows),
        session=f"s{seed}",
        workload="w",
        num_prompt_tokens=4,
        is_fused=False,
    )


def whole_sequence(drafter: Eagle3Drafter, ids: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The layer on a sequence of (next token, hidden state): its outputs before and after the last norm, by plain attention."""
    layer, eagle3, heads = drafter.layers[0], drafter.config.eagle3, drafter.config.num_attention_heads
    normed = layer.hidden_norm(hidden)
    x = torch.cat((layer.input_layernorm(drafter.embed_tokens[ids]), normed), dim=-1)
    attention, d = layer.self_attn, drafter.config.head_dim
    q, k, v = (p(x).view(len(x), -1, d) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    if eagle3.has_head_norms:
        q, k = attention.q_norm(q), attention.k_norm(k)
    tables = rotary_tables(positions, d, drafter.config.rope_theta)
    q, k = rotate(q, tables), rotate(k, tables)
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    out = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)), is_causal=True).transpose(0, 1)
    residual = (normed if eagle3.norm_before_residual else hidden) + attention.o_proj(out.flatten(1))
    out = residual + layer.mlp(layer.post_attention_layernorm(residual))
    return out, drafter.norm(out)


def one_block(drafter: Eagle3Drafter, sample: TrainingSample, anchor: int, k: int, is_own: bool) -> tuple[Tensor, Tensor]:
    """A server's round after `anchor`: hidden states and tokens, with the right tokens fed or those that were drafted."""
    ids, hidden = sample.token_ids[1 : anchor + 1], drafter.fuse(sample.features[:anchor])
    hiddens, drafts = [], []
    for step in range(k):
        positions = sample.positions[0] + torch.arange(len(ids))
        out, normed = whole_sequence(drafter, ids, hidden, positions)
        hiddens.append(normed[-1])
        drafts.append(drafter.to_target(F.linear(normed[-1], drafter.lm_head).argmax()))
        fed = drafts[-1] if is_own else sample.token_ids[min(anchor + step + 1, sample.num_tokens - 1)]
        ids = torch.cat((ids, fed[None]))
        hidden = torch.cat((hidden, (normed if drafter.config.eagle3.feeds_normed else out)[-1:]))
    return torch.stack(hiddens), torch.stack(drafts)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_a_block_is_a_server_s_round(options: dict[str, Any]) -> None:
    """Two samples packed end to end, the second beginning at position 7: tokens, positions and masks must all be right."""
    drafter = make_drafter(**options)
    samples = [make_sample(), make_sample(seed=1, first=7)]
    check_blocks(drafter, samples, lambda sample, anchor, is_own: one_block(drafter, sample, anchor, 4, is_own))


@torch.no_grad()
def test_accepted_tokens_are_those_of_a_server_that_feeds_its_own_drafts() -> None:
    """The gate feeds right tokens; up to the first wrong draft a server feeds the same."""
    drafter = make_drafter(words=30)
    samples = [make_sample(200, seed) for seed in range(3)]
    for sample in samples:  # text that the drafter often drafts rightly
        for anchor in range(3, 190, 7):
            sample.token_ids[anchor + 1 : anchor + 4] = one_block(drafter, sample, anchor, 3, is_own=True)[1]
    k = 3
    judged = expected_acceptance_length(drafter, samples, k)
    total = accepted = 0
    for sample in samples:
        anchor = sample.num_prompt_tokens
        while anchor + 1 < sample.num_tokens:
            drafts = one_block(drafter, sample, anchor, k, is_own=True)[1].tolist()
            right = sample.token_ids[anchor + 1 : anchor + 1 + k].tolist()
            count = next((i for i in range(len(right)) if drafts[i] != right[i]), len(right))
            total, accepted, anchor = total + 1, accepted + count, anchor + count + 1
    assert accepted > total / 3
    assert judged.acceptance_length() == pytest.approx(1 + accepted / total)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_training_learns_and_leaves_what_cached_rows_depend_on(is_recomputed: bool) -> None:
    drafter = make_drafter(words=30)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    sample = make_sample(80)
    sample.token_ids.copy_(drafter.words[torch.arange(80) % 7])
    settings = TrainingSettings(
        learning_rate=1e-2, warmup_updates=1, micro_steps_per_update=1, gradient_checkpointing=is_recomputed
    )
    trainer = MicroTrainer(drafter, settings)
    figures = [trainer.step([sample]) for _ in range(40)]
    assert figures[-1].loss < 0.3 * figures[0].loss
    changed = {name for name, p in drafter.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if not makes_context(name, "eagle3")}
    assert "layers.0.self_attn.q_proj.weight" in changed
    assert "fc.weight" not in changed
    with torch.no_grad():
        rows = drafter.fuse(sample.features), sample.token_ids
        old = Eagle3Drafter(drafter.config, Vocabulary(drafter.embed_tokens, drafter.lm_head, drafter.words))
        old.load_state_dict(before)
        kept = [
            d.layers[0].self_attn.keys_values(
                d.layers[0].inputs(d.embed_tokens[rows[1]], rows[0])[0], rotary_tables(sample.positions, 8, 10_000.0)
            )
            for d in (drafter, old)
        ]
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_recomputing_gives_the_same_gradients() -> None:
    found = []
    for is_recomputed in (False, True):
        drafter = make_drafter()
        drafter.recomputes_layers = is_recomputed
        sample = make_sample()
        hidden = drafter.draft_hidden(drafter.fuse(sample.features), sample.positions, sample.token_ids, torch.tensor(ANCHORS))
        hidden.square().sum().backward()
        found.append([p.grad for p in drafter.parameters()])
    torch.testing.assert_close(*found)


def test_scope_full_trains_everything() -> None:
    drafter = make_drafter(norm_before_fc=True, fc_norm=True)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    MicroTrainer(drafter, TrainingSettings(scope="full", micro_steps_per_update=1, warmup_updates=1)).step([make_sample()])
    assert all(not torch.equal(p, before[name]) for name, p in drafter.named_parameters())


def write_pair(folder: Path, drafter: Eagle3Drafter, **changes: Any) -> tuple[Path, Path]:
    """The drafter's checkpoint as published, and its target's."""
    head, target = folder / "head", folder / "target"
    words = len(drafter.lm_head) if drafter.words is not None else 0
    for path, raw in ((head, SMALL | changes | {"draft_vocab_size": words or None}), (target, {"num_hidden_layers": 3})):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(raw))
    tensors = {name.replace("layers.0.", "midlayer."): p.detach().clone() for name, p in drafter.named_parameters()}
    if drafter.words is not None:
        tensors["d2t"] = drafter.words - torch.arange(words)
        tensors["t2d"] = torch.zeros(50, dtype=torch.bool).index_fill(0, drafter.words, True)
        tensors["lm_head.weight"] = drafter.lm_head
    save_file(tensors, head / "model.safetensors")
    shared = {"embed_tokens": drafter.embed_tokens, "norm": torch.ones(16)}
    theirs = {f"model.{name}.weight": tensor for name, tensor in shared.items()}
    save_file(theirs | {"lm_head.weight": torch.randn(50, 16)}, target / "model.safetensors")
    return head, target


@torch.no_grad()
def test_a_published_checkpoint_is_read_and_written_with_its_names(tmp_path: Path) -> None:
    drafter = make_drafter(words=30, norm_before_residual=True)
    head, target = write_pair(tmp_path, drafter, norm_before_residual=True)
    read = load_drafter(head, target, num_draft_tokens=3)
    assert isinstance(read, Eagle3Drafter)
    assert (read.config.num_draft_tokens, read.config.target_layer_ids) == (3, (0, 1, 2))
    packed, anchors = pack([make_sample()]), torch.tensor(ANCHORS)
    drafted = [draft_blocks(d, packed, anchors, 3) for d in (read, drafter)]
    assert torch.equal(*drafted)
    out = tmp_path / "out"
    save_drafter(read, out, head, torch.float32)
    old, new = load_file(head / "model.safetensors"), load_file(out / "model.safetensors")
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert (out / "config.json").read_bytes() == (head / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_hidden_layers": 2}, "an EAGLE-3 drafter of 2 layers"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "architecture Eagle3DeepseekV2ForCausalLM"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "without auxiliary hidden states"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization"),
        ({"pard_token": 3}, "P-EAGLE"),
        ({"layer_types": ["sliding_attention"]}, "a sliding window"),
        ({"mlp_bias": True}, "a bias in the MLP"),
    ],
)
def test_what_it_lacks_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        DrafterConfig.from_json(SMALL | changes)


def test_speculators_form_is_read_as_vllm_reads_it() -> None:
    own = ("architectures", "eagle_aux_hidden_state_layer_ids", "num_speculative_tokens")
    raw = {
        "speculators_model_type": "eagle3",
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]},
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "draft_vocab_size": 30,
        "transformer_layer_config": {name: value for name, value in SMALL.items() if name not in own},
    }
    wanted = DrafterConfig.from_json(SMALL | {"draft_vocab_size": 30, "norm_before_residual": True})
    assert DrafterConfig.from_json(raw) == wanted
    qwen3 = raw | {"transformer_layer_config": raw["transformer_layer_config"] | {"model_type": "qwen3"}}  # type: ignore[operator]
    made = DrafterConfig.from_json(qwen3).eagle3
    assert made is not None
    assert made.has_head_norms


def test_heads_have_norms_where_vllms_class_has_them() -> None:
    registry = pytest.importorskip("vllm.model_executor.models.registry")._SPECULATIVE_DECODING_MODELS
    for architecture in EAGLE3_ARCHITECTURES:
        made = DrafterConfig.from_json(SMALL | {"architectures": [architecture]}).eagle3
        assert made is not None
        assert made.has_head_norms == (registry[architecture][1] == "Eagle3Qwen3ForCausalLM"), architecture


def test_layers_that_a_config_leaves_to_vllm_are_three(tmp_path: Path) -> None:
    raw = {name: value for name, value in SMALL.items() if name != "eagle_aux_hidden_state_layer_ids"}
    config = DrafterConfig.from_json(raw)
    assert (config.target_layer_ids, config.feature_size) == ((), 48)
    drafter = make_drafter()
    drafter.config = replace(drafter.config, target_layer_ids=())
    head, target = write_pair(tmp_path, drafter)
    (head / "config.json").write_text(json.dumps(raw))
    assert load_drafter(head, target).config == config


@pytest.mark.parametrize(("name", "has_norms"), [("LlamaForCausalLM", False), ("Qwen3ForCausalLM", True)])
def test_its_tensors_show_an_eagle3_drafter_with_its_layers_plain_name(tmp_path: Path, name: str, has_norms: bool) -> None:
    """As its authors' trainer writes it, whether it has a vocabulary of its own or not."""
    plain = {"architectures": [name]}
    drafter = make_drafter(architectures=[f"Eagle3{name}"])
    head, target = write_pair(tmp_path, drafter)
    (head / "config.json").write_text(json.dumps(SMALL | plain))
    assert load_drafter(head, target).config == drafter.config
    for raw, method in ((SMALL | plain, "eagle3"), (SMALL | plain | {"draft_vocab_size": 30}, "")):
        made = DrafterConfig.from_json(raw, method).eagle3
        assert made is not None
        assert made.has_head_norms == has_norms


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    head, target = write_pair(tmp_path, make_drafter())
    (target / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match=r"target_layer_ids \[0, 1, 2\] against 2 layers"):
        load_drafter(head, target)
