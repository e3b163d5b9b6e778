"""The Triton halves of block_loss against the plain twin and its autograd, in a process of their own."""

from __future__ import annotations

import os

import pytest
import torch

from honed.kernels.training import block_loss as op
from honed.kernels.training import block_loss_goal, block_loss_labels, reference

DEVICE = os.environ.get("HONED_TEST_DEVICE", "cpu")
KINDS = ["ce", "kl"]
SHAPES = [(1, 1, 1), (7, 5, 20), (3, 33, 130), (5, 16, 257), (18, 8, 64)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the gradient, relative to its largest entry: the kernels round their weights, the twin doesn't."""

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Losses, top tokens, gradients."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small vocabularies have several tiles, and few rows several parts."""
    monkeypatch.setattr(block_loss_labels, "TILE", 64)
    monkeypatch.setattr(block_loss_labels, "ROWS", 4)
    monkeypatch.setitem(block_loss_goal.BUFFER_BYTES, DEVICE, 2 * 4 * 300 * 4)


def inputs(m: int, h: int, v: int, dtype: torch.dtype = torch.float32, sharpness: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(m * 10_000 + v)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    labels = torch.randint(v, (m,), generator=generator).to(DEVICE)
    return {"hidden": sharpness * random(m, h), "head": random(v, h), "goal": random(m, h), "labels": labels}


def by_kernel(given: dict[str, torch.Tensor], kind: str, with_gradient: bool = True) -> Three:
    hidden, head = given["hidden"], given["head"]
    if kind == "ce":
        return block_loss_labels.fold_labels(hidden, head, given["labels"], with_gradient, is_triton=True)
    return block_loss_goal.fold_goal(hidden, head, given["goal"], head, with_gradient, is_triton=True)


def by_twin(given: dict[str, torch.Tensor], kind: str) -> Three:
    hidden = given["hidden"].detach().float().requires_grad_()
    target = {"labels": given["labels"]} if kind == "ce" else {"goal": given["goal"]}
    losses, top = reference.block_loss(hidden, given["head"], **target)
    (gradient,) = torch.autograd.grad(losses.sum(), hidden)
    return losses.detach(), top, gradient


def check(given: dict[str, torch.Tensor], kind: str) -> Three:
    made, wanted = by_kernel(given, kind), by_twin(given, kind)
    assert made[0].dtype == torch.float32
    assert made[2].dtype == given["hidden"].dtype
    torch.testing.assert_close(made[0], wanted[0], rtol=1e-5, atol=2e-5)
    assert torch.equal(made[1], wanted[1])
    largest = float(wanted[2].abs().max()) if wanted[2].numel() else 0.0
    torch.testing.assert_close(made[2].float(), wanted[2], rtol=0, atol=TOLERANCE[given["hidden"].dtype] * max(largest, 1.0))
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes(shape: tuple[int, int, int], kind: str) -> None:
    check(inputs(*shape), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, kind: str) -> None:
    check(inputs(7, 16, 150, dtype), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(kind: str) -> None:
    losses, top, gradient = by_kernel(inputs(0, 4, 9), kind)
    assert (len(losses), len(top), gradient.shape) == (0, 0, (0, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gradient_the_losses_are_the_same(kind: str) -> None:
    given = inputs(7, 5, 130)
    losses, top, none = by_kernel(given, kind, with_gradient=False)
    whole = by_kernel(given, kind)
    assert torch.equal(losses, whole[0])
    assert torch.equal(top, whole[1])
    assert none.shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scores_that_rise_from_tile_to_tile(dtype: torch.dtype) -> None:
    # Every tile's maximum is far above all before: sums and gradients have to be rescaled, or float16 weights overflow.
    given = inputs(3, 4, 257, dtype)
    given["head"] = given["head"] * 0.01
    given["head"][:, 0] = torch.arange(257, device=DEVICE) * 0.5
    given["hidden"][:, 0] = torch.tensor([1.0, 0.1, -1.0], device=DEVICE)
    check(given, "ce")


def test_of_equal_scores_the_first_is_on_top() -> None:
    given = inputs(2, 3, 200)
    given["head"] = given["head"][:1].expand(200, 3).contiguous()
    assert by_kernel(given, "ce")[1].tolist() == [0, 0]
    assert by_kernel(given, "kl")[1].tolist() == [0, 0]


def test_equal_distributions_have_no_distance_and_no_gradient() -> None:
    given = inputs(4, 6, 130)
    given["goal"] = given["hidden"]
    losses, _, gradient = by_kernel(given, "kl")
    assert losses.abs().max() < 1e-5
    assert gradient.abs().max() < 1e-5


def test_sharp_distributions_apart() -> None:
    check(inputs(7, 16, 150, sharpness=8.0), "kl")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad: float, kind: str) -> None:
    given = inputs(5, 4, 130)
    whole = by_kernel(given, kind)
    given["hidden"][2, 1] = bad
    losses, _, gradient = by_kernel(given, kind)
    rest = [0, 1, 3, 4]
    assert torch.equal(losses[rest], whole[0][rest])
    torch.testing.assert_close(gradient[rest], whole[2][rest])
    assert losses[2].isnan()
    assert gradient[2].isnan().any()


@pytest.mark.skipif(DEVICE != "cuda", reason="the public function takes plain PyTorch on a CPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_public_function_is_the_kernel(dtype: torch.dtype, kind: str) -> None:
    given = inputs(7, 16, 150, dtype)
    hidden = given["hidden"].requires_grad_()
    target = {"labels": given["labels"]} if kind == "ce" else {"goal": given["goal"]}
    made = op.block_loss(hidden, given["head"], **target)
    (gradient,) = torch.autograd.grad(made.losses.sum(), hidden)
    wanted = by_kernel({**given, "hidden": hidden.detach()}, kind)
    torch.testing.assert_close(made.losses, wanted[0])
    torch.testing.assert_close(gradient, wanted[2])
