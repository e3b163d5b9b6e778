"""The public function and the twin here; the kernels themselves under Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from honed.kernels.trees import top_candidates as kernel
from tests.kernels.interpreting import needs_gpu, needs_triton, run_cases


@needs_triton
def test_the_kernels_equal_their_twin_under_the_interpreter() -> None:
    run_cases("top_candidates", "cpu")


@pytest.mark.gpu
@needs_gpu
def test_the_kernels_equal_their_twin_on_a_gpu() -> None:
    run_cases("top_candidates", "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_the_most_likely_with_their_log_probabilities(dtype: torch.dtype) -> None:
    logits = (3.0 * torch.randn(2, 3, 1000, generator=torch.Generator().manual_seed(0))).to(dtype)
    log_probs, ids = kernel.top_candidates(logits, 5, torch.tensor([0.5, 2.0]))
    for b, temperature in enumerate((0.5, 2.0)):
        wanted = torch.log_softmax(logits[b].double() / temperature, -1)
        torch.testing.assert_close(log_probs[b].double(), wanted.topk(5).values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(wanted.gather(-1, ids[b].long()), wanted.topk(5).values)
        assert all(len(set(row)) == 5 for row in ids[b].tolist())


def test_equal_logits_go_by_id_and_masks_are_not_drafted() -> None:
    logits = torch.tensor([[[1.0, 2.0, float("nan"), 2.0, torch.finfo(torch.float32).min]]])
    log_probs, ids = kernel.top_candidates(logits, 5)
    assert ids.tolist() == [[[1, 3, 0, 0, 0]]]
    wanted = torch.log_softmax(torch.tensor([1.0, 2.0, 2.0]), 0)
    torch.testing.assert_close(log_probs[0, 0, :3], wanted[[1, 2, 0]])
    assert (log_probs[0, 0, 3:] == float("-inf")).all()


def test_the_registered_op() -> None:
    logits = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(1))
    for temperature in (None, torch.tensor([0.0, 0.7])):
        out = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, dtype=torch.int32)
        torch.library.opcheck(torch.ops.honed.top_candidates.default, (logits, temperature, *out))


@pytest.mark.parametrize(
    ("num_rows", "vocabulary", "splits"),
    [(1, 32_000, 7), (15, 151_936, 37), (960, 151_936, 4), (100_000, 151_936, 1), (1, 40, 1)],
)
def test_rows_are_split_while_programs_are_wanted(num_rows: int, vocabulary: int, splits: int) -> None:
    assert kernel.choose_splits(num_rows, vocabulary) == splits


@pytest.mark.parametrize(
    ("shape", "num", "temperature", "text"),
    [
        ((3, 40), 4, None, "don't fit"),
        ((2, 3, 40), 4, (3,), "don't fit"),
        ((2, 3, 40), 17, None, "17 candidates"),
        ((2, 3, 4), 5, None, "1 to 4"),
        ((2, 3, 4), 0, None, "0 candidates"),
    ],
)
def test_what_does_not_fit_is_refused(shape: tuple[int, ...], num: int, temperature: tuple[int, ...] | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        kernel.top_candidates(torch.zeros(shape), num, None if temperature is None else torch.zeros(temperature))
