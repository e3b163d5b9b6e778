"""The Triton kernels of verify_tree against their plain twin, in a process of its own: see interpreting.py.

HONED_TEST_DEVICE says where: "cpu" (under Triton's interpreter) or "cuda".
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from honed.kernels.verify import reference
from honed.kernels.verify import verify_tree as kernel
from honed.kernels.verify.verify_tree import TreeVerdict
from tests.kernels.verify_oracle import FALSE_ALARM, outcomes, p_value, softmax, tree_law

DEVICE = os.environ.get("HONED_TEST_DEVICE", "cpu")
ON_GPU = DEVICE == "cuda"
CHUNK = 32


def random_trees(num: int, nodes: int, vocab: int, make: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, parents, depths of trees in which siblings have different tokens; some nodes don't exist, the last among them."""
    tokens = torch.randint(vocab, (num, nodes), generator=make)
    parents, depths = torch.full((num, nodes), -1), torch.zeros((num, nodes), dtype=torch.int64)
    for b in range(num):
        taken = set()
        for n in range(nodes - b % 3):
            parent = int(torch.randint(n + 1, (1,), generator=make)) - 1
            if (parent >= 0 and not depths[b, parent]) or (parent, int(tokens[b, n])) in taken:
                continue
            taken.add((parent, int(tokens[b, n])))
            parents[b, n], depths[b, n] = parent, 1 if parent < 0 else int(depths[b, parent]) + 1
    return tokens, parents, depths


class Round:
    """Inputs of a batch: temperatures 0, 0.7, 1 and 1.6 in turn; the children's tokens are likely."""

    def __init__(self, num: int, nodes: int, vocab: int, dtype: torch.dtype = torch.float32) -> None:
        make = torch.Generator().manual_seed(1000 * num + 100 * nodes + vocab)
        self.tokens, self.parents, self.depths = random_trees(num, nodes, vocab, make)
        logits = torch.randn(num, nodes + 1, vocab, generator=make)
        for b, n in self.depths.nonzero().tolist():
            logits[b, self.parents[b, n] + 1, self.tokens[b, n]] += 4.0
        self.logits = logits.to(dtype)
        self.temperature = torch.tensor([0.0, 0.7, 1.0, 1.6]).repeat(num)[:num]
        self.seeds = torch.arange(num) * 7919 - 5
        self.positions = torch.arange(num) * 2**31
        self.max_depth = nodes
        self.first_rows: torch.Tensor | None = None

    def arguments(self) -> list[Any]:
        parts = [self.logits, self.tokens, self.parents, self.depths, self.temperature, self.seeds, self.positions]
        first_rows = None if self.first_rows is None else self.first_rows.to(DEVICE)
        return [*(x.to(DEVICE) for x in parts), self.max_depth, first_rows]


def launched(arguments: list[Any], chunk: int = CHUNK) -> TreeVerdict:
    num, longest = arguments[1].shape[0], arguments[7]
    shapes = ((num,), (num, longest), (num, longest + 1), (num,))
    out = TreeVerdict(*(torch.full(shape, -9, dtype=torch.int32, device=DEVICE) for shape in shapes))
    kernel.launch(*arguments, out, chunk)
    return out


def check(round_: Round, chunk: int = CHUNK) -> TreeVerdict:
    arguments = round_.arguments()
    made = launched(arguments, chunk)
    for got, wanted in zip(made, reference.verify_tree(*arguments, chunk), strict=True):
        assert torch.equal(got, wanted)
    tokens, parents = arguments[1:3]
    for b, accepted in enumerate(made.num_accepted.tolist()):
        path = made.path[b, :accepted].long() - 1
        assert (made.path[b, accepted:] == -1).all()
        assert parents[b, path].tolist() == [-1, *path.tolist()][:accepted]
        assert made.tokens[b, :accepted].tolist() == tokens[b, path].tolist()
        assert made.tokens[b, accepted] == made.bonus_token_ids[b]
    assert ((made.bonus_token_ids >= 0) & (made.bonus_token_ids < round_.logits.shape[-1])).all()
    return made


@pytest.mark.parametrize(("num", "nodes", "vocab"), [(1, 0, 1), (1, 1, 1), (4, 2, 5), (5, 8, 70), (2, 32, 12)])
def test_odd_shapes(num: int, nodes: int, vocab: int) -> None:
    check(Round(num, nodes, vocab))


def test_walks_are_of_some_length() -> None:
    assert check(Round(8, 9, 7)).num_accepted.max() >= 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits(dtype: torch.dtype) -> None:
    check(Round(4, 5, 50, dtype))


