"""Training in steps so small that serving never waits for one: a few blocks forward and backward, then a yield.

Scope "kv-frozen" leaves the parameters behind context keys and values unchanged (`makes_context`). So every row in vLLM's
paged cache stays exact for the new weights. Scope "full" trains everything, from unfused features, and a swap must drop the
cache.

One generator makes all random choices. So the same seed and samples give the same weights, even if the training was interrupted
between two updates and resumed from `state`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from honed.adapt.models.drafter_tensor_names import makes_context
from honed.recalib.config.training import Scope, TrainingSettings
from honed.recalib.drafter.drafter import Drafter
from honed.recalib.samples.sample import PackedSamples, TrainingSample, pack
from honed.recalib.training.blocks import block_goals, block_labels, break_anchors, choose_anchors, eligible_anchors, is_reached
from honed.recalib.training.objective import Blocks, Objective
from honed.recalib.training.pace import Pace, run_through
from honed.recalib.training.precision import compute_dtype, computing

__all__ = ["MicroTrainer", "Scope", "StepFigures", "TrainingSettings", "set_scope"]

# Letters: N blocks, K draft positions.

GROUP_NUMBERS = 1 << 25
"""Numbers that the optimizer updates at a time. It moves 28 bytes for each: a third of a millisecond at an H100's bandwidth."""


@dataclass(frozen=True)
class StepFigures:
    """Figures of one micro-step, all known without another wait for the device."""

    loss: float
    num_tokens: int
    """Tokens that were learned."""
    is_update: bool
    grad_norm: float | None
    """None between two updates; NaN or infinite if the update was dropped, since the loss or the gradient wasn't finite."""


@dataclass
class _Progress:
    micro_steps: int = 0
    updates: int = 0
    is_finite: bool = True
    """Whether every loss since the last update was."""
    generator: torch.Generator = field(default_factory=torch.Generator)


