"""speculators' drafters, trained on honed's samples from honed's weights: their forward, their loss, our optimizer.

`make bench-against-speculators` puts the package into build/speculators, without what it depends on: beside it only `datasets`,
which it imports and doesn't need here, has to be something.

Its modules want the target's last hidden states before the final norm: these are the outputs of the target's last layer, the
last columns of the samples' features. DFlash draws its anchors inside, by `select_anchors`; here it gets those that honed's
trainer had. EAGLE-3 trains on every emitted token, as many steps on as are drafted. Its rows are shifted by one, as in
`shift_batch`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM

from benchmarks.server.processes import ROOT, ProcessError
from honed.recalib.config.training import TrainingSettings
from honed.recalib.drafter.drafter import Drafter
from honed.recalib.samples.sample import TrainingSample, pack

PACKAGE = ROOT / "build" / "speculators"
VERSION = "0.9.0"


def import_speculators(module: str) -> Any:
    """Import one of its modules. Raises ProcessError where the package isn't installed."""
    if not (PACKAGE / "speculators").is_dir():
        raise ProcessError(f"{PACKAGE}/speculators is missing: `make {PACKAGE.relative_to(ROOT)}` installs it")
    if str(PACKAGE) not in sys.path:
        sys.path.append(str(PACKAGE))
    if "datasets" not in sys.modules and importlib.util.find_spec("datasets") is None:
        names = ("Dataset", "DatasetDict", "load_dataset", "load_from_disk", "concatenate_datasets")
        sys.modules["datasets"] = types.ModuleType("datasets")
        sys.modules["datasets"].__dict__.update(dict.fromkeys(names))
    return importlib.import_module(f"speculators.{module}")


class Speculators(ABC):
    """A module of theirs with a drafter's weights, and the optimizer, schedule and accumulation of honed's trainer.

    Args:
        drafter: gives the weights; it isn't changed.
        target: gives embedding, head and norm.
        loss: one of its losses: "kl_div" is its default, "ce" against the target's best token.
    """

    def __init__(self, drafter: Drafter, target: Qwen3ForCausalLM, settings: TrainingSettings, loss: str) -> None:
        self._settings, self._drafter = settings, drafter
        self._loss = import_speculators("losses").resolve_loss_config(loss, "eager")
        self.model = self._make(drafter)
        self._load(drafter, target)
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        rate, decay = settings.learning_rate, settings.weight_decay
        self._optimizer = torch.optim.AdamW(self._trained, lr=rate, weight_decay=decay, fused=True)
        self._micro_steps = self._updates = 0

    @abstractmethod
    def _make(self, drafter: Drafter) -> nn.Module:
        """Make the module."""

    @abstractmethod
    def _forward(self, samples: Sequence[TrainingSample], anchors: Tensor) -> tuple[Tensor, int]:
        """Return the loss, and how many tokens it is of."""

    def copy_to(self, drafter: Drafter) -> None:
        """Copy the weights to a drafter of honed's."""
        theirs = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                parameter.copy_(theirs[name])

    def step(self, samples: Sequence[TrainingSample], anchors: Tensor, remaining: float = 1.0) -> int:
        """Do one micro-step, and every so many-th time an update, as `MicroTrainer.step` does; return the trained tokens."""
        settings = self._settings
        loss, num_tokens = self._forward(samples, anchors)
        (loss / settings.micro_steps_per_update).backward()  # type: ignore[no-untyped-call]
        self._micro_steps += 1
        if self._micro_steps % settings.micro_steps_per_update == 0:
            nn.utils.clip_grad_norm_(self._trained, settings.clip_norm)
            self._updates += 1
            schedule = min(1.0, self._updates / settings.warmup_updates) * min(1.0, remaining / settings.cooldown_share)
            self._optimizer.param_groups[0]["lr"] = settings.learning_rate * schedule
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return num_tokens

    def _load(self, drafter: Drafter, target: Qwen3ForCausalLM) -> None:
        head, embedding = target.lm_head.weight.detach(), target.model.embed_tokens.weight.detach()
        words = torch.arange(len(head)) if drafter.words is None else drafter.words
        weights = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
        weights |= {"embed_tokens.weight": embedding, "verifier_norm.weight": target.model.norm.weight.detach()}
        weights |= {"lm_head.weight": drafter.lm_head, "verifier_lm_head.weight": head[words]}
        if drafter.words is not None:
            is_word = torch.zeros(len(head), dtype=torch.bool).index_fill(0, words, True)
            weights |= {"t2d": is_word, "d2t": words - torch.arange(len(words))}
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        if missing or unexpected:
            raise ProcessError(f"speculators {VERSION} has other tensors: missing {missing}, unexpected {unexpected}")


