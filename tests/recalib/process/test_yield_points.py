"""On a CPU a unit stops before any of its operations: nothing is lost by it, and what is raised there ends it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from honed.kernels.training.block_loss import block_loss, top_tokens
from honed.kernels.training.sizes import TILE
from honed.recalib.drafter.dflash import DFlashDrafter
from honed.recalib.process.yield_points import YieldPoints
from honed.recalib.samples.sample import TrainingSample
from honed.recalib.training.micro_step import MicroTrainer, TrainingSettings

MakeDrafter = Callable[..., DFlashDrafter]
MakeSample = Callable[..., TrainingSample]
QUICK = TrainingSettings(anchors_per_micro_step=8, micro_steps_per_update=1, warmup_updates=1, learning_rate=1e-2)


def test_the_same_weights_as_without(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    plain, yielding = make_drafter(), make_drafter()
    MicroTrainer(plain, QUICK).step([make_sample()])
    called: list[bool] = []
    trainer = MicroTrainer(yielding, QUICK)
    with YieldPoints(lambda: called.append(torch.is_grad_enabled())):
        trainer.step([make_sample()])
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, yielding.state_dict()[name]), name
    assert called.count(True) > 50, "forward"
    assert called.count(False) > 50, "backward and update"
    count = len(called)
    trainer.step([make_sample()])
    assert len(called) == count, "outside of the block nobody is asked"


@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_the_loss_over_a_large_vocabulary_stops_between_its_tiles(kind: str) -> None:
    """It takes longer than all the rest, and is no single operation."""

    def asked(vocabulary: int) -> int:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(24, 16, generator=generator, requires_grad=True)
        head, goal = torch.randn(vocabulary, 16, generator=generator), torch.randn(24, 16, generator=generator)
        target = {"labels": torch.arange(24)} if kind == "ce" else {"goal": goal}
        called = list[bool]()
        with YieldPoints(lambda: called.append(True)):
            block_loss(hidden, head, **target).losses.sum().backward()
            top_tokens(hidden, head)
        assert hidden.grad is not None
        return len(called)

    assert asked(16 * TILE) - asked(2 * TILE) > 14 * 4


@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
def test_what_is_raised_breaks_it_off_wherever_it_is(share: float, make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    count = 0

    def tally() -> None:
        nonlocal count
        count += 1

    with YieldPoints(tally):
        MicroTrainer(make_drafter(), QUICK).step([make_sample()])
    left = int(count * share)

    def stand_by() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"), YieldPoints(stand_by):
        MicroTrainer(make_drafter(), QUICK).step([make_sample()])
