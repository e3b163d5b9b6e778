"""MiMo's MTP head against Transformers' Qwen2 layer, which reads a whole sequence at once, block by block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from honed.adapt.models.drafter_tensor_names import makes_context
from honed.recalib.config.drafter import DrafterConfig
from honed.recalib.drafter.checkpoint import load_drafter, save_drafter
from honed.recalib.drafter.drafter import Vocabulary
from honed.recalib.drafter.mimo import MimoDrafter
from honed.recalib.registry.registry import Registry
from honed.recalib.training.micro_step import MicroTrainer, TrainingSettings
from tests.recalib.drafter.rounds import check_blocks, make_mtp_sample, mtp_block

RAW: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 640_000,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
"""The fields of a published MiMo-7B, at toy size."""
CONFIG = DrafterConfig.from_json(RAW)
PREFIX = "mtp_layers.0."


def make_drafter() -> MimoDrafter:
    torch.manual_seed(3)
    drafter = MimoDrafter(CONFIG, Vocabulary(torch.randn(50, 16), torch.randn(50, 16)))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return drafter


class WholeSequence:
    """The head by Transformers' layers, with the drafter's weights."""

    def __init__(self, drafter: MimoDrafter) -> None:
        theirs = pytest.importorskip("transformers.models.qwen2.modeling_qwen2", reason="Transformers is not installed")
        from transformers import Qwen2Config

        config = Qwen2Config(**{name: value for name, value in RAW.items() if name not in ("model_type", "architectures")})
        config._attn_implementation = "eager"
        own = {name.removeprefix(PREFIX): tensor for name, tensor in drafter.state_dict().items()}
        self.own = {name: own.pop(f"{name}.weight") for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")}
        self.own["input_proj"] = own.pop("input_proj.weight")
        self.layer = theirs.Qwen2DecoderLayer(config, 0).eval()
        self.layer.load_state_dict(own)
        self.rotary = theirs.Qwen2RotaryEmbedding(config)
        self.embed_tokens = drafter.embed_tokens

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return self.own[name] * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    def __call__(self, ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Normed outputs of a sequence of (next token, hidden state)."""
        embedded = self.embed_tokens[ids] * (positions != 0)[:, None]
        joined = torch.cat((self._norm("hidden_layernorm", hidden), self._norm("token_layernorm", embedded)), -1)
        x = (joined @ self.own["input_proj"].T)[None]
        mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
        out = self.layer(x, attention_mask=mask, position_embeddings=self.rotary(x, positions[None]))
        return self._norm("final_layernorm", (out if isinstance(out, Tensor) else out[0])[0])


@torch.no_grad()
def test_a_block_is_a_server_s_round() -> None:
    """One sample begins at position 0, where there is no embedding, the other at 7."""
    drafter = make_drafter()
    whole, samples = WholeSequence(drafter), [make_mtp_sample(), make_mtp_sample(seed=1, first=7)]
    check_blocks(drafter, samples, mtp_block(whole, drafter.lm_head, 3))


def test_training_learns_and_leaves_what_cached_rows_depend_on() -> None:
    drafter = make_drafter()
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    sample = make_mtp_sample(80)
    sample.token_ids.copy_(torch.arange(80) % 7)
    settings = TrainingSettings(learning_rate=1e-2, warmup_updates=1, micro_steps_per_update=1)
    trainer = MicroTrainer(drafter, settings)
    figures = [trainer.step([sample]) for _ in range(40)]
    assert figures[-1].loss < 0.3 * figures[0].loss
    changed = {name for name, p in drafter.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if not makes_context(name, "mtp")}
    frozen = {name.removeprefix(PREFIX).removesuffix(".weight") for name in before.keys() - changed}
    attention = {"self_attn.k_proj", "self_attn.v_proj", "self_attn.k_proj.bias", "self_attn.v_proj.bias"}
    assert frozen == {"input_proj", "token_layernorm", "hidden_layernorm", "input_layernorm"} | attention


@torch.no_grad()
def test_a_head_is_taken_from_its_target_and_written_as_it_was(tmp_path: Path) -> None:
    drafter, target = make_drafter(), tmp_path / "target"
    target.mkdir()
    head = {f"model.{name}": p.detach().clone() for name, p in drafter.named_parameters()}
    rest = {
        "model.embed_tokens.weight": drafter.embed_tokens,
        "lm_head.weight": drafter.lm_head,
        "model.norm.weight": torch.ones(16),
    }
    (target / "config.json").write_text(json.dumps(RAW))
    save_file(head | rest, target / "model.safetensors")
    registry = Registry(tmp_path / "registry")
    version = registry.import_head(target, target_path=str(target))
    assert (version.method, version.num_tensors) == ("mtp", len(head))
    folder = registry.path(version.version)
    assert load_file(folder / "model.safetensors").keys() == head.keys()
    read = load_drafter(folder, target, num_draft_tokens=4)
    assert isinstance(read, MimoDrafter)
    assert all(torch.equal(p, dict(drafter.named_parameters())[name]) for name, p in read.named_parameters())
    save_drafter(read, tmp_path / "out", folder, torch.float32)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == head.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in head.items())


@pytest.mark.parametrize(
    "changes",
    [{"qk_norm": True}, {"use_sliding_window": True}, {"dual_chunk_attention_config": {"chunk_size": 8}}, {"head_dim": 8}],
)
def test_what_it_lacks_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(changes))}.* in MiMo's MTP head is not supported"):
        DrafterConfig.from_json(RAW | changes)


def test_its_rotation_has_qwen2_s_base_where_the_config_is_silent() -> None:
    assert CONFIG.rope_theta == 640_000.0
    assert DrafterConfig.from_json({name: value for name, value in RAW.items() if name != "rope_theta"}).rope_theta == 1e6
