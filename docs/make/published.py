"""Published drafters, and targets with MTP heads: what decides whether they can be trained, as their configurations say.

These are facts of structure: which layers slide, the rotary embedding, the vocabulary, how the target's tensors are named. They
are quoted from model cards, recipes and public tests; the files themselves weren't opened. What isn't known isn't judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from honed.adapt.models.trainable import FULL, SLIDING, Pair, is_dspark, is_eagle3, why_untrained

_NAMES = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
_TIED = (_NAMES[0], _NAMES[2])
_NESTED = tuple(name.replace("model.", "model.language_model.") for name in _NAMES)
_NESTED_TIED = (_NESTED[0], _NESTED[2])
_AROUND = tuple(f"language_model.{name}" for name in _NAMES)
_YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
_LLAMA3 = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
}
_WORDS = {"draft_vocab_size": 32000}


@dataclass(frozen=True)
class Published:
    """A drafter, and the target that it was made for."""

    drafter: str
    target: str
    num_layers: int = 5
    sliding: int = 0
    """Layers with a window, the first ones."""
    window: int = 2048
    tensors: tuple[str, ...] = _NAMES
    """Names of the target's embedding, head and norm."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What else its config.json says."""
    files: tuple[str, ...] = ()
    """Its weights, where they aren't safetensors."""

    def raw(self) -> dict[str, Any]:
        """The parts of its config.json that decide."""
        windows = {
            "layer_types": [SLIDING] * self.sliding + [FULL] * (self.num_layers - self.sliding),
            "sliding_window": self.window,
            "use_sliding_window": True,
        }
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": self.num_layers,
            "rope_theta": 1e6,
            **(windows if self.sliding else {}),
            **self.config,
        }

    def reasons(self) -> list[str]:
        """Why the pair can't be trained; empty if it can."""
        raw = self.raw()
        method = "eagle3" if is_eagle3(raw) else "dspark" if is_dspark(raw) else "dflash"
        pair = Pair(method=method, drafter=raw, target={}, target_tensors=self.tensors, drafter_files=self.files)
        return why_untrained(pair)

    @property
    def traits(self) -> str:
        """What distinguishes it, in a few words."""
        raw = self.raw()
        own = raw.get("dflash_config") or {}
        found = {
            f"{self.sliding} of {self.num_layers} layers see {self.window:,} tokens": self.sliding,
            f"RoPE {raw.get('rope_scaling', {}).get('rope_type')}": raw.get("rope_scaling"),
            f"{raw.get('draft_vocab_size')} words": raw.get("draft_vocab_size"),
            "biases": raw.get("attention_bias"),
            "M-RoPE target": self.target.startswith(("Qwen/Qwen3.5", "Qwen/Qwen3.6", "Qwen/Qwen3.8")),
            "DFlash2": raw["architectures"] == ["DFlash2DraftModel"],
            "DSpark": is_dspark(raw),
            "EAGLE-3": is_eagle3(raw),
            "MLA": "Deepseek" in raw["architectures"][0],
            "Gemma-4's own layers": raw["architectures"] == ["Gemma4DSparkModel"],
            "Muse Glimmer's names": raw["architectures"] == ["DFlashMuseGlimmerAssistantModel"],
            "Laguna's own layers": raw["architectures"] == ["DFlashLagunaForCausalLM"],
            "attention sinks, scaled values, partial RoPE": own.get("attention_sink_bias"),
            "quantised": raw.get("quantization_config"),
        }
        return "; ".join(text for text, has in found.items() if has) or "as in the paper"


_GPT_OSS = {"attention_bias": True, "head_dim": 64, "rope_scaling": _YARN}
_DFLASH2 = {"architectures": ["DFlash2DraftModel"]}
_DSPARK = {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "markov_rank": 256, "markov_head_type": "vanilla"}
_SPECULATORS_EAGLE3: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("meta-llama", "Llama-3.1-8B-Instruct", {}),
    ("meta-llama", "Llama-3.3-70B-Instruct", {}),
    ("Qwen", "Qwen3-8B", {}),
    ("Qwen", "Qwen3-14B", {}),
    ("Qwen", "Qwen3-32B", {}),
    ("openai", "gpt-oss-20b", {}),
    ("openai", "gpt-oss-120b", {"norm_before_fc": True}),
    ("google", "gemma-4-31B-it", {"tensors": _NESTED_TIED}),
)


def _eagle3(
    drafter: str,
    target: str,
    tensors: tuple[str, ...] = _NAMES,
    architecture: str = "LlamaForCausalLMEagle3",
    files: tuple[str, ...] = (),
    **config: Any,
) -> Published:
    own = {"architectures": [architecture], "model_type": "llama", **_WORDS, **config}
    return Published(drafter, target, 1, tensors=tensors, config=own, files=files)