class MicroTrainer:
    """Trains one drafter in place; the drafter's float32 parameters are the master weights.

    Args:
        parent: the original drafter, needed only for samples that are `kept`.
    """

    def __init__(self, drafter: Drafter, settings: TrainingSettings | None = None, parent: Drafter | None = None) -> None:
        self.drafter = drafter
        self.settings = settings or TrainingSettings()
        set_scope(drafter, self.settings.scope)
        drafter.recomputes_layers = self.settings.gradient_checkpointing
        self._device = drafter.device
        self._dtype = compute_dtype(self._device, self.settings.precision)
        self._objective = Objective(drafter, parent, self.settings)
        self._names = [name for name, p in drafter.named_parameters() if p.requires_grad]
        self._trained = [p for p in drafter.parameters() if p.requires_grad]
        rate, decay = self.settings.learning_rate, self.settings.weight_decay
        self._optimizers = [
            torch.optim.AdamW(group, lr=rate, weight_decay=decay, fused=True) for group in _grouped(self._trained)
        ]
        self._progress = _Progress()
        self._progress.generator.manual_seed(self.settings.seed)

    @property
    def num_updates(self) -> int:
        """Optimizer updates so far."""
        return self._progress.updates

    @property
    def is_between_updates(self) -> bool:
        """Return whether no gradients are pending: the time for `state`."""
        return self._progress.micro_steps % self.settings.micro_steps_per_update == 0

    def step(
        self,
        samples: Sequence[TrainingSample],
        preferred_anchors: Sequence[int] | None = None,
        *,
        kept: Sequence[bool] = (),
        remaining: float = 1.0,
    ) -> StepFigures:
        """Do one whole micro-step; arguments and errors are those of `parts`."""
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
        """Do one micro-step, a few blocks at a time; every `micro_steps_per_update`-th also updates the weights.

        There is a `yield` between two parts, so that serving waits for at most one of them. The division of the blocks changes
        the weights only by rounding.

        Args:
            samples: source of the anchors; all their context is attended to, so its size sets the cost.
            preferred_anchors: rows, counted through `samples` end to end; by default those before the samples' breaks.
            kept: for each sample, whether the drafter should stay like its parent there instead of learning the labels:
                KL(parent || drafter). Stored labels are few and soon memorised; the parent's distribution says more about the
                old traffic. Source: learning without forgetting, arXiv 1606.09282, section 3.
            remaining: remaining share of the training, for the cool-down.
            pace: sets the blocks of a part; None: all of them.

        Raises:
            ValueError: no sample has anything to draft, or the samples lack features that the scope needs.
        """
        packed = pack(list(samples))
        self._check_features(packed)
        blocks, num_tokens = self._choose(packed, samples, preferred_anchors, kept)
        loss, done = 0.0, 0
        while done < len(blocks.anchors):
            part_began_s = time.perf_counter()
            left = len(blocks.anchors) - done
            part = blocks.where(slice(done, done + (pace.blocks(left) if pace else left)))
            part_loss = self._learn(part)
            loss, done = loss + part_loss, done + len(part.anchors)
            self._progress.is_finite &= math.isfinite(part_loss)
            if pace is not None:
                pace.observe(len(part.anchors), time.perf_counter() - part_began_s)
            yield
        self._progress.micro_steps += 1
        grad_norm, updating = None, self._update(remaining)
        while self.is_between_updates:
            try:
                next(updating)
            except StopIteration as end:
                grad_norm = end.value
                break
            yield
        is_update = grad_norm is not None and math.isfinite(grad_norm)
        return StepFigures(loss, num_tokens, is_update, grad_norm)

    def state(self) -> dict[str, Tensor]:
        """Return all that the next step depends on, apart from the samples; only between two updates, not within `parts`.

        The tensors are the trainer's own: write them out before the next step.
        """
        assert self.is_between_updates
        progress = self._progress
        counts = torch.tensor([progress.micro_steps, progress.updates])
        state = {"counts": counts, "generator": progress.generator.get_state()}
        for name, parameter in zip(self._names, self._trained, strict=True):
            state[f"weights/{name}"] = parameter.detach()
            for optimizer in self._optimizers:
                state |= {f"adam/{key}/{name}": value for key, value in optimizer.state.get(parameter, {}).items()}
        return state

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Resume from `state`, with the same settings and a drafter of the same shape.

        Raises:
            KeyError, RuntimeError: it was taken with other settings or of another drafter.
        """
        self._progress.micro_steps, self._progress.updates = (int(n) for n in state["counts"])
        self._progress.generator.set_state(state["generator"])
        optimizer_of = {p: optimizer for optimizer in self._optimizers for p in optimizer.param_groups[0]["params"]}
        for name, parameter in zip(self._names, self._trained, strict=True):
            parameter.copy_(state[f"weights/{name}"])
            if self._progress.updates:
                keys = ("step", "exp_avg", "exp_avg_sq")
                moments = {k: state[f"adam/{k}/{name}"].to(parameter.device) for k in keys}
                optimizer_of[parameter].state[parameter] = moments

    def _check_features(self, packed: PackedSamples) -> None:
        if self.settings.scope == "full" and packed.is_fused:
            raise ValueError("scope 'full' trains fc and needs unfused features; capture them, or use 'kv-frozen'")

    def _choose(
        self,
        packed: PackedSamples,
        samples: Sequence[TrainingSample],
        preferred: Sequence[int] | None,
        kept: Sequence[bool],
    ) -> tuple[Blocks, int]:
        """Choose the micro-step's blocks; also return how many of their tokens are learned, counted on the CPU."""
        settings, k, generator = self.settings, self.drafter.config.num_draft_tokens, self._progress.generator
        eligible = eligible_anchors(packed)
        if not len(eligible):
            raise ValueError("no sample has two emitted tokens after a context, so none holds a draft")
        rows = break_anchors(samples, k) if preferred is None else preferred
        anchors = choose_anchors(eligible, settings.anchors_per_micro_step, rows, settings.break_share, generator)
        (labels, has_label), goals = block_labels(packed, anchors, k), block_goals(packed, anchors, k)
        is_kept = torch.tensor([*kept] or [False] * len(samples))[packed.segments[anchors]]  # [N]
        has_label &= is_kept[:, None] | is_reached(labels, goals)
        num_tokens = int(has_label.sum())
        chosen = (anchors, labels, goals, has_label, is_kept)
        anchors, labels, goals, has_label, is_kept = (tensor.to(self._device) for tensor in chosen)
        words = self.drafter.to_words(goals)
        weights = self._objective.weights(is_kept, has_label, words)
        return Blocks(packed.to(self._device), anchors, labels, words, is_kept, weights), num_tokens

    def _learn(self, part: Blocks) -> float:
        """Add up the gradients of some blocks; return their loss. Reading it waits for the device."""
        packed = part.packed
        with computing(self._device, self._dtype):
            context = self._context(packed)
            hidden = self.drafter.draft_hidden(context, packed.positions, packed.token_ids, part.anchors, packed.segments)
            loss = self._objective(hidden, part, context)
        (loss / self.settings.micro_steps_per_update).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _context(self, packed: PackedSamples) -> Tensor:  # [T, H]
        features = packed.features.float()
        return features if packed.is_fused else self.drafter.fuse(features)

    def _update(self, remaining: float) -> Generator[None, None, float]:
        """Clip, set the learning rate, step; drop the gradients instead if something in them isn't finite.

        There is a `yield` between groups of parameters; the device is done with one then. Returns the gradient's norm.
        """
        norm = float(nn.utils.clip_grad_norm_(self._trained, self.settings.clip_norm))
        is_finite, self._progress.is_finite = self._progress.is_finite, True
        if not (is_finite and math.isfinite(norm)):
            for parameter in self._trained:
                parameter.grad = None
            return math.nan
        self._progress.updates += 1
        schedule = min(1.0, self._progress.updates / max(1, self.settings.warmup_updates))
        if self.settings.cooldown_share > 0:
            schedule *= min(1.0, max(0.0, remaining) / self.settings.cooldown_share)
        for number, optimizer in enumerate(self._optimizers):
            if number:
                yield
            optimizer.param_groups[0]["lr"] = self.settings.learning_rate * schedule
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        return norm


def _grouped(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split into groups of at most GROUP_NUMBERS, or of one parameter: one at a time, none holds the device for long."""
    groups, size = list[list[nn.Parameter]](), GROUP_NUMBERS
    for parameter in parameters:
        if size + parameter.numel() > GROUP_NUMBERS:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.numel()
    return groups


def set_scope(drafter: Drafter, scope: Scope) -> None:
    """Let only the parameters of the scope receive gradients."""
    for name, parameter in drafter.named_parameters():
        is_frozen = scope != "full" and makes_context(name, drafter.config.method)
        parameter.requires_grad_(not is_frozen and name not in drafter.UNTRAINED)
