"""The zoo's pairs: every family of targets with a plain drafter, and every kind of drafter for the tiny target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.make_pairs.kinds import eagle3_json, fresh_eagle3, make_dflash2, make_dspark, reduce_vocabulary, write_eagle3
from honed.recalib.drafter.checkpoint import load_target_head, save_drafter
from honed.recalib.drafter.dflash import DFlashDrafter, DrafterConfig
from honed.recalib.drafter.drafter import Vocabulary
from honed.recalib.registry.head_of_target import extract_head
from tests.e2e.engine import DRAFTER, TARGET
from tests.e2e.swapping import renamed_drafter
from tests.zoo.mtp_targets import add_mtp_head, make_mimo_target, make_mtp_target
from tests.zoo.targets import NUM_LAYERS, TARGETS, VOCAB_SIZE, make_target

NUM_WORDS = 3072
"""Size of the reduced vocabulary."""
_SLIDING = {"use_sliding_window": True, "sliding_window": 24}


@dataclass(frozen=True)
class Pair:
    """How one pair is made and run."""

    target: str = ""
    """A family of `targets.TARGETS`; empty: the tiny target, which is trained."""
    drafter: dict[str, Any] = field(default_factory=dict)
    """Changes of the drafter's config.json."""
    change: Callable[[Path], None] | None = None
    """Changes its files."""
    is_sharded: bool = False
    eagle3: dict[str, Any] | None = None
    """Fields of an EAGLE-3 drafter's config.json, which takes the place of the DFlash one."""
    is_dspark: bool = False
    has_mtp: bool = False
    """Whether the target has an MTP head, which takes the place of the DFlash drafter."""
    runner: str = "v1"
    dtype: str = "float32"
    """Hybrids run in bfloat16 only on a CPU. Speculation itself changes tokens there, so it is on without honed too."""
    rounds_in_float32: bool = False
    """Whether vLLM's CPU build is off by a per cent in float32, too."""
    options: dict[str, Any] = field(default_factory=dict)
    """Engine arguments."""

    @property
    def is_rounded(self) -> bool:
        """Whether vLLM computes with fewer bits than float32's."""
        return self.dtype != "float32" or self.rounds_in_float32

    @property
    def method(self) -> str:
        """vLLM's speculative method."""
        return "mtp" if self.has_mtp else "dspark" if self.is_dspark else "dflash" if self.eagle3 is None else "eagle3"


def _reduce(folder: Path) -> None:
    reduce_vocabulary(folder, TARGET, torch.arange(VOCAB_SIZE)[-NUM_WORDS:])


def _rename(folder: Path) -> None:
    renamed = renamed_drafter(folder, folder.with_name("renamed"))
    shutil.rmtree(folder)
    renamed.rename(folder)


def _dspark_with_dflashs_rows(folder: Path) -> None:
    reduce_vocabulary(folder, TARGET, torch.arange(VOCAB_SIZE)[-NUM_WORDS:])
    make_dspark(folder, drafts_from_anchor=False, scale=0.1)


def _dflash(**changes: Any) -> dict[str, Any]:
    own: dict[str, Any] = json.loads((DRAFTER / "config.json").read_text())["dflash_config"]
    return {"dflash_config": own | changes}