PUBLISHED = (
    Published("z-lab/Qwen3-4B-DFlash-b16", "Qwen/Qwen3-4B", tensors=_TIED),
    Published("z-lab/Qwen3-8B-DFlash-b16", "Qwen/Qwen3-8B"),
    Published("z-lab/Qwen3-Coder-30B-A3B-DFlash", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
    Published("z-lab/Qwen3-Coder-Next-DFlash", "Qwen/Qwen3-Coder-Next"),
    Published("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", "meta-llama/Llama-3.1-8B-Instruct", config=_LLAMA3),
    Published("z-lab/gpt-oss-20b-DFlash", "openai/gpt-oss-20b", 8, config=_GPT_OSS),
    Published("z-lab/gpt-oss-120b-DFlash", "openai/gpt-oss-120b", 8, config=_GPT_OSS),
    Published("z-lab/Kimi-K2.5-DFlash", "moonshotai/Kimi-K2.5", 6, tensors=_AROUND, config={"rope_scaling": _YARN}),
    Published("z-lab/Qwen3.5-4B-DFlash", "Qwen/Qwen3.5-4B", tensors=_NESTED_TIED),
    Published("z-lab/Qwen3.5-9B-DFlash", "Qwen/Qwen3.5-9B", tensors=_NESTED),
    Published("z-lab/Qwen3.5-27B-DFlash", "Qwen/Qwen3.5-27B", tensors=_NESTED),
    Published("z-lab/Qwen3.5-35B-A3B-DFlash", "Qwen/Qwen3.5-35B-A3B", 8, 7, tensors=_NESTED),
    Published("z-lab/Qwen3.5-122B-A10B-DFlash", "Qwen/Qwen3.5-122B-A10B", 8, 7, tensors=_NESTED),
    Published("z-lab/Qwen3.6-27B-DFlash", "Qwen/Qwen3.6-27B", 5, 4, tensors=_NESTED),
    Published("z-lab/Qwen3.6-35B-A3B-DFlash", "Qwen/Qwen3.6-35B-A3B", 8, 7, 4096, tensors=_NESTED),
    Published("z-lab/gemma-4-31B-it-DFlash", "google/gemma-4-31B-it", 5, 4, tensors=_NESTED_TIED),
    Published("z-lab/gemma-4-26B-A4B-it-DFlash", "google/gemma-4-26B-A4B-it", 5, 4, tensors=_NESTED_TIED),
    Published("RedHatAI/Qwen3-8B-speculator.dflash", "Qwen/Qwen3-8B", config=_WORDS),
    Published("RedHatAI/Qwen3-30B-A3B-speculator.dflash", "Qwen/Qwen3-30B-A3B", config=_WORDS),
    Published("RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash", "Qwen/Qwen3-30B-A3B-Instruct-2507", config=_WORDS),
    Published("RedHatAI/gemma-4-31B-it-speculator.dflash", "google/gemma-4-31B-it", tensors=_NESTED_TIED, config=_WORDS),
    Published("RedHatAI/Qwen3.5-397B-A17B-speculator.dflash", "Qwen/Qwen3.5-397B-A17B", tensors=_NESTED, config=_WORDS),
    Published(
        "RedHatAI/Qwen3.5-397B-A17B-FP8-dynamic-speculator.dflash",
        "RedHatAI/Qwen3.5-397B-A17B-FP8-dynamic",
        tensors=_NESTED,
        config=_WORDS,
    ),
    Published(
        "Muse-Glimmer-30B-assistant",
        "Muse Glimmer 30B",
        5,
        5,
        config={"architectures": ["DFlashMuseGlimmerAssistantModel"], "mask_token_id": 0, "target_layer_ids": [1, 2]},
    ),
    Published("Qwen3.8-27B's DFlash2", "Qwen/Qwen3.8-27B", 5, 5, tensors=_NESTED, config=_DFLASH2),
    Published("RedHatAI/Qwen3-4B-speculator.dflash2", "Qwen/Qwen3-4B", tensors=_TIED, config=_DFLASH2),
    Published("RedHatAI/Qwen3-8B-speculator.dflash2", "Qwen/Qwen3-8B", 8, config=_DFLASH2),
    Published("RedHatAI/gemma-4-31B-it-speculator.dflash2", "google/gemma-4-31B-it", tensors=_NESTED_TIED, config=_DFLASH2),
    Published("deepseek-ai/dspark_qwen3_4b_block7", "Qwen/Qwen3-4B", tensors=_TIED, config=_DSPARK),
    Published("deepseek-ai/dspark_qwen3_8b_block7", "Qwen/Qwen3-8B", config=_DSPARK),
    Published("deepseek-ai/dspark_qwen3_14b_block7", "Qwen/Qwen3-14B", config=_DSPARK),
    Published("mgoin/Qwen3-8B-speculator.dspark", "Qwen/Qwen3-8B", config=_DSPARK | {"sample_from_anchor": False}),
    Published(
        "makora-ai/gemma4-26b-a4b-dspark",
        "google/gemma-4-26B-A4B-it",
        tensors=_NESTED_TIED,
        config=_DSPARK | _WORDS | {"sample_from_anchor": False},
    ),
    Published(
        "deepseek-ai's DSpark for Gemma-4-12B",
        "google/gemma-4-12B-it",
        tensors=_NESTED_TIED,
        config=_DSPARK | {"architectures": ["Gemma4DSparkModel"]},
    ),
    Published(
        "XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash",
        "XiaomiMiMo/MiMo-V2.5-Pro",
        config={
            "partial_rotary_factor": 0.5,
            "dflash_config": {
                "use_swa": True,
                "swa_window_size": 1024,
                "attention_sink_bias": True,
                "attention_value_scale": 0.612,
            },
        },
    ),
    Published("Laguna's DFlash", "Laguna", config={"architectures": ["DFlashLagunaForCausalLM"]}),
    *(_eagle3(f"RedHatAI/{name}-speculator.eagle3", f"{owner}/{name}", **more) for owner, name, more in _SPECULATORS_EAGLE3),
    _eagle3(
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        architecture="LlamaForCausalLM",
        files=("pytorch_model.bin",),
    ),
    _eagle3("AngelSlim/Qwen3-1.7B_eagle3", "Qwen/Qwen3-1.7B", tensors=_TIED),
    _eagle3("AngelSlim/Qwen3-4B_eagle3", "Qwen/Qwen3-4B", tensors=_TIED),
    _eagle3("AngelSlim/Qwen3-8B_eagle3", "Qwen/Qwen3-8B"),
    _eagle3("Rayzl/qwen2.5-vl-7b-eagle3-sgl", "Qwen/Qwen2.5-VL-7B-Instruct", architecture="Eagle3Qwen2_5vlForCausalLM"),
    _eagle3(
        "taobao-mnn/Qwen3-VL-8B-Instruct-Eagle3",
        "Qwen/Qwen3-VL-8B-Instruct",
        tensors=_NESTED,
        architecture="Eagle3Qwen3vlForCausalLM",
    ),
    _eagle3("AQ-MedAI/Kimi-K25-eagle3", "moonshotai/Kimi-K2.5", tensors=_AROUND, architecture="Eagle3DeepseekV2ForCausalLM"),
)


@dataclass(frozen=True)
class Head:
    """A target with an MTP head of its own."""

    target: str
    model_type: str
    structure: str
    tensors: tuple[str, ...] = _NAMES

    def reasons(self) -> list[str]:
        """Why the head can't be trained; empty if it can."""
        experts = {"num_experts": 256, "shared_expert_intermediate_size": 512} if self.structure == "experts" else {}
        raw = {"model_type": self.model_type, **experts}
        return why_untrained(Pair(method="mtp", drafter=raw, target=raw, target_tensors=self.tensors))


HEADS = (
    *(Head(f"Qwen/Qwen3.5-{size}", "qwen3_5", "dense", _NESTED_TIED) for size in ("0.8B", "4B")),
    *(Head(f"Qwen/{name}", "qwen3_5", "dense", _NESTED) for name in ("Qwen3.5-9B", "Qwen3.5-27B", "Qwen3.6-27B")),
    *(
        Head(f"Qwen/{name}", "qwen3_5_moe", "experts", _NESTED)
        for name in ("Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B", "Qwen3.6-35B-A3B")
    ),
    *(Head(f"Qwen/Qwen3-Next-80B-A3B-{kind}", "qwen3_next", "experts") for kind in ("Instruct", "Thinking")),
    Head("XiaomiMiMo/MiMo-7B-RL", "mimo", "dense"),
    Head("XiaomiMiMo/MiMo-V2-Flash", "mimo_v2_flash", "experts"),
    Head("zai-org/GLM-4.5", "glm4_moe", "experts"),
    Head("zai-org/GLM-4.7-Flash", "glm4_moe_lite", "MLA, experts"),
    Head("deepseek-ai/DeepSeek-V3", "deepseek_v3", "MLA, experts"),
    Head("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek_v32", "MLA, experts"),
    Head("baidu/ERNIE-4.5-21B-A3B-PT", "ernie4_5_moe", "experts"),
    Head("LGAI-EXAONE/K-EXAONE-236B-A23B", "exaone_moe", "experts"),
    Head("meituan-longcat/LongCat-Flash-Chat", "longcat_flash", "MLA, experts"),
    Head("stepfun-ai/Step-3.5-Flash", "step3p5", "experts"),
)
