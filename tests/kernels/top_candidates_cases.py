"""The Triton kernels against their plain twin, in a process of its own: see test_top_candidates.py.

HONED_TEST_DEVICE says where: "cpu" (under Triton's interpreter) or "cuda".
"""

from __future__ import annotations

import os

import pytest
import torch

from honed.kernels.trees import reference
from honed.kernels.trees import top_candidates as kernel

DEVICE = os.environ.get("HONED_TEST_DEVICE", "cpu")


def logits_of(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3.0 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


def check(
    logits: torch.Tensor, num: int, temperature: list[float] | None = None, lanes: int = 16, num_splits: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernels themselves, compare with the twin, return what they made."""
    degrees = None if temperature is None else torch.tensor(temperature, device=DEVICE)
    wanted, wanted_ids = reference.top_candidates(logits, num, degrees)
    log_probs, ids = torch.full_like(wanted, 77.0), torch.full_like(wanted_ids, 77)
    kernel.launch(logits, degrees, log_probs, ids, lanes=lanes, num_splits=num_splits)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(log_probs, wanted, rtol=2e-6, atol=4e-6)
    return log_probs, ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocabulary", "num", "lanes", "num_splits"),
    [(16, 16, 16, 1), (37, 5, 16, 2), (100, 1, 32, 3), (300, 8, 64, 4), (40, 3, 16, 7)],
)
def test_odd_shapes(vocabulary: int, num: int, lanes: int, num_splits: int, dtype: torch.dtype) -> None:
    # bfloat16 has few values, so ties are common, and lanes that lose a candidate too.
    check(logits_of(vocabulary, (2, 2, vocabulary), dtype), num, [0.0, 0.7], lanes, num_splits)


def test_all_candidates_in_one_lane() -> None:
    logits = logits_of(1, (1, 2, 160))
    logits[:, :, 3::16] += 50.0
    check(logits, 8)
    check(logits.sort(-1).values, 8)  # every round of a lane beats the last


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(1, 2, 90, device=DEVICE)
    logits[0, 1, ::2] = -0.0
    _, ids = check(logits, 5)
    assert ids.tolist() == [[[0, 1, 2, 3, 4]] * 2]


@pytest.mark.parametrize("num_even", [4, 6, 12])  # none is left, few are, so many that all is read again
def test_ties_whose_lowest_id_is_in_the_highest_lane(num_even: int) -> None:
    # Of lanes that are even the lower ones come first; here they have met their best in the second round only.
    logits = torch.zeros(1, 1, 128, device=DEVICE)
    logits[0, 0, 32 : 32 + num_even] = 1.0
    logits[0, 0, 20] = 1.0
    _, ids = check(logits, 4, lanes=32, num_splits=1)
    assert ids[0, 0].tolist() == [20, 32, 33, 34]


def test_what_is_not_finite() -> None:
    logits = logits_of(2, (1, 7, 70))
    logits[0, 0] = float("nan")
    logits[0, 1, ::3] = float("nan")
    logits[0, 2] = float("-inf")
    logits[0, 3, 5:] = float("-inf")
    logits[0, 4, 40] = float("inf")
    logits[0, 5, [40, 50]] = float("inf")
    logits[0, 6, 8:] = torch.finfo(torch.bfloat16).min  # a mask
    log_probs, ids = check(logits, 8)
    for nothing in (0, 2, 4, 5):
        assert (log_probs[0, nothing] == float("-inf")).all()
    assert log_probs[0, 3].isfinite().sum() == 5
    assert log_probs[0, 6].isfinite().all()
    assert not ids[0, 3, 5:].any()


def test_temperatures() -> None:
    degrees = [0.0, 1.0, 0.5, 100.0, float("nan"), float("inf"), -1.0, 2e-5]
    log_probs, _ = check(logits_of(3, (1, 1, 60)).expand(8, 2, 60), 4, degrees)
    for like_1 in (0, 4, 5, 6):
        assert torch.equal(log_probs[like_1], log_probs[1])


def test_strides_and_no_rows() -> None:
    wide = logits_of(4, (3, 4, 128))
    check(wide[::2, 1:, 16:80], 4, [1.0, 0.5])
    check(torch.zeros(0, 3, 20, device=DEVICE), 4)


@pytest.mark.skipif(DEVICE != "cuda", reason="slow under the interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_vocabulary_as_the_public_function_splits_it(dtype: torch.dtype) -> None:
    logits = logits_of(5, (3, 15, 151_936), dtype)
    wanted, wanted_ids = reference.top_candidates(logits, 8)
    log_probs, ids = kernel.top_candidates(logits, 8)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(log_probs, wanted, rtol=1e-5, atol=1e-5)