class SpeculatorsDFlash(Speculators):
    """Their DFlash module."""

    def _make(self, drafter: Drafter) -> nn.Module:
        self._core = import_speculators("models.dflash.core")
        config = drafter.config
        made: nn.Module = self._core.DFlashDraftModel(
            self._core.DFlashSpeculatorConfig(
                transformer_layer_config=_layers(Qwen3Config, drafter),
                draft_vocab_size=config.num_words,
                block_size=config.num_draft_tokens + 1,
                aux_hidden_state_layer_ids=list(config.target_layer_ids),
                mask_token_id=config.mask_token_id,
            )
        )
        return made

    def _forward(self, samples: Sequence[TrainingSample], anchors: Tensor) -> tuple[Tensor, int]:
        packed, config = pack(list(samples)), self._drafter.config
        given = anchors, torch.ones(len(anchors), dtype=torch.bool)
        self._core.select_anchors = lambda *_: given
        _, loss, _ = self.model(
            hidden_states=packed.features[None, :, : config.feature_size],
            input_ids=packed.token_ids[None],
            loss_mask=torch.ones(1, len(packed.token_ids)),
            verifier_last_hidden_states=packed.features[None, :, -config.hidden_size :],
            document_ids=packed.segments[None],
            position_ids=packed.positions[None],
            loss_config=self._loss,
            gamma=self._settings.decay_tokens,
            max_anchors=len(anchors),
        )
        return loss, len(anchors) * config.num_draft_tokens


class SpeculatorsEagle3(Speculators):
    """Their EAGLE-3 module."""

    def _make(self, drafter: Drafter) -> nn.Module:
        core = import_speculators("models.eagle3.core")
        config, eagle3 = drafter.config, drafter.config.eagle3
        if eagle3 is None:
            raise ProcessError("the drafter isn't an EAGLE-3 one")
        made: nn.Module = core.Eagle3DraftModel(
            core.Eagle3SpeculatorConfig(
                transformer_layer_config=_layers(LlamaConfig, drafter),
                draft_vocab_size=config.num_words,
                norm_before_residual=eagle3.norm_before_residual,
                eagle_aux_hidden_state_layer_ids=list(range(eagle3.num_features)),
            )
        )
        return made

    @torch.no_grad()
    def logits(self, samples: Sequence[TrainingSample], anchors: Tensor) -> Tensor:  # [N] -> [N, K, W]
        """The logits of every unrolled step of these blocks, before any update."""
        steps: list[Tensor] = []
        hook = self.model.lm_head.register_forward_hook(lambda *given: steps.append(given[2][0]))
        self._forward(samples, anchors)
        hook.remove()
        # The row of an anchor is the one before its own, of rows of which each sample's first is missing.
        ends = torch.tensor([one.num_tokens for one in samples]).cumsum(0)
        rows = anchors - 1 - torch.searchsorted(ends, anchors, right=True)
        return torch.stack(steps, dim=1)[rows]

    def _forward(self, samples: Sequence[TrainingSample], anchors: Tensor) -> tuple[Tensor, int]:
        config = self._drafter.config
        features = torch.cat([one.features[:-1, : config.feature_size] for one in samples])
        goals = torch.cat([one.features[1:, -config.hidden_size :] for one in samples])
        token_ids, positions = (torch.cat([getattr(one, name)[1:] for one in samples]) for name in ("token_ids", "positions"))
        is_emitted = torch.cat([torch.arange(1, one.num_tokens) >= one.num_prompt_tokens for one in samples])
        documents = torch.cat([torch.full((one.num_tokens - 1,), i) for i, one in enumerate(samples)])
        _, loss, _ = self.model(
            hidden_states=features[None],
            input_ids=token_ids[None],
            document_ids=documents[None],
            loss_mask=is_emitted[None],
            position_ids=positions[None],
            verifier_last_hidden_states=goals[None],
            ttt_steps=config.num_draft_tokens,
            loss_config=self._loss,
        )
        return loss, int(is_emitted.sum()) * config.num_draft_tokens


def _layers(kind: type[PretrainedConfig], drafter: Drafter) -> PretrainedConfig:
    config = drafter.config
    return kind(
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
