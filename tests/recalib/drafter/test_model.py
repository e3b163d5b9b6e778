"""The drafter's function: what a block sees, what it doesn't, and that packing changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from honed.recalib.drafter.model import DFlashDrafter, DrafterConfig
from honed.recalib.samples.sample import TrainingSample, pack

MakeDrafter = Callable[..., DFlashDrafter]
MakeSample = Callable[..., TrainingSample]


def draft(drafter: DFlashDrafter, sample: TrainingSample, anchors: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = drafter(sample.features, sample.positions, sample.token_ids, torch.tensor(anchors))
    return logits


def test_one_row_of_logits_for_each_mask(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    assert draft(make_drafter(), make_sample(), [3, 9]).shape == (2, 3, 50)


def test_context_is_strictly_before_the_anchor(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter, sample = make_drafter(), make_sample()
    before = draft(drafter, sample, [9])
    sample.features[9:] += 1.0
    assert torch.equal(draft(drafter, sample, [9]), before)
    sample.features[8] += 1.0
    assert not torch.allclose(draft(drafter, sample, [9]), before)


def test_of_the_tokens_only_the_anchor_is_seen(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter, sample = make_drafter(), make_sample()
    before = draft(drafter, sample, [9])
    sample.token_ids[:9] = 7
    sample.token_ids[10:] = 7
    assert torch.equal(draft(drafter, sample, [9]), before)
    sample.token_ids[9] = 7
    assert not torch.allclose(draft(drafter, sample, [9]), before)


def test_blocks_do_not_see_each_other(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter, sample = make_drafter(), make_sample()
    together = draft(drafter, sample, [5, 6, 20])
    for row, anchor in enumerate([5, 6, 20]):
        assert torch.allclose(together[row], draft(drafter, sample, [anchor])[0], atol=1e-5)


def test_a_block_looks_both_ways(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """The first draft token depends on how many masks follow, so attention in the block is not causal."""
    drafter, sample = make_drafter(), make_sample()
    arguments = (sample.features, sample.positions, sample.token_ids, torch.tensor([9]))
    short, full = drafter(*arguments, num_draft_tokens=1), drafter(*arguments)
    assert not torch.allclose(short[:, 0], full[:, 0], atol=1e-4)


def test_packed_samples_do_not_see_each_other(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter = make_drafter()
    first, second = make_sample(20, seed=1), make_sample(25, seed=2, first_position=100)
    packed = pack([first, second])
    anchors = torch.tensor([7, 20 + 11])
    logits = drafter(packed.features, packed.positions, packed.token_ids, anchors, packed.segments)
    assert torch.allclose(logits[0], draft(drafter, first, [7])[0], atol=1e-5)
    assert torch.allclose(logits[1], draft(drafter, second, [11])[0], atol=1e-5)


def test_only_distances_between_positions_matter(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """So a stretch cut out of a long request, with its absolute positions, is a sound sample."""
    drafter = make_drafter()
    near, far = make_sample(), make_sample(first_position=500)
    assert torch.allclose(draft(drafter, near, [9]), draft(drafter, far, [9]), atol=1e-3)


def test_misaligned_rows_are_refused(make_sample: MakeSample) -> None:
    good = make_sample()
    with pytest.raises(ValueError, match="features has 29 rows, not 30"):
        TrainingSample(good.features[:-1], good.token_ids, good.positions, "s", "w")
    with pytest.raises(ValueError, match="positions do not rise by one"):
        TrainingSample(good.features, good.token_ids, good.positions.flip(0), "s", "w")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"is_causal": True}, "causal"),
        ({"layer_types": ["sliding_attention"]}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "scaled RoPE"),
    ],
)
def test_variants_it_cannot_train_are_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DrafterConfig.from_json(change)


def test_a_config_of_another_kind_names_the_missing_field() -> None:
    with pytest.raises(ValueError, match="'vocab_size'; is this a DFlash drafter"):
        DrafterConfig.from_json({"dflash_config": {}})
