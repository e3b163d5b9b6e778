"""Micro-steps train exactly their scope, keep cached keys and values valid, and are the same for the same seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from honed.adapt.models.drafter_tensor_names import makes_context
from honed.recalib.drafter.dflash import DFlashDrafter
from honed.recalib.gate.evaluate import expected_acceptance_length
from honed.recalib.samples.sample import TrainingSample
from honed.recalib.training import micro_step
from honed.recalib.training.micro_step import MicroTrainer, Scope, TrainingSettings
from honed.recalib.training.pace import Pace, run_through

MakeDrafter = Callable[..., DFlashDrafter]
MakeSample = Callable[..., TrainingSample]
QUICK = TrainingSettings(anchors_per_micro_step=8, micro_steps_per_update=1, warmup_updates=1, learning_rate=1e-2)


def weights(drafter: DFlashDrafter) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in drafter.state_dict().items()}


def test_kv_frozen_trains_exactly_what_the_cache_does_not_depend_on(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter, sample = make_drafter(), make_sample()
    before, cached = weights(drafter), drafter.context_keys_values(sample.features, sample.positions)
    trainer = MicroTrainer(drafter, QUICK)
    for _ in range(3):
        trainer.step([sample])
    changed = {name for name, tensor in drafter.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if not makes_context(name, "dflash")}
    for (old_k, old_v), (k, v) in zip(cached, drafter.context_keys_values(sample.features, sample.positions), strict=True):
        assert torch.equal(k, old_k)
        assert torch.equal(v, old_v)


def test_the_frozen_parameters_are_those_of_the_design(make_drafter: MakeDrafter) -> None:
    frozen = {name for name in make_drafter().state_dict() if makes_context(name, "dflash")}
    layer = {f"layers.{i}.self_attn.{part}.weight" for i in range(2) for part in ("k_proj", "v_proj", "k_norm")}
    assert frozen == {"fc.weight", "hidden_norm.weight"} | layer


def test_full_scope_trains_everything(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter = make_drafter()
    before = weights(drafter)
    MicroTrainer(drafter, replace(QUICK, scope="full")).step([make_sample(is_fused=False)])
    assert not [name for name, tensor in drafter.state_dict().items() if torch.equal(tensor, before[name])]


def test_full_scope_refuses_fused_features(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    with pytest.raises(ValueError, match="needs unfused features"):
        MicroTrainer(make_drafter(), replace(QUICK, scope="full")).step([make_sample()])


def test_the_target_is_never_trained(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter = make_drafter()
    embed, head = drafter.embed_tokens.clone(), drafter.lm_head.clone()
    MicroTrainer(drafter, QUICK).step([make_sample()])
    assert torch.equal(drafter.embed_tokens, embed)
    assert torch.equal(drafter.lm_head, head)


def test_same_seed_same_weights(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    results = []
    for seed in (0, 0, 1):
        drafter = make_drafter()
        trainer = MicroTrainer(drafter, replace(QUICK, seed=seed))
        for _ in range(4):
            trainer.step([make_sample(60)])
        results.append(weights(drafter)["norm.weight"])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_weights_change_only_when_enough_micro_steps_are_gathered(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter = make_drafter()
    before = weights(drafter)
    trainer = MicroTrainer(drafter, replace(QUICK, micro_steps_per_update=3))
    figures = [trainer.step([make_sample()]) for _ in range(2)]
    assert torch.equal(weights(drafter)["norm.weight"], before["norm.weight"])
    figures.append(trainer.step([make_sample()]))
    assert not torch.equal(weights(drafter)["norm.weight"], before["norm.weight"])
    assert [f.is_update for f in figures] == [False, False, True]
    assert trainer.num_updates == 1


def test_training_learns(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter, sample = make_drafter(), make_sample()
    trainer = MicroTrainer(drafter, QUICK)
    figures = [trainer.step([sample]) for _ in range(60)]
    assert figures[-1].loss < 0.5 * figures[0].loss


def test_all_tokens_of_all_blocks_are_learned(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    assert MicroTrainer(make_drafter(), QUICK).step([make_sample()]).num_tokens == 8 * 3


class Reads(TorchDispatchMode):
    """Counts single numbers that are read from tensors: on a GPU each one waits for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_micro_step_reads_its_loss_and_nothing_more(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """After the last of its blocks, where the weights aren't updated, nothing waits for the device."""
    parts = MicroTrainer(make_drafter(), replace(QUICK, micro_steps_per_update=2)).parts([make_sample()])
    next(parts)
    with Reads() as reads, pytest.raises(StopIteration):
        next(parts)
    assert reads.count == 0


def test_preferred_anchors_are_chosen_first(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """With a share of one and as many preferred rows as anchors, changing anything else has no effect."""
    settings = replace(QUICK, anchors_per_micro_step=2, break_share=1.0)
    results = []
    for seed in (0, 1):
        trainer = MicroTrainer(make_drafter(), replace(settings, seed=seed))
        results.append(trainer.step([make_sample()], preferred_anchors=[4, 9]).loss)
    assert results[0] == pytest.approx(results[1])


def test_breaks_draw_anchors_whose_block_reaches_them(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """A break at position 110 of a stretch begun at 100 is row 10, reached from rows 7, 8 and 9."""
    settings = replace(QUICK, anchors_per_micro_step=3, break_share=1.0)
    broken = make_sample(first_position=100, break_positions=(110,))
    by_break = MicroTrainer(make_drafter(), settings).step([broken]).loss
    by_hand = MicroTrainer(make_drafter(), settings).step([broken], preferred_anchors=[7, 8, 9]).loss
    assert by_break == pytest.approx(by_hand)


def test_where_the_target_sampled_nothing_is_learned_beyond_a_token_that_no_draft_would_be(
    make_drafter: MakeDrafter, make_sample: MakeSample
) -> None:
    """Its gradients are those of an answer that ends there, with that token's place taken by the most likely one."""
    drafter, sample = make_drafter(), make_sample()
    anchor, likely = 5, torch.full_like(sample.token_ids, -1)
    likely[anchor + 1] = (sample.token_ids[anchor + 2] + 1) % drafter.config.vocab_size  # of the block's second token
    drawn = replace(sample, likely=likely)
    ids = sample.token_ids[: anchor + 3].clone()
    ids[-1] = likely[anchor + 1]
    ended = replace(
        sample,
        features=sample.features[: len(ids)],
        token_ids=ids,
        positions=sample.positions[: len(ids)],
    )
    for kept, is_same in (((), True), ((True,), False)):
        found = []
        for given in (drawn, ended):
            trainer = MicroTrainer(make_drafter(), replace(QUICK, anchors_per_micro_step=1, break_share=1.0), make_drafter())
            found.append(trainer.step([given], [anchor], kept=kept).num_tokens)
            found.append(trainer.step([given], [anchor], kept=kept).loss)
        assert (found[:2] == pytest.approx(found[2:])) == is_same
        assert (found[0] == 2) == is_same


def test_samples_with_nothing_to_draft_are_refused(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    with pytest.raises(ValueError, match="no sample has two emitted tokens"):
        MicroTrainer(make_drafter(), QUICK).step([make_sample(9, num_prompt_tokens=8)])
    with pytest.raises(ValueError, match="at least one sample"):
        MicroTrainer(make_drafter(), QUICK).step([])


def distance_to(parent: DFlashDrafter, drafter: DFlashDrafter, sample: TrainingSample) -> float:
    """Mean KL(parent || drafter) over a sample's blocks."""
    anchors = torch.arange(1, sample.num_tokens - drafter.config.num_draft_tokens - 1)
    with torch.no_grad():
        p, q = (d(sample.features, sample.positions, sample.token_ids, anchors).log_softmax(-1) for d in (parent, drafter))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_kept_samples_hold_the_drafter_to_its_parent(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """A fresh sample is learnt; on a evaluated one the drafter stays nearer to what it was than if it learnt that one too."""
    parent, fresh, evaluated = make_drafter(), make_sample(), make_sample(seed=1)
    drifts = []
    for kept in ([False, True], [False, False]):
        drafter = make_drafter()
        trainer = MicroTrainer(drafter, QUICK, parent)
        first = trainer.step([fresh, evaluated], kept=kept).loss
        for _ in range(30):
            last = trainer.step([fresh, evaluated], kept=kept).loss
        assert last < first
        assert distance_to(parent, drafter, fresh) > 0.05
        drifts.append(distance_to(parent, drafter, evaluated))
    assert drifts[0] < 0.5 * drifts[1]


def test_a_drafter_that_only_keeps_does_not_move(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter, sample = make_drafter(), make_sample()
    figures = MicroTrainer(drafter, QUICK, make_drafter()).step([sample], kept=[True])
    assert figures.loss == pytest.approx(0.0, abs=1e-6)
    assert figures.grad_norm == pytest.approx(0.0, abs=1e-5)


def test_kept_samples_without_a_parent_are_refused(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    with pytest.raises(ValueError, match="need the parent"):
        MicroTrainer(make_drafter(), QUICK).step([make_sample()], kept=[True])


def test_the_learning_rate_cools_down_to_nothing(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter, sample = make_drafter(), make_sample()
    trainer = MicroTrainer(drafter, QUICK)
    before = weights(drafter)
    trainer.step([sample], remaining=0.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
    trainer.step([sample], remaining=0.5)
    assert trainer._optimizers[0].param_groups[0]["lr"] == QUICK.learning_rate
    trainer.step([sample], remaining=0.1)
    assert trainer._optimizers[0].param_groups[0]["lr"] == pytest.approx(0.4 * QUICK.learning_rate)


class EveryOther(Pace):
    """A pace of 3 blocks, then 1, then 3, …"""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.sizes: list[int] = []

    def blocks(self, wanted: int) -> int:
        return min(wanted, 3 if len(self.sizes) % 2 == 0 else 1)

    def observe(self, num_blocks: int, seconds: float) -> None:
        self.sizes.append(num_blocks)


@pytest.mark.parametrize(
    "change",
    [{}, {"scope": "full"}, {"gradient_checkpointing": True}],
    ids=str,
)
def test_how_a_micro_step_is_divided_makes_no_difference(
    change: dict[str, object], make_drafter: MakeDrafter, make_sample: MakeSample
) -> None:
    """Parts are of one or three blocks, fresh and kept ones together.

    Gradients are compared, not weights: Adam makes as much of a gradient that is rounding alone as of any other.
    """
    settings = replace(QUICK, micro_steps_per_update=3, **change)  # type: ignore[arg-type]
    samples = [make_sample(seed=seed, is_fused=settings.scope != "full") for seed in range(2)]
    whole, divided, parent, pace = make_drafter(), make_drafter(), make_drafter(), EveryOther()
    with torch.no_grad():
        parent.norm.weight.mul_(1.1)
    one, other = MicroTrainer(whole, settings, parent), MicroTrainer(divided, settings, parent)
    for _ in range(3):
        for a, b in zip(whole.parameters(), divided.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
        expected = one.step(samples, kept=[False, True])
        found = run_through(other.parts(samples, kept=[False, True], pace=pace))
        assert found.loss == pytest.approx(expected.loss, rel=1e-4)
        assert found.grad_norm == (expected.grad_norm and pytest.approx(expected.grad_norm, rel=1e-4))
        same = {"loss": 0.0, "grad_norm": None}
        assert replace(found, **same) == replace(expected, **same)
    assert len(pace.sizes) > 3
    assert one.num_updates == other.num_updates == 1


@pytest.mark.parametrize("change", [{}, {"scope": "full"}], ids=str)
def test_a_training_taken_up_again_ends_with_the_same_weights(
    change: dict[str, object], make_drafter: MakeDrafter, make_sample: MakeSample
) -> None:
    settings = replace(QUICK, micro_steps_per_update=2, **change)  # type: ignore[arg-type]
    samples = [make_sample(60, seed=s, is_fused=settings.scope != "full") for s in range(3)]

    def train(trainer: MicroTrainer, steps: range) -> None:
        for i in steps:
            trainer.step([samples[i % 3]], remaining=1.0 - i / 10)

    whole = MicroTrainer(make_drafter(), settings)
    train(whole, range(10))
    broken = MicroTrainer(make_drafter(), settings)
    train(broken, range(4))
    saved = {name: tensor.clone() for name, tensor in broken.state().items()}
    train(broken, range(4, 7))  # what was done after the last saving is done again
    taken_up = MicroTrainer(make_drafter(), settings)
    taken_up.load_state(saved)
    assert taken_up.num_updates == 2
    train(taken_up, range(4, 10))
    assert_same_weights(whole.drafter, taken_up.drafter)


def assert_same_weights(one: DFlashDrafter, other: DFlashDrafter) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize("scope", ["kv-frozen", "full"])
def test_gradient_checkpointing_changes_no_weight(scope: Scope, make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafters = []
    for is_checkpointing in (False, True):
        drafters.append(make_drafter())
        trainer = MicroTrainer(drafters[-1], replace(QUICK, scope=scope, gradient_checkpointing=is_checkpointing))
        for _ in range(3):
            trainer.step([make_sample(is_fused=scope != "full")])
    for name, tensor in drafters[0].state_dict().items():
        torch.testing.assert_close(tensor, drafters[1].state_dict()[name])


def test_what_follows_an_answer_teaches_nothing(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """A short answer gives the same gradients alone and before another one, whose tokens its blocks reach into."""
    settings = QUICK
    short, other = make_sample(10, num_prompt_tokens=7), make_sample(20, num_prompt_tokens=19, seed=5)
    drafters = []
    for samples in ([short], [short, other]):
        drafters.append(make_drafter())
        figures = MicroTrainer(drafters[-1], settings).step(samples)
        assert figures.num_tokens == 3, "two tokens after the first, one after the second"
        assert figures.is_update
    for alone, before_another in zip(*(drafter.parameters() for drafter in drafters), strict=True):
        torch.testing.assert_close(alone, before_another, rtol=1e-5, atol=1e-6)


def test_answers_shorter_than_a_block_are_learned(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    sample = make_sample(10, num_prompt_tokens=7)
    drafter = make_drafter()
    before = expected_acceptance_length(drafter, [sample]).acceptance_length()
    trainer = MicroTrainer(drafter, QUICK)
    for _ in range(60):
        trainer.step([sample])
    (figures,) = expected_acceptance_length(drafter, [sample]).sessions
    assert (figures.num_rounds, figures.num_round_accepted_tokens) == (1, 2), "both tokens after the first"
    assert before < 3.0


@pytest.mark.fault("captured rows that aren't finite")
def test_an_update_without_a_finite_loss_is_dropped(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """Weights and moments stay finite, and the next update goes on from them."""
    drafter = make_drafter()
    trainer = MicroTrainer(drafter, replace(QUICK, micro_steps_per_update=2))
    for _ in range(2):
        trainer.step([make_sample()])
    before = weights(drafter)
    broken = replace(make_sample(), features=torch.full((30, 16), 3e38))
    figures = [trainer.step([sample]) for sample in (make_sample(), broken)]
    assert (figures[1].is_update, trainer.num_updates, trainer.is_between_updates) == (False, 1, True)
    assert figures[1].grad_norm is not None
    assert not math.isfinite(figures[1].grad_norm)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(drafter).items())
    figures = [trainer.step([make_sample()]) for _ in range(2)]
    assert figures[1].is_update
    assert all(tensor.isfinite().all() for tensor in trainer.state().values() if tensor.is_floating_point())
    assert not torch.equal(weights(drafter)["norm.weight"], before["norm.weight"])


@pytest.mark.parametrize("most", [1, 300, 1 << 25])
def test_an_update_in_groups_is_the_same_update(
    most: int, make_drafter: MakeDrafter, make_sample: MakeSample, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_drafter()
    MicroTrainer(whole, QUICK).step([make_sample()])
    monkeypatch.setattr(micro_step, "GROUP_NUMBERS", most)
    drafter = make_drafter()
    trainer = MicroTrainer(drafter, QUICK)
    sizes = [sum(p.numel() for p in optimizer.param_groups[0]["params"]) for optimizer in trainer._optimizers]
    assert sum(sizes) == sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    assert all(
        size <= most or len(optimizer.param_groups[0]["params"]) == 1
        for size, optimizer in zip(sizes, trainer._optimizers, strict=True)
    )
    units = sum(1 for _ in trainer.parts([make_sample()]))
    assert units == len(sizes), "serving gets its turn after the gradients, and between two groups"
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name]), name
