"""Training in steps so small that serving never waits for one: a few blocks forward and backward, then control returns.

With scope "kv-frozen" everything the context keys and values depend on stays as it is (`KV_PATH`), so every row in vLLM's
paged cache stays exact for the new weights. With "full" everything trains, from unfused features, and a swap has to drop
the cache.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from honed.recalib import losses
from honed.recalib.blocks import block_labels, break_anchors, choose_anchors, eligible_anchors
from honed.recalib.drafter import KV_PATH, DFlashDrafter
from honed.recalib.evaluate import run_through
from honed.recalib.pace import Pace
from honed.recalib.sample import PackedSamples, TrainingSample, pack

Scope = Literal["kv-frozen", "full"]
Loss = Literal["ce", "kl", "hybrid", "dpace", "acceptance"]

# Letters: N blocks, K draft positions, V vocabulary.


@dataclass(frozen=True)
class TrainingSettings:
    """How to train on. The defaults are those measured on the tiny pair (`benchmarks/tiny/README.md`)."""

    scope: Scope = "kv-frozen"
    loss: Loss = "ce"
    learning_rate: float = 5e-4
    warmup_updates: int = 20
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    decay_tokens: float = 4.0
    anchors_per_micro_step: int = 32
    micro_steps_per_update: int = 2
    break_share: float = 0.5
    keep_weight: float = 3.0
    """Weight of a kept block beside a fresh one."""
    cooldown_share: float = 0.25
    """Last part of the training, over which the learning rate falls to zero; needs `remaining` in `step`."""
    seed: int = 0


@dataclass(frozen=True)
class StepFigures:
    """What one micro-step did, as sums and counts."""

    loss: float
    num_anchors: int
    num_tokens: int
    correct: tuple[int, ...]  # [K] right at each position, whatever came before
    counted: tuple[int, ...]  # [K]
    acceptance: losses.AcceptanceCounts
    is_update: bool
    grad_norm: float | None
    seconds: float


@dataclass
class _Progress:
    micro_steps: int = 0
    updates: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator)


class MicroTrainer:
    """Trains one drafter in place; the drafter's float32 parameters are the master weights.

    Args:
        parent: the drafter as it was, to which samples that are `kept` hold it; only needed for such samples.
    """

    def __init__(
        self, drafter: DFlashDrafter, settings: TrainingSettings | None = None, parent: DFlashDrafter | None = None
    ) -> None:
        self.drafter = drafter
        self._parent = parent
        self.settings = settings or TrainingSettings()
        set_scope(drafter, self.settings.scope)
        self._trained = [p for p in drafter.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained, lr=self.settings.learning_rate, weight_decay=self.settings.weight_decay, fused=True
        )
        self._progress = _Progress()
        self._progress.generator.manual_seed(self.settings.seed)

    @property
    def num_updates(self) -> int:
        """Optimizer updates so far."""
        return self._progress.updates

    def step(
        self,
        samples: Sequence[TrainingSample],
        preferred_anchors: Sequence[int] | None = None,
        *,
        kept: Sequence[bool] = (),
        remaining: float = 1.0,
    ) -> StepFigures:
        """One micro-step in one go; arguments and errors are those of `parts`."""
        return run_through(self.parts(samples, preferred_anchors, kept=kept, remaining=remaining))

    def parts(
        self,
        samples: Sequence[TrainingSample],
        preferred_anchors: Sequence[int] | None = None,
        *,
        kept: Sequence[bool] = (),
        remaining: float = 1.0,
        pace: Pace | None = None,
    ) -> Generator[None, None, StepFigures]:
        """One micro-step, a few blocks at a time; every `micro_steps_per_update`-th also updates the weights.

        Between two parts control returns, by a `yield`, so that serving needs to wait for one of them only. How the blocks are
        divided makes no difference to the weights but for rounding.

        Args:
            samples: what to draw anchors from; all the context in them is attended to, so its size sets the cost.
            preferred_anchors: rows, counted through `samples` end to end; by default those before the samples' breaks.
            kept: for each sample, whether the drafter is to stay what its parent was there, rather than to learn its labels:
                KL(parent || drafter). Replayed labels are few and are soon learnt by heart; the parent's distribution says
                more about the old traffic than they do. Source: learning without forgetting, arXiv 1606.09282, section 3.
            remaining: part of the training that is left, for the cool-down.
            pace: how many blocks a part has; None: all of them.

        Raises:
            ValueError: when no sample is long enough for a block, or the scope needs features the samples don't have.
        """
        began_s = time.perf_counter()
        packed = pack(list(samples))
        self._check_features(packed)
        anchors = self._choose(packed, samples, preferred_anchors)
        labels = block_labels(packed.token_ids, anchors, self.drafter.config.num_draft_tokens)
        is_kept = torch.tensor([*kept] or [False] * len(samples))[packed.segments[anchors]]  # [N]
        logits, loss, done, spent_s = [], 0.0, 0, 0.0
        while done < len(anchors):
            part = slice(done, done + (pace.blocks(len(anchors) - done) if pace else len(anchors)))
            context = self._context(packed)
            logits.append(self.drafter(context, packed.positions, packed.token_ids, anchors[part], packed.segments))
            part_loss = self._mixed_loss(logits[-1], labels[part], packed, anchors[part], is_kept[part], context)
            share = len(anchors[part]) / len(anchors)
            (part_loss * share / self.settings.micro_steps_per_update).backward()  # type: ignore[no-untyped-call]
            loss, done = loss + float(part_loss.detach()) * share, done + len(anchors[part])
            logits[-1] = logits[-1].detach()
            part_s = time.perf_counter() - began_s
            if pace is not None:
                pace.observe(len(anchors[part]), part_s)
            spent_s += part_s
            yield
            began_s = time.perf_counter()
        self._progress.micro_steps += 1
        is_update = self._progress.micro_steps % self.settings.micro_steps_per_update == 0
        grad_norm = self._update(remaining) if is_update else None
        return _figures(torch.cat(logits), labels, loss, is_update, grad_norm, spent_s + time.perf_counter() - began_s)

    def _check_features(self, packed: PackedSamples) -> None:
        if self.settings.scope == "full" and packed.is_fused:
            raise ValueError("scope 'full' trains fc and needs unfused features; capture them, or use 'kv-frozen'")
        if self.settings.loss in ("kl", "hybrid") and packed.target_hidden is None:
            raise ValueError(f"loss {self.settings.loss!r} needs target_hidden in every sample; capture it, or use 'ce'")

    def _choose(
        self, packed: PackedSamples, samples: Sequence[TrainingSample], preferred: Sequence[int] | None
    ) -> Tensor:  # [N]
        num_draft_tokens = self.drafter.config.num_draft_tokens
        eligible = eligible_anchors(packed, num_draft_tokens)
        if not len(eligible):
            raise ValueError(f"no sample has {num_draft_tokens + 2} tokens, so none holds a whole block")
        rows = break_anchors(samples, num_draft_tokens) if preferred is None else preferred
        settings = self.settings
        return choose_anchors(eligible, settings.anchors_per_micro_step, rows, settings.break_share, self._progress.generator)

    def _context(self, packed: PackedSamples) -> Tensor:  # [T, H]
        features = packed.features.float()
        return features if packed.is_fused else self.drafter.fuse(features)

    def _mixed_loss(
        self, logits: Tensor, labels: Tensor, packed: PackedSamples, anchors: Tensor, is_kept: Tensor, context: Tensor
    ) -> Tensor:
        """Mean over blocks: the chosen loss on fresh ones, the distance to the parent on kept ones."""
        num_kept = int(is_kept.sum())
        total = logits.new_zeros(())
        if num_kept:
            if self._parent is None:
                raise ValueError("kept samples need the parent drafter: give it to MicroTrainer")
            with torch.no_grad():
                features = context if packed.is_fused else self._parent.fuse(packed.features.float())
                goal = self._parent(features, packed.positions, packed.token_ids, anchors[is_kept], packed.segments)
            weights = losses.position_weights(labels.shape[1], self.settings.decay_tokens).expand(num_kept, -1)
            distance = losses.weighted_mean(losses.forward_kl(logits[is_kept], goal), weights)
            total = total + self.settings.keep_weight * num_kept * distance
        if num_kept < len(anchors):
            fresh = ~is_kept
            total = total + (len(anchors) - num_kept) * self._loss(logits[fresh], labels[fresh], packed, anchors[fresh])
        return total / len(anchors)

    def _loss(self, logits: Tensor, labels: Tensor, packed: PackedSamples, anchors: Tensor) -> Tensor:
        """The weighted mean of the chosen loss over the blocks; `losses` has the formulas."""
        weights = losses.position_weights(labels.shape[1], self.settings.decay_tokens).expand(labels.shape)
        name = self.settings.loss
        if name == "ce":
            return losses.weighted_mean(losses.cross_entropy(logits, labels), weights)
        if name in ("kl", "hybrid"):
            assert packed.target_hidden is not None
            rows = anchors[:, None] + torch.arange(labels.shape[1])  # the target at row i tells token i + 1
            target_logits = F.linear(packed.target_hidden[rows].float(), self.drafter.lm_head)
            per_token = losses.forward_kl if name == "kl" else losses.kl_tv_hybrid
            return losses.weighted_mean(per_token(logits, target_logits), weights)
        right = torch.exp(-losses.cross_entropy(logits, labels))
        if name == "dpace":
            return losses.weighted_mean(losses.cross_entropy(logits, labels), losses.dpace_weights(right))
        return losses.negative_acceptance_length(right).mean()

    def _update(self, remaining: float) -> float:
        """Clip, warm up or cool down, step."""
        norm = nn.utils.clip_grad_norm_(self._trained, self.settings.clip_norm)
        self._progress.updates += 1
        warmth = min(1.0, self._progress.updates / max(1, self.settings.warmup_updates))
        if self.settings.cooldown_share > 0:
            warmth *= min(1.0, max(0.0, remaining) / self.settings.cooldown_share)
        self._optimizer.param_groups[0]["lr"] = self.settings.learning_rate * warmth
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)


def set_scope(drafter: DFlashDrafter, scope: Scope) -> None:
    """Let exactly the parameters of the scope receive gradients."""
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(scope == "full" or not is_kv_path(name))


def is_kv_path(name: str) -> bool:
    """Whether cached context keys and values depend on this parameter."""
    return any(part in f".{name}" if part.startswith(".") else name.startswith(part) for part in KV_PATH)


def _figures(
    logits: Tensor, labels: Tensor, loss: float, is_update: bool, grad_norm: float | None, seconds: float
) -> StepFigures:
    drafts = logits.argmax(-1)  # [N, K]
    return StepFigures(
        loss=loss,
        num_anchors=len(labels),
        num_tokens=labels.numel(),
        correct=tuple(int(n) for n in (drafts == labels).sum(0)),
        counted=(len(labels),) * labels.shape[1],
        acceptance=losses.count_acceptance(drafts, labels, torch.ones_like(labels, dtype=torch.bool)),
        is_update=is_update,
        grad_norm=grad_norm,
        seconds=seconds,
    )
