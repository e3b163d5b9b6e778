"""Linear + loss without the logits: equal to the loss with them, its gradients, and nothing of the logits' size on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from honed.kernels.training import block_loss as op
from honed.kernels.training import block_loss_goal, block_loss_labels, reference
from honed.kernels.training.block_loss import block_loss
from tests.kernels.interpreting import needs_gpu, needs_triton, run_cases

KINDS = ["ce", "kl"]
M, H, V = 6, 5, 150


@needs_triton
def test_the_kernels_equal_their_twin_under_the_interpreter() -> None:
    run_cases("block_loss", "cpu")


@pytest.mark.gpu
@needs_gpu
def test_the_kernels_equal_their_twin_on_a_gpu() -> None:
    run_cases("block_loss", "cuda")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several tiles of the vocabulary, and several parts of the rows."""
    monkeypatch.setattr(block_loss_labels, "TILE", 64)
    monkeypatch.setattr(block_loss_labels, "ROWS", 4)
    monkeypatch.setitem(block_loss_goal.BUFFER_BYTES, "cpu", 3 * 2 * V * 4)
    monkeypatch.setattr(block_loss_goal, "CACHED_BYTES", 2 * V * 4)


def inputs(kind: str, dtype: torch.dtype = torch.float64, m: int = M) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Hidden states, head, and the rest of the arguments."""
    generator = torch.Generator().manual_seed(7)
    hidden, head, goal = (torch.randn(n, H, generator=generator, dtype=torch.float64).to(dtype) for n in (m, V, m))
    labels = torch.randint(V, (m,), generator=generator)
    return hidden.requires_grad_(), head, {"labels": labels} if kind == "ce" else {"goal": goal}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_those_of_the_full_logits(dtype: torch.dtype, kind: str) -> None:
    hidden, head, rest = inputs(kind, dtype)
    weights = torch.linspace(-1.0, 2.0, M, dtype=torch.promote_types(dtype, torch.float32))
    made, wanted = block_loss(hidden, head, **rest), reference.block_loss(hidden, head, **rest)
    assert made.losses.dtype == wanted[0].dtype
    torch.testing.assert_close(made.losses, wanted[0])
    assert torch.equal(made.top, wanted[1])
    gradients = [torch.autograd.grad((losses * weights).sum(), hidden)[0] for losses in (made.losses, wanted[0])]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_finite_differences(kind: str) -> None:
    hidden, head, rest = inputs(kind)
    assert torch.autograd.gradcheck(lambda x: block_loss(x, head, **rest).losses, hidden)


def test_weights_that_depend_on_the_losses_get_their_gradient() -> None:
    """−E[τ] of blocks of three: every row's weight is a function of the others'."""
    hidden, head, rest = inputs("ce")

    def expected(losses: torch.Tensor) -> torch.Tensor:
        return -torch.exp(-losses.view(2, 3)).cumprod(-1).sum()

    made, wanted = (expected(f(hidden, head, **rest)[0]) for f in (block_loss, reference.block_loss))
    torch.testing.assert_close(*(torch.autograd.grad(x, hidden)[0] for x in (made, wanted)))


def test_favourite_tokens_of_many_dimensions() -> None:
    hidden, head, _ = inputs("ce")
    rows = hidden.view(2, 3, H)
    assert torch.equal(op.top_tokens(rows, head), (rows @ head.T).argmax(-1))


def test_the_goal_may_have_a_head_of_its_own() -> None:
    hidden, head, _ = inputs("kl")
    goal, goal_head = torch.randn(M, 9, dtype=torch.float64), torch.randn(V, 9, dtype=torch.float64)
    made = block_loss(hidden, head, goal=goal, goal_head=goal_head)
    wanted = reference.block_loss(hidden, head, goal=goal, goal_head=goal_head)
    torch.testing.assert_close(made.losses, wanted[0])


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(kind: str) -> None:
    hidden, head, rest = inputs(kind, m=0)
    made = block_loss(hidden, head, **rest)
    made.losses.sum().backward()  # type: ignore[no-untyped-call]
    assert (made.losses.shape, made.top.shape) == ((0,), (0,))
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, H)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_in_its_row(kind: str) -> None:
    hidden, head, rest = inputs(kind)
    with torch.no_grad():
        hidden[2, 1] = float("nan")
    losses = block_loss(hidden, head, **rest).losses
    (gradient,) = torch.autograd.grad(losses.sum(), hidden)
    is_bad = torch.arange(M) == 2
    assert torch.equal(losses.isnan(), is_bad)
    assert torch.equal(gradient.isnan().any(-1), is_bad)


def test_a_head_of_another_type_is_converted_in_parts() -> None:
    hidden, head, rest = inputs("ce", torch.float32)
    narrow = head.bfloat16()
    torch.testing.assert_close(block_loss(hidden, narrow, **rest).losses, block_loss(hidden, narrow.float(), **rest).losses)


def test_under_autocast_hidden_states_are_rounded_and_sums_are_not() -> None:
    hidden, head, rest = inputs("ce", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        losses = block_loss(hidden, head, **rest).losses
    (gradient,) = torch.autograd.grad(losses.sum(), hidden)
    assert (losses.dtype, gradient.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(losses, block_loss(hidden.bfloat16().float(), head, **rest).losses)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_gradient", [True, False])
def test_registration(kind: str, with_gradient: bool) -> None:
    hidden, head, rest = inputs(kind, torch.float32)
    hidden = hidden.detach().requires_grad_(with_gradient)
    if kind == "ce":
        torch.library.opcheck(op.label_loss, (hidden, head, rest["labels"], with_gradient))
    else:
        torch.library.opcheck(op.goal_loss, (hidden, head, rest["goal"], head, with_gradient))


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_logits_size_is_made(kind: str) -> None:
    hidden, head, rest = inputs(kind, torch.float32, m=60)
    hidden = hidden.detach()
    with Largest() as largest:
        if kind == "ce":
            block_loss_labels.fold_labels(hidden, head, rest["labels"], True, is_triton=False)
        else:
            block_loss_goal.fold_goal(hidden, head, rest["goal"], head, True, is_triton=False)
    # Labels: ROWS · TILE. A goal: two buffers of the rows that BUFFER_BYTES hold. The head itself has V · H.
    assert largest.numel <= max(V * H, 2 * 3 * V)
    assert largest.numel < 60 * V / 5


@pytest.mark.parametrize("label", [-1, V])
def test_labels_outside_the_vocabulary_are_refused(label: int) -> None:
    hidden, head, _ = inputs("ce")
    with pytest.raises(IndexError):
        block_loss(hidden, head, labels=torch.full((M,), label))


def test_mistakes_are_named() -> None:
    hidden, head, rest = inputs("ce")
    with pytest.raises(ValueError, match="either labels or a goal"):
        block_loss(hidden, head, goal=hidden, **rest)
    with pytest.raises(ValueError, match=r"must be \[M, H\] and \[V, H\]"):
        block_loss(hidden, head[:, 1:], **rest)
    with pytest.raises(ValueError, match="either labels or a goal"):
        block_loss(hidden, head)
    with pytest.raises(ValueError, match=r"needs labels \[6\]"):
        block_loss(hidden, head, labels=rest["labels"][1:])
    with pytest.raises(ValueError, match=r"needs a goal \[6, H'\]"):
        block_loss(hidden, head, goal=hidden[1:])
    with pytest.raises(ValueError, match="the goal's head is"):
        block_loss(hidden, head, goal=torch.zeros(M, 9, dtype=torch.float64))
    with pytest.raises(ValueError, match="no gradient for the head"):
        block_loss(hidden, head.clone().requires_grad_(), **rest)


def test_the_twin_s_formula() -> None:
    generator = torch.Generator().manual_seed(3)
    z, t = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    q, p = z.softmax(-1), t.softmax(-1)
    torch.testing.assert_close(reference.forward_kl(z, t), (p * (p / q).log()).sum(-1))
