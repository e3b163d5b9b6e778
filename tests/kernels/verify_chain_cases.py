"""The Triton kernels of verify_chain against their plain twin, in a process of its own: see interpreting.py.

HONED_TEST_DEVICE says where: "cpu" (under Triton's interpreter) or "cuda".
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from honed.kernels.verify import reference
from honed.kernels.verify import verify_chain as kernel
from honed.kernels.verify.verify_chain import ChainVerdict
from tests.kernels.verify_oracle import FALSE_ALARM, chain_law, outcomes, p_value, softmax

DEVICE = os.environ.get("HONED_TEST_DEVICE", "cpu")
ON_GPU = DEVICE == "cuda"
CHUNK = 32
"""So that small vocabularies have several chunks."""


class Round:
    """Inputs of a batch: temperatures 0, 0.7, 1 and 1.6 in turn, drafts that are often likely, lengths from 0 to K."""

    def __init__(self, num: int, depth: int, vocab: int, dtype: torch.dtype = torch.float32, full_q: bool = False) -> None:
        make = torch.Generator().manual_seed(1000 * num + 100 * depth + vocab)
        self.logits = (2.0 * torch.randn(num, depth + 1, vocab, generator=make)).to(dtype)
        draft_logits = self.logits[:, :depth].float() + torch.randn(num, depth, vocab, generator=make)
        likely = draft_logits.argmax(-1)
        other = torch.randint(vocab, (num, depth), generator=make)
        self.draft = torch.where(torch.rand(num, depth, generator=make) < 0.8, likely, other)
        self.lengths = torch.arange(num).flip(0) % (depth + 1)
        self.temperature = torch.tensor([0.0, 0.7, 1.0, 1.6]).repeat(num)[:num]
        self.seeds = torch.arange(num) * 7919 - 5
        self.positions = torch.arange(num) * 2**31
        self.draft_logits = draft_logits.to(dtype) if full_q else None
        self.draft_temperature = torch.tensor([1.0, 0.9, 0.0]).repeat(num)[:num] if full_q else None
        self.first_rows: torch.Tensor | None = None

    def arguments(self) -> list[torch.Tensor | None]:
        parts = [
            self.logits,
            self.draft,
            self.lengths,
            self.temperature,
            self.seeds,
            self.positions,
            self.first_rows,
            self.draft_logits,
            self.draft_temperature,
        ]
        return [None if x is None else x.to(DEVICE) for x in parts]


def launched(arguments: list[Any], chunk: int = CHUNK) -> ChainVerdict:
    num, depth = arguments[1].shape
    shapes = ((num,), (num, depth + 1), (num,))
    out = ChainVerdict(*(torch.full(shape, -9, dtype=torch.int32, device=DEVICE) for shape in shapes))
    kernel.launch(*arguments, out=out, chunk=chunk)
    return out


def check(round_: Round, chunk: int = CHUNK) -> ChainVerdict:
    arguments: list[Any] = round_.arguments()
    made = launched(arguments, chunk)
    for got, wanted in zip(made, reference.verify_chain(*arguments, chunk=chunk), strict=True):
        assert torch.equal(got, wanted)
    accepted, tokens, bonus = made
    assert (accepted <= arguments[2].clamp(0, tokens.shape[1] - 1)).all()
    assert ((bonus >= 0) & (bonus < round_.logits.shape[-1])).all()
    assert torch.equal(tokens.gather(1, accepted[:, None].long())[:, 0], bonus)
    assert torch.equal((tokens >= 0).sum(1).int(), accepted + 1)
    return made


@pytest.mark.parametrize("full_q", [False, True])
@pytest.mark.parametrize(("num", "depth", "vocab"), [(1, 0, 1), (1, 1, 1), (5, 4, 32), (6, 2, 33), (4, 2, 133)])
def test_odd_shapes(num: int, depth: int, vocab: int, full_q: bool) -> None:
    check(Round(num, depth, vocab, full_q=full_q))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits(dtype: torch.dtype) -> None:
    check(Round(4, 2, 50, dtype, full_q=True))


def test_empty_batch() -> None:
    round_ = Round(0, 3, 7)
    made = launched(round_.arguments())
    assert [list(x.shape) for x in made] == [[0], [0, 4], [0]]


def test_all_lengths_zero_samples_a_token_each() -> None:
    round_ = Round(8, 3, 50)
    round_.lengths.zero_()
    assert not check(round_).num_accepted.any()


def test_certain_drafts_are_all_accepted() -> None:
    round_ = Round(8, 3, 50)
    round_.lengths.fill_(3)
    for row in range(3):
        round_.logits[torch.arange(8), row, round_.draft[:, row]] = 200.0
    assert (check(round_).num_accepted == 3).all()


def test_impossible_drafts_are_never_accepted_nor_drawn() -> None:
    round_ = Round(8, 2, 50)
    round_.lengths.fill_(2)
    round_.logits[torch.arange(8), 0, round_.draft[:, 0]] = float("-inf")
    made = check(round_)
    assert not made.num_accepted.any()
    assert (made.bonus_token_ids.cpu() != round_.draft[:, 0]).all()


@pytest.mark.parametrize("full_q", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite(bad: float, full_q: bool) -> None:
    round_ = Round(4, 1, 50, full_q=full_q)
    round_.lengths.fill_(1)
    round_.logits[:, 0, ::3] = bad
    round_.logits[2:, 1] = bad  # a row without a finite logit
    if round_.draft_logits is not None:
        round_.draft_logits[:, 0, ::2] = bad
        round_.draft_logits[1] = bad  # no law at all
    check(round_)


@pytest.mark.parametrize("draft", [-1, 50, 2**31 - 1])
def test_drafts_that_are_no_tokens(draft: int) -> None:
    round_ = Round(4, 2, 50, full_q=True)
    round_.lengths.fill_(2)
    round_.draft[:, 1] = draft
    assert (check(round_).num_accepted <= 1).all()


def test_lengths_out_of_range_are_cut() -> None:
    round_ = Round(4, 3, 50)
    round_.lengths = torch.tensor([-2, 7, 3, 0])
    check(round_)


def test_greedy_takes_the_lowest_of_equals() -> None:
    round_ = Round(1, 1, 133)
    round_.logits.zero_()
    round_.logits[0, :, [40, 70, 100]] = 3.0
    round_.draft.fill_(70)
    round_.lengths.fill_(1)
    assert check(round_).tokens.tolist() == [[40, -1]]


@pytest.mark.skipif(ON_GPU, reason="the order of programs is the GPU's")
def test_rows_after_a_break_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # In the interpreter's order a request's rows follow one another: what is counted is rows that were read to the end.
    counters: list[torch.Tensor] = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: counters.append(zeros(*size, **options)) or counters[-1])
    round_ = Round(8, 4, 20)
    round_.lengths.fill_(4)
    made = launched(round_.arguments())
    assert 0 < made.num_accepted.max() < 4
    read = counters[0][8:].view(8, 4).sum(1)
    assert read.tolist() == (made.num_accepted + 1).tolist()


@pytest.mark.parametrize("full_q", [False, True])
def test_a_request_draws_the_same_whatever_its_batch(full_q: bool) -> None:
    round_ = Round(6, 2, 70, full_q=full_q)
    together = launched(round_.arguments())
    for b in (1, 5):
        alone = launched([None if x is None else x[b : b + 1] for x in round_.arguments()])
        assert [x[0].tolist() for x in alone] == [x[b].tolist() for x in together]


def test_ragged_rows_are_the_dense_ones() -> None:
    round_ = Round(6, 3, 70)
    dense = check(round_)
    counts = round_.lengths + 1
    round_.first_rows = counts.cumsum(0) - counts
    round_.logits = torch.cat([round_.logits[b, : counts[b]] for b in range(6)])
    for got, wanted in zip(check(round_), dense, strict=True):
        assert torch.equal(got, wanted)


def test_inputs_with_strides() -> None:
    round_ = Round(4, 3, 70)
    wanted = check(round_)
    wide = torch.full((8, 5, 96), float("nan"))
    wide[::2, :4, 10:80] = round_.logits
    round_.logits = wide[::2, :4, 10:80]
    round_.draft = torch.stack((round_.draft, -round_.draft), dim=2)[..., 0]
    round_.seeds = torch.stack((round_.seeds, round_.seeds), dim=1)[:, 0]
    for got, as_before in zip(check(round_), wanted, strict=True):
        assert torch.equal(got, as_before)
    round_.logits = round_.logits.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(check(round_).tokens, wanted.tokens)


@pytest.mark.parametrize("full_q", [False, True] if ON_GPU else [False])
def test_the_law_of_what_is_emitted(full_q: bool) -> None:
    # 120 samples at a false-alarm rate of 1e-6: finds 40 % of the mass moved; the twin's test has the samples for 1 %.
    num, vocab = (200_000 if ON_GPU else 120), 4
    make = torch.Generator().manual_seed(3)
    target, q_logits = torch.randn(vocab, vocab, generator=make), torch.randn(1, vocab, generator=make)
    q = softmax(q_logits.numpy()) if full_q else np.eye(vocab)[[1]]
    draft = torch.multinomial(torch.tensor(q[0]), num, replacement=True, generator=make)
    logits = torch.stack((target[0].expand(num, vocab), target[draft]), dim=1)
    arguments = [logits, draft[:, None], torch.ones(num).long(), torch.ones(num), torch.arange(num), torch.zeros(num).long()]
    arguments = [x.to(DEVICE) for x in arguments]
    made = launched([*arguments, None, q_logits.expand(num, 1, vocab).to(DEVICE) if full_q else None, None])
    assert p_value(outcomes(made.tokens), chain_law(softmax(target.numpy()), q, 0)) > FALSE_ALARM


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
def test_in_a_cuda_graph() -> None:
    round_ = Round(9, 3, 20_000, torch.bfloat16, full_q=True)
    arguments: list[Any] = round_.arguments()
    wanted = launched(arguments, kernel.VOCAB_CHUNK)
    out = ChainVerdict(*(torch.zeros_like(x) for x in wanted))
    keyword = {"draft_logits": arguments[7], "draft_temperature": arguments[8], "out": out}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.verify_chain(*arguments[:6], **keyword)
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(got, want) for got, want in zip(out, wanted, strict=True))
        for x in out:
            x.zero_()
