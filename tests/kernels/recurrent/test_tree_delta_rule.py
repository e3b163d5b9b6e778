"""The twins here; the kernels themselves under Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from honed.kernels.recurrent import reference
from honed.kernels.recurrent import tree_delta_rule as kernel
from honed.kernels.recurrent.tree_conv import tree_conv
from honed.kernels.trees.tree_build import tree_build
from tests.kernels.draft_tree import build_tree
from tests.kernels.interpreting import needs_gpu, needs_triton, run_cases

QK_HEADS, HEADS, K, V = 2, 4, 8, 16


@needs_triton
def test_the_kernels_equal_their_twins_under_the_interpreter() -> None:
    run_cases("tree_delta_rule", "cpu")


@pytest.mark.gpu
@needs_gpu
def test_the_kernels_equal_their_twins_on_a_gpu() -> None:
    run_cases("tree_delta_rule", "cuda")


class Step:
    """A verify step of three requests, one of them without nodes, with trees that `tree_build` made."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        log_probs, budgets = -self.rand(3, 5, 3).cumsum(-1), [7, 0, 40]
        ids = torch.zeros(3, 5, 3, dtype=torch.int32)
        self.trees = tree_build(log_probs, ids, torch.tensor(budgets), 40)
        self.ancestors = [build_tree(log_probs[b].double().numpy(), budgets[b]).ancestors() for b in range(3)]
        self.starts = torch.tensor([0, 8, 9, 50], dtype=torch.int32)
        self.q, self.k = self.randn(2, 50, QK_HEADS, K)
        self.v = self.randn(50, HEADS, V)
        self.log_decay, self.strength = -self.rand(50, HEADS), self.rand(50, HEADS)
        self.states, self.root = self.randn(9, HEADS, V, K), torch.tensor([4, 8, 1])

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator)

    def run(self) -> tuple[torch.Tensor, reference.TreeUpdates]:
        gates = self.log_decay, self.strength
        return kernel.tree_delta_rule(
            self.q, self.k, self.v, *gates, self.states, self.root, self.starts, self.trees.row_masks, 41
        )

    def along(self, b: int, path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The state after a path of nodes, token by token in float64, and the output of the last."""
        state, out = self.states[self.root[b]].double(), torch.empty(0)
        for node in path:
            row = int(self.starts[b]) + 1 + node
            q, k = (x[row].double() / (x[row].double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (self.q, self.k))
            q, k = (x.repeat_interleave(HEADS // QK_HEADS, 0) for x in (q * K**-0.5, k))
            state = self.log_decay[row].double().exp()[:, None, None] * state
            less = torch.einsum("hvk,hk->hv", state, k)
            update = self.strength[row].double()[:, None] * (self.v[row].double() - less)
            state = state + torch.einsum("hv,hk->hvk", update, k)
            out = torch.einsum("hvk,hk->hv", state, q)
        return state, out


def test_every_node_goes_on_as_if_its_path_alone_had_been_decoded() -> None:
    step = Step()
    untouched = step.states.clone()
    out, _ = step.run()
    assert torch.equal(step.states, untouched)
    for b, ancestors in enumerate(step.ancestors):
        for node, path in enumerate(ancestors):
            _, wanted = step.along(b, path)
            torch.testing.assert_close(out[int(step.starts[b]) + 1 + node].double(), wanted, atol=1e-5, rtol=1e-5)
    assert max(len(path) for path in step.ancestors[2]) > 3, "no path is long: this shows nothing"


def test_an_anchor_reads_the_state_that_holds_it() -> None:
    step = Step()
    out, updates = step.run()
    for b, start in enumerate(step.starts[:-1].tolist()):
        q = reference.unit(step.q[start]).repeat_interleave(HEADS // QK_HEADS, 0) * K**-0.5
        torch.testing.assert_close(out[start], torch.einsum("hvk,hk->hv", step.states[step.root[b]], q))
        assert not updates.values[start].any()


def test_the_state_after_a_path_is_written_and_no_other() -> None:
    for node in range(40):
        step = Step()
        _, updates = step.run()
        taken = [step.ancestors[0][node % 7], [], step.ancestors[2][node]]
        path = torch.full((3, 5), -1)
        for b, nodes in enumerate(taken):
            path[b, : len(nodes)] = torch.tensor(nodes) + 1
        target, before = torch.tensor([0, 8, 7]), step.states.clone()
        wanted = {int(target[b]): step.along(b, nodes)[0] for b, nodes in enumerate(taken)}
        kernel.commit(step.states, step.root, target, updates, step.starts, path, torch.tensor([len(one) for one in taken]))
        for slot, state in enumerate(step.states):
            is_written = slot in wanted and slot != 8
            torch.testing.assert_close(
                state.double(), wanted[slot] if is_written else before[slot].double(), atol=1e-5, rtol=1e-5
            )
        assert torch.equal(step.states[8], before[8])  # no node was accepted


def test_wrong_shapes_are_refused() -> None:
    step = Step()
    with pytest.raises(ValueError, match="don't fit"):
        kernel.tree_delta_rule(
            step.q,
            step.k,
            step.v,
            step.log_decay,
            step.strength,
            step.states.mT,
            step.root,
            step.starts,
            step.trees.row_masks,
            41,
        )
    assert "wide" in kernel.misfit(96, 128, 8)
    assert "rows" in kernel.misfit(128, 128, 65)
    assert not kernel.misfit(128, 128, 64)


def test_taps_are_those_of_a_convolution() -> None:
    generator = torch.Generator().manual_seed(2)
    inputs, weight, bias = (torch.randn(shape, generator=generator) for shape in ((12, 6), (6, 4), (6,)))
    path = [3, 9, 1, 7, 11, 0]
    taps = torch.tensor([path[i - 3 : i + 1] for i in range(3, len(path))])
    whole = torch.nn.functional.conv1d(inputs[path].t()[None], weight[:, None], bias, groups=6)[0].t()
    torch.testing.assert_close(tree_conv(inputs, taps, weight, bias), torch.nn.functional.silu(whole))
    with pytest.raises(ValueError, match="don't fit"):
        tree_conv(inputs, taps, weight.t())