_TEXT = {"language_model_only": True}
_DELTA = {"gdn_prefill_backend": "triton"}
"""On Hopper vLLM would take FlashInfer's kernel, and looks for it only when it needs it."""
PAIRS: dict[str, Pair] = {
    "llama": Pair("llama"),
    "qwen3-moe": Pair("qwen3-moe"),
    "gemma4": Pair("gemma4", runner="v2"),
    "gpt-oss": Pair("gpt-oss", runner="v2", rounds_in_float32=True),
    "qwen3-next": Pair("qwen3-next", dtype="bfloat16", options=_DELTA),
    "qwen3.5": Pair("qwen3.5", dtype="bfloat16", options=_TEXT | _DELTA),
    "qwen3-vl": Pair("qwen3-vl", options=_TEXT),
    "sharded": Pair("llama", is_sharded=True),
    "full": Pair(),
    "sliding": Pair(drafter=_SLIDING | {"layer_types": ["sliding_attention"] * 3} | _dflash(causal=False)),
    "sliding, causal": Pair(drafter=_SLIDING | {"layer_types": ["sliding_attention"] * 3}),
    "mixed": Pair(
        drafter=_SLIDING | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, runner="v2"
    ),
    "causal": Pair(drafter=_dflash(causal=True)),
    "reduced vocabulary": Pair(change=_reduce),
    "aliased names": Pair(change=_rename),
    "dflash2": Pair(change=make_dflash2, runner="v2"),
    "dspark": Pair(change=make_dspark, is_dspark=True, runner="v2"),
    "dspark, with dflash's rows": Pair(change=_dspark_with_dflashs_rows, is_dspark=True, runner="v2"),
    "partial rotation": Pair(drafter={"partial_rotary_factor": 0.5}),
    "scaled values": Pair(drafter=_dflash(attention_value_scale=0.75)),
    "eagle3": Pair(eagle3={}),
    "eagle3, residual normed": Pair(
        eagle3={"norm_before_residual": True, "draft_vocab_size": NUM_WORDS, "architectures": ["LlamaForCausalLM"]}
    ),
    "eagle3, features normed": Pair(eagle3={"fc_norm": True, "norm_before_fc": True, "norm_output": True}),
    "mtp": Pair(has_mtp=True),
    "mtp, gated": Pair("full attention", has_mtp=True),
    "mtp, experts": Pair("experts", has_mtp=True),
    "mtp, hybrid": Pair("qwen3.5", has_mtp=True, dtype="bfloat16", options=_TEXT | _DELTA),
    "mtp, qwen3-next": Pair("qwen3-next", has_mtp=True, dtype="bfloat16", options=_DELTA),
    "mtp, mimo": Pair("mimo", has_mtp=True, options={"trust_remote_code": True}),
    "eagle3, qwen3": Pair(eagle3={"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}),
}


def make(name: str, folder: Path) -> tuple[Path, Path]:
    """Write a pair's files; returns the folders of target and drafter."""
    pair = PAIRS[name]
    target, drafter = folder / "target", folder / "drafter"
    if pair.has_mtp:
        if pair.target == "mimo":
            make_mimo_target(target)
        elif pair.target in TARGETS:
            make_target(pair.target, target, getattr(torch, pair.dtype))
            add_mtp_head(target)
        else:
            make_mtp_target(target, is_tiny=not pair.target, has_experts=pair.target == "experts")
        drafter.mkdir()
        extract_head(target, drafter)
        return target, drafter
    if pair.target:
        make_target(pair.target, target, getattr(torch, pair.dtype), is_sharded=pair.is_sharded)
        _make_drafter(target, drafter)
    else:
        target = TARGET
        if pair.eagle3 is not None:
            _make_eagle3(target, drafter, pair.eagle3)
            return target, drafter
        shutil.copytree(DRAFTER, drafter)
    raw = json.loads((drafter / "config.json").read_text()) | pair.drafter
    (drafter / "config.json").write_text(json.dumps(raw))
    if pair.change is not None:
        pair.change(drafter)
    return target, drafter


def _make_drafter(target: Path, folder: Path) -> None:
    """Write a plain drafter with random weights."""
    head = load_target_head(target)
    raw = json.loads((DRAFTER / "config.json").read_text()) | {
        "hidden_size": head.embed_tokens.shape[1],
        "intermediate_size": 128,
        "head_dim": 32,
        "num_target_layers": NUM_LAYERS,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 2, 4]},
    }
    torch.manual_seed(1)
    drafter = DFlashDrafter(DrafterConfig.from_json(raw), Vocabulary(head.embed_tokens, head.lm_head))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    save_drafter(drafter, folder, folder, torch.float32)


def _make_eagle3(target: Path, folder: Path, changes: dict[str, Any]) -> None:
    """Write an EAGLE-3 drafter with random weights."""
    raw = eagle3_json(target, eagle_aux_hidden_state_layer_ids=[2, 3, 5], **changes)
    torch.manual_seed(1)
    num_words = raw.get("draft_vocab_size")
    words = torch.arange(VOCAB_SIZE)[-num_words:] if num_words else None
    write_eagle3(fresh_eagle3(target, raw, words), folder, raw, torch.float32)