def test_empty_batch() -> None:
    assert [list(x.shape) for x in launched(Round(0, 3, 7).arguments())] == [[0], [0, 3], [0, 4], [0]]


def test_trees_without_nodes_sample_a_token_each() -> None:
    round_ = Round(8, 4, 50)
    round_.depths.zero_()
    assert not check(round_).num_accepted.any()


@pytest.mark.parametrize("longest", [0, 2])
def test_walks_end_at_the_depth_that_is_asked_for(longest: int) -> None:
    round_ = Round(8, 9, 7)
    round_.max_depth = longest
    assert check(round_).num_accepted.max() == longest


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite(bad: float) -> None:
    round_ = Round(4, 4, 50)
    round_.logits[:, 0, ::3] = bad
    round_.logits[2:, 1:3] = bad
    check(round_)


def test_parents_that_do_not_precede_are_no_parents() -> None:
    round_ = Round(4, 6, 50)
    round_.parents[0, 2], round_.parents[1, 2], round_.parents[2, 0], round_.parents[3, 1] = 2, 5, 0, -2
    check(round_)


def test_of_equal_siblings_the_first_counts() -> None:
    round_ = Round(1, 3, 7)
    round_.logits.zero_()
    round_.logits[0, :, 3] = 9.0
    round_.tokens[:], round_.parents[:], round_.depths[:] = 3, torch.tensor([-1, -1, 0]), torch.tensor([1, 1, 2])
    assert check(round_).path.tolist() == [[1, 3, -1]]


@pytest.mark.skipif(ON_GPU, reason="the order of programs is the GPU's")
def test_rows_off_the_walk_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # In the interpreter's order a request's rows follow one another: what is counted is rows that were read to the end.
    arguments = Round(6, 9, 20).arguments()
    counters: list[torch.Tensor] = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: counters.append(zeros(*size, **options)) or counters[-1])
    made = launched(arguments)
    assert made.num_accepted.max() > 0
    assert counters[0][0].sum(1).tolist() == (made.num_accepted + 1).tolist()


def test_a_request_draws_the_same_whatever_its_batch() -> None:
    round_ = Round(6, 5, 70)
    together, arguments = launched(round_.arguments()), round_.arguments()
    for b in (1, 5):
        alone = launched([x[b : b + 1] if isinstance(x, torch.Tensor) else x for x in arguments])
        assert [x[0].tolist() for x in alone] == [x[b].tolist() for x in together]


def test_ragged_rows_are_the_dense_ones() -> None:
    round_ = Round(5, 6, 70)
    dense = check(round_)
    counts = 7 - torch.arange(5) % 3
    round_.first_rows = counts.cumsum(0) - counts
    round_.logits = torch.cat([round_.logits[b, : counts[b]] for b in range(5)])
    for got, wanted in zip(check(round_), dense, strict=True):
        assert torch.equal(got, wanted)


def test_inputs_with_strides() -> None:
    round_ = Round(4, 5, 70)
    wanted = check(round_)
    wide = torch.full((8, 7, 96), float("nan"))
    wide[::2, :6, 10:80] = round_.logits
    round_.logits = wide[::2, :6, 10:80]
    round_.parents = torch.stack((round_.parents, round_.tokens), dim=2)[..., 0]
    assert torch.equal(check(round_).tokens, wanted.tokens)


def test_the_law_of_what_is_emitted() -> None:
    # 120 samples at a false-alarm rate of 1e-6: finds 40 % of the mass moved; the twin's test has the samples for 1 %.
    num, vocab = (200_000 if ON_GPU else 120), 4
    target = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(3))
    tokens, parents, depths = [1, 2, 3], [-1, -1, 0], [1, 1, 2]
    spread = [torch.tensor(x, device=DEVICE).expand(num, 3) for x in (tokens, parents, depths)]
    made = launched(
        [
            target[[0, *tokens]].to(DEVICE).expand(num, 4, vocab),
            *spread,
            torch.ones(num, device=DEVICE),
            torch.arange(num, device=DEVICE),
            torch.zeros(num, dtype=torch.int64, device=DEVICE),
            2,
            None,
        ]
    )
    assert p_value(outcomes(made.tokens), tree_law(softmax(target.numpy()), 0, tokens, parents)) > FALSE_ALARM


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
def test_in_a_cuda_graph() -> None:
    arguments = Round(9, 12, 20_000, torch.bfloat16).arguments()
    wanted = launched(arguments, kernel.VOCAB_CHUNK)
    out = TreeVerdict(*(torch.zeros_like(x) for x in wanted))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.verify_tree(*arguments[:8], out=out)
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(got, want) for got, want in zip(out, wanted, strict=True))
        for x in out:
            x.zero_()
