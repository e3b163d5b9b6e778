"""speculators' DFlash module, trained on honed's samples from honed's weights: its forward, its loss, our optimizer.

`make bench-against-speculators` puts its package into build/speculators, without what it depends on: beside it only
`datasets`, which it imports and doesn't need here, has to be something.

Its anchors are drawn inside, by `select_anchors`; here it gets those that honed's trainer had. It wants the target's last
hidden states before the final norm: these are the outputs of the target's last layer, which the tiny drafter reads anyway.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.server.processes import ROOT, ProcessError
from honed.recalib.config.training import TrainingSettings
from honed.recalib.drafter.dflash import DFlashDrafter
from honed.recalib.samples.sample import PackedSamples

PACKAGE = ROOT / "build" / "speculators"
VERSION = "0.9.0"


def import_speculators() -> Any:
    """Import its DFlash module. Raises ProcessError where the package isn't installed."""
    if not (PACKAGE / "speculators").is_dir():
        raise ProcessError(f"{PACKAGE}/speculators is missing: `make {PACKAGE.relative_to(ROOT)}` installs it")
    if str(PACKAGE) not in sys.path:
        sys.path.append(str(PACKAGE))
    if "datasets" not in sys.modules and importlib.util.find_spec("datasets") is None:
        names = ("Dataset", "DatasetDict", "load_dataset", "load_from_disk", "concatenate_datasets")
        sys.modules["datasets"] = types.ModuleType("datasets")
        sys.modules["datasets"].__dict__.update(dict.fromkeys(names))
    import speculators.models.dflash.core as core

    return core


class SpeculatorsDFlash:
    """Its module with a drafter's weights, and the optimizer, schedule and accumulation of honed's trainer.

    Args:
        drafter: gives the weights; it isn't changed.
        target: gives embedding, head and norm.
        loss: one of its losses: "kl_div" is its default, "ce" against the target's best token.
    """

    def __init__(
        self, drafter: DFlashDrafter, target: Qwen3ForCausalLM, settings: TrainingSettings, loss: str = "kl_div"
    ) -> None:
        self._core = core = import_speculators()
        from speculators.losses import resolve_loss_config

        config = drafter.config
        layers = Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            attention_bias=config.attention_bias,
            attn_implementation="sdpa",
        )
        self.model: nn.Module = core.DFlashDraftModel(
            core.DFlashSpeculatorConfig(
                transformer_layer_config=layers,
                draft_vocab_size=config.num_words,
                block_size=config.num_draft_tokens + 1,
                aux_hidden_state_layer_ids=list(config.target_layer_ids),
                mask_token_id=config.mask_token_id,
            )
        )
        self._load(drafter, target)
        self._settings, self._loss = settings, resolve_loss_config(loss, "eager")
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        rate, decay = settings.learning_rate, settings.weight_decay
        self._optimizer = torch.optim.AdamW(self._trained, lr=rate, weight_decay=decay, fused=True)
        self._micro_steps = self._updates = 0

    def gradients(self) -> dict[str, Tensor]:
        """Gradients since the last update, by the names of honed's drafter."""
        return {name: p.grad for name, p in self.model.named_parameters() if p.requires_grad and p.grad is not None}

    def copy_to(self, drafter: DFlashDrafter) -> None:
        """Copy the weights to a drafter of honed's."""
        theirs = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                parameter.copy_(theirs[name])

    def step(self, packed: PackedSamples, anchors: Tensor, remaining: float = 1.0) -> float:
        """Do one micro-step, and every so many-th time an update, as `MicroTrainer.step` does; return the loss."""
        width = self.model.config.transformer_layer_config.hidden_size
        given = anchors, torch.ones(len(anchors), dtype=torch.bool)
        self._core.select_anchors = lambda *_: given
        _, loss, _ = self.model(
            hidden_states=packed.features[None],
            input_ids=packed.token_ids[None],
            loss_mask=torch.ones(1, len(packed.token_ids)),
            verifier_last_hidden_states=packed.features[None, :, -width:],
            document_ids=packed.segments[None],
            position_ids=packed.positions[None],
            loss_config=self._loss,
            gamma=self._settings.decay_tokens,
            max_anchors=len(anchors),
        )
        (loss / self._settings.micro_steps_per_update).backward()
        self._micro_steps += 1
        if self._micro_steps % self._settings.micro_steps_per_update == 0:
            self._update(remaining)
        return float(loss.detach())

    def _update(self, remaining: float) -> None:
        settings = self._settings
        nn.utils.clip_grad_norm_(self._trained, settings.clip_norm)
        self._updates += 1
        schedule = min(1.0, self._updates / settings.warmup_updates) * min(1.0, remaining / settings.cooldown_share)
        self._optimizer.param_groups[0]["lr"] = settings.learning_rate * schedule
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _load(self, drafter: DFlashDrafter, target: Qwen3ForCausalLM) -> None:
        head, embedding = target.lm_head.weight.detach(), target.model.embed_tokens.weight.detach()
        words = slice(None) if drafter.words is None else drafter.words
        weights = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
        weights |= {"embed_tokens.weight": embedding, "verifier_norm.weight": target.model.norm.weight.detach()}
        weights |= dict.fromkeys(("lm_head.weight", "verifier_lm_head.weight"), head[words])
        if drafter.words is not None:
            is_word = torch.zeros(len(head), dtype=torch.bool).index_fill(0, drafter.words, True)
            weights |= {"t2d": is_word, "d2t": drafter.words - torch.arange(len(drafter.words))}
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        if missing or unexpected:
            raise ProcessError(f"speculators {VERSION} has other tensors: missing {missing}, unexpected {unexpected}")
