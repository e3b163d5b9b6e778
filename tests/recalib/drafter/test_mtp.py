"""The MTP head against a transformer layer that reads a whole sequence at once, block by block."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from honed.adapt.models.drafter_tensor_names import makes_context
from honed.recalib.config.drafter import DrafterConfig
from honed.recalib.drafter import checkpoint
from honed.recalib.drafter.checkpoint import CheckpointError, load_drafter, load_target_head, save_drafter
from honed.recalib.drafter.drafter import Vocabulary
from honed.recalib.drafter.layers import rotary_tables, rotate
from honed.recalib.drafter.mtp import MtpDrafter
from honed.recalib.registry.registry import Registry, RegistryError
from honed.recalib.training.micro_step import MicroTrainer, TrainingSettings
from tests.recalib.drafter.rounds import check_blocks, make_mtp_sample, mtp_block

TEXT = {
    "model_type": "qwen3_5_text",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
}


def make_drafter(**changes: Any) -> MtpDrafter:
    torch.manual_seed(3)
    drafter = MtpDrafter(DrafterConfig.from_json(TEXT | changes), Vocabulary(torch.randn(50, 16), torch.randn(50, 16)))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    if "num_experts" in changes:
        drafter.take_experts(0.5 * torch.randn(4, 16, 16), 0.5 * torch.randn(4, 16, 8))
    return drafter


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + weight)


def whole_sequence(drafter: MtpDrafter, ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
    """The head on a sequence of (next token, hidden state), by plain attention: its normed outputs."""
    p = dict(drafter.named_parameters())
    layer = {name.removeprefix("layers.0."): tensor for name, tensor in p.items()}
    embedded = drafter.embed_tokens[ids]
    both = torch.cat((norm(embedded, p["pre_fc_norm_embedding.weight"]), norm(hidden, p["pre_fc_norm_hidden.weight"])), -1)
    x = both @ p["fc.weight"].T
    y = norm(x, layer["input_layernorm.weight"])
    q, k, v = (y @ layer[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    gate = None
    q = q.view(len(ids), 4, -1)
    if q.shape[-1] == 16:
        q, gate = q.chunk(2, dim=-1)
    q, k = norm(q, layer["self_attn.q_norm.weight"]), norm(k.view(len(ids), 2, 8), layer["self_attn.k_norm.weight"])
    tables = rotary_tables(positions, 4, 1e4)
    q, k, v = rotate(q, tables), rotate(k, tables), v.view(len(ids), 2, 8)
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    out = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)), is_causal=True).transpose(0, 1)
    out = (out if gate is None else out * gate.sigmoid()).flatten(1) @ layer["self_attn.o_proj.weight"].T
    x = x + out
    y = norm(x, layer["post_attention_layernorm.weight"])
    inner = F.silu(y @ layer["mlp.gate_proj.weight"].T) * (y @ layer["mlp.up_proj.weight"].T)
    return norm(x + inner @ layer["mlp.down_proj.weight"].T, p["norm.weight"])


@pytest.mark.parametrize("has_gate", [True, False])
@torch.no_grad()
def test_a_block_is_a_server_s_round(has_gate: bool) -> None:
    drafter = make_drafter(attn_output_gate=has_gate)
    whole, samples = partial(whole_sequence, drafter), [make_mtp_sample(), make_mtp_sample(seed=1, first=7)]
    check_blocks(drafter, samples, mtp_block(whole, drafter.lm_head, 3))


def test_training_learns_and_leaves_what_cached_rows_depend_on() -> None:
    drafter = make_drafter()
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    sample = make_mtp_sample(80)
    sample.token_ids.copy_(torch.arange(80) % 7)
    trainer = MicroTrainer(drafter, TrainingSettings(learning_rate=1e-2, warmup_updates=1, micro_steps_per_update=1))
    figures = [trainer.step([sample]) for _ in range(40)]
    assert figures[-1].loss < 0.3 * figures[0].loss
    changed = {name for name, p in drafter.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if not makes_context(name, "mtp")}
    assert "fc.weight" not in changed
    assert "layers.0.self_attn.q_proj.weight" in changed


def write_target(folder: Path, drafter: MtpDrafter, *, is_sharded: bool) -> Path:
    """A target with the head in its files, as published."""
    folder.mkdir()
    head = {f"mtp.{name}": p.detach().clone() for name, p in drafter.named_parameters()}
    rest = {"model.embed_tokens.weight": drafter.embed_tokens, "lm_head.weight": drafter.lm_head}
    rest["model.norm.weight"] = torch.zeros(16)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": TEXT}))
    if not is_sharded:
        save_file(head | rest, folder / "model.safetensors")
        return folder
    names = sorted(head)
    parts = [dict(rest), {n: head[n] for n in names[:5]}, {n: head[n] for n in names[5:]}]
    weight_map = {}
    for i, part in enumerate(parts):
        save_file(part, folder / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("is_sharded", [False, True])
@torch.no_grad()
def test_a_head_is_taken_from_its_target_and_written_as_it_was(tmp_path: Path, is_sharded: bool) -> None:
    drafter = make_drafter()
    target = write_target(tmp_path / "target", drafter, is_sharded=is_sharded)
    registry = Registry(tmp_path / "registry")
    version = registry.import_head(target, target_path=str(target))
    assert (version.method, version.num_tensors) == ("mtp", len(list(drafter.named_parameters())))
    assert registry.import_head(target) == version, "it is there already"
    folder = registry.path(version.version)
    assert {name.partition(".")[0] for name in load_file(folder / "model.safetensors")} == {"mtp"}
    read = load_drafter(folder, target, num_draft_tokens=4)
    assert isinstance(read, MtpDrafter)
    assert read.config.num_draft_tokens == 4
    assert all(torch.equal(p, dict(drafter.named_parameters())[name]) for name, p in read.named_parameters())
    save_drafter(read, tmp_path / "out", folder, torch.float32)
    old, new = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "out"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert registry.import_head(tmp_path / "out") == version, "the same head in another file"

    def write(into: Path) -> None:
        save_drafter(read, into, folder, torch.bfloat16)

    trained = registry.create(write, target_path=str(target))
    assert registry.import_head(registry.path(trained.version)) == trained, "a version served as a draft model is that version"
    assert registry.versions() == [version, trained]


def test_a_target_without_a_head_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "target" / "model.safetensors")
    registry = Registry(tmp_path / "registry")
    with pytest.raises(RegistryError, match="no tensors of an MTP head"):
        registry.import_head(tmp_path / "target")
    with pytest.raises(RegistryError, match="can't be read"):
        registry.import_head(tmp_path / "nowhere")
    assert registry.versions() == []
    assert list((registry.root / "versions").iterdir()) == []


def test_mrope_is_the_plain_one_for_text() -> None:
    rope = {**TEXT["rope_parameters"], "rope_type": "mrope", "mrope_section": [1, 1, 2]}
    assert DrafterConfig.from_json(TEXT | {"rope_parameters": rope}) == DrafterConfig.from_json(TEXT)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mtp_num_hidden_layers": 2}, "an MTP head of 2 layers"),
        ({"model_type": "qwen3_5_moe_text", "num_experts": 8}, "an MTP head with experts and no shared one"),
        ({"layer_scale": True}, "layer_scale"),
    ],
)
def test_what_it_lacks_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        DrafterConfig.from_json(TEXT | changes)


@torch.no_grad()
def test_experts_are_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe", reason="Transformers is not installed")
    from transformers import Qwen3_5MoeTextConfig

    mlp = make_drafter(**EXPERTS)._layer.mlp
    names = ("hidden_size", "hidden_act", "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    given = TEXT | EXPERTS | {"hidden_act": "silu"}
    config = Qwen3_5MoeTextConfig(**{name: given[name] for name in (*names, "shared_expert_intermediate_size")})
    block = theirs.Qwen3_5MoeSparseMoeBlock(config)
    block.load_state_dict(mlp.state_dict() | {"experts.gate_up_proj": mlp.gate_up, "experts.down_proj": mlp.down})
    x = torch.randn(40, 16)
    torch.testing.assert_close(mlp(x), block(x[None])[0])


def write_experts_target(folder: Path, drafter: MtpDrafter, is_fused: bool) -> Path:
    """A target with a head that has experts."""
    mlp = drafter._layer.mlp
    if is_fused:
        experts = {"gate_up_proj": mlp.gate_up, "down_proj": mlp.down}
    else:
        experts = {f"{i}.down_proj.weight": mlp.down[i] for i in range(4)}
        for i in range(4):
            gate, up = mlp.gate_up[i].chunk(2)
            experts |= {f"{i}.gate_proj.weight": gate, f"{i}.up_proj.weight": up}
    write_target(folder, drafter, is_sharded=False)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"mtp.layers.0.mlp.experts.{name}": tensor.contiguous() for name, tensor in experts.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": TEXT | EXPERTS}))
    return folder


@pytest.mark.parametrize("is_fused", [False, True], ids=["one by one", "in two tensors"])
def test_experts_stay_in_the_target_s_files(tmp_path: Path, is_fused: bool) -> None:
    """A version holds none of them; training leaves them and their router alone."""
    drafter = make_drafter(**EXPERTS)
    mlp = drafter._layer.mlp
    target = write_experts_target(tmp_path / "target", drafter, is_fused)
    registry = Registry(tmp_path / "registry")
    version = registry.import_head(target, target_path=str(target))
    assert (version.method, version.num_tensors) == ("mtp", len(list(drafter.named_parameters())))
    read = load_drafter(registry.path(version.version), target, num_draft_tokens=4)
    assert isinstance(read, MtpDrafter)
    x = torch.randn(7, 16)
    torch.testing.assert_close(read._layer.mlp(x), mlp(x))
    before = {name: parameter.detach().clone() for name, parameter in read.named_parameters()}
    MicroTrainer(read, TrainingSettings(anchors_per_micro_step=8, micro_steps_per_update=1)).step([make_mtp_sample()])
    moved = {name for name, parameter in read.named_parameters() if not torch.equal(parameter, before[name])}
    assert {"layers.0.mlp.shared_expert.up_proj.weight", "layers.0.mlp.shared_expert_gate.weight"} <= moved
    assert "layers.0.mlp.gate.weight" not in moved
    torch.testing.assert_close(read._layer.mlp.gate_up, mlp.gate_up, rtol=0, atol=0)


def test_a_target_s_list_of_tensors_is_read_once_for_all_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large target reading it takes a second, and there are 512 experts: the trainer's watchdog would end it amid them."""
    drafter, reads = make_drafter(**EXPERTS), list[Path]()
    target, tensor_files = write_experts_target(tmp_path / "target", drafter, is_fused=False), checkpoint.tensor_files

    def noting(folder: Path) -> dict[str, Path]:
        reads.append(folder)
        return tensor_files(folder)

    monkeypatch.setattr(checkpoint, "tensor_files", noting)
    checkpoint._load_experts(target, drafter.config, "cpu", torch.float32)
    assert len(reads) <= 2


def test_an_expert_of_another_shape_is_refused(tmp_path: Path) -> None:
    drafter = make_drafter(**EXPERTS)
    target = write_experts_target(tmp_path / "target", drafter, is_fused=False)
    tensors = load_file(target / "model.safetensors")
    tensors["mtp.layers.0.mlp.experts.2.up_proj.weight"] = torch.zeros(1, 16)
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.weight is \[1, 16\], config\.json asks for \[8, 16\]"):
        load_target_head(target, drafter.config)


@pytest.mark.parametrize("is_fused", [False, True], ids=["one by one", "in two tensors"])
def test_experts_take_no_more_memory_on_their_way_than_in_their_place(tmp_path: Path, is_fused: bool) -> None:
    """They may be a dozen GB: one part of one expert at a time is on its way."""
    drafter = make_drafter(**EXPERTS)
    target = write_experts_target(tmp_path / "target", drafter, is_fused)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        held = checkpoint._load_experts(target, drafter.config, "cpu", torch.bfloat16)
    alive = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    assert alive == sum(tensor.nbytes for tensor in held)
    assert peak <= alive + drafter._layer.mlp.gate_up[0].nbytes
