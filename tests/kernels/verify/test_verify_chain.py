"""verify_chain: the law of what it emits, on its twin; the kernels themselves in a process of their own.

The χ² tests have a false-alarm rate of 1e-6 each and, at 300,000 samples, find one percent of the mass moved from the likeliest
outcome to the next with a probability above 0.999: `test_the_test_finds_a_law_that_is_one_percent_off` has it do so.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from honed.kernels.verify import reference
from honed.kernels.verify import verify_chain as kernel
from honed.kernels.verify.verify_chain import ChainVerdict, verify_chain
from tests.kernels.interpreting import needs_gpu, needs_triton, run_cases
from tests.kernels.verify_oracle import FALSE_ALARM, Law, chain_law, first_token, outcomes, p_value, shifted, softmax

SAMPLES, PIECE = 300_000, 20_000
VOCAB, DEPTH = 5, 2


def target_logits() -> torch.Tensor:  # [V, V]
    return 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(11))


def emitted(temperature: float, q: Any, draft_logits: torch.Tensor | None, seed: int = 0) -> Counter[tuple[int, ...]]:
    """What SAMPLES requests emit after token 0, some thousands a round, drafts drawn from q [K, V]."""
    make = torch.Generator().manual_seed(12 + seed)
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(seed, seed + SAMPLES, PIECE):
        columns = [torch.multinomial(torch.tensor(row, dtype=torch.float64), PIECE, True, generator=make) for row in q]
        rows = torch.stack([torch.zeros(PIECE, dtype=torch.int64), *columns], dim=1)
        made = verify_chain(
            target_logits()[rows],
            rows[:, 1:],
            torch.full((PIECE,), DEPTH),
            torch.full((PIECE,), temperature),
            torch.arange(first, first + PIECE),
            torch.full((PIECE,), 17),
            draft_logits=None if draft_logits is None else draft_logits.expand(PIECE, DEPTH, VOCAB),
        )
        counts += outcomes(made.tokens)
    return counts


def one_hot() -> Any:
    return np.eye(VOCAB)[[3, 1]]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_one_hot_drafts(temperature: float) -> None:
    law = chain_law(softmax(target_logits().numpy() / temperature), one_hot(), 0)
    assert p_value(emitted(temperature, one_hot(), None), law) > FALSE_ALARM


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_drafts_of_a_full_law(temperature: float) -> None:
    draft_logits = 1.5 * torch.randn(DEPTH, VOCAB, generator=torch.Generator().manual_seed(13))
    draft_logits[1, 2] = float("-inf")
    q = softmax(draft_logits.numpy() / temperature)
    law = chain_law(softmax(target_logits().numpy() / temperature), q, 0)
    assert p_value(emitted(temperature, q, draft_logits), law) > FALSE_ALARM


def test_drafts_of_the_target_s_own_law_are_all_accepted() -> None:
    p = softmax(target_logits().numpy())
    make = torch.Generator().manual_seed(14)
    first = torch.multinomial(torch.tensor(p[0]), 1000, True, generator=make)
    logits = target_logits()[torch.stack((torch.zeros_like(first), first), dim=1)]
    made = verify_chain(
        logits,
        first[:, None],
        torch.ones(1000).int(),
        torch.ones(1000),
        torch.arange(1000),
        torch.zeros(1000).long(),
        draft_logits=logits[:, :1],
    )
    assert made.num_accepted.float().mean() > 0.999  # p / q is 1 but for rounding


def test_the_law_itself_is_lossless() -> None:
    p, q = softmax(target_logits().numpy()), softmax(torch.randn(DEPTH, VOCAB).numpy())
    law = chain_law(p, q, 0)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(first_token(law, VOCAB), p[0], atol=1e-12)
    after: Law = {outcome[1:]: share for outcome, share in law.items() if len(outcome) > 1 and outcome[0] == 2}
    np.testing.assert_allclose(first_token(after, VOCAB) / sum(after.values()), p[2], atol=1e-12)


def test_the_test_finds_a_law_that_is_one_percent_off() -> None:
    law = chain_law(softmax(target_logits().numpy()), one_hot(), 0)
    for seed in range(0, 2 * SAMPLES, SAMPLES):
        counts = emitted(1.0, one_hot(), None, seed)
        assert p_value(counts, law) > FALSE_ALARM
        assert p_value(counts, shifted(law, 0.01)) < FALSE_ALARM


def test_a_vocabulary_of_several_chunks_is_drawn_from_evenly() -> None:
    # Two heats, over chunks of 4 and within one, must draw as one would.
    weight = torch.tensor([0.3, 0.0, 0.1, 0.05, 0.05, 0.2, 0.02, 0.08, 0.15, 0.05])
    counts: Counter[tuple[int, ...]] = Counter()
    for seeds in torch.arange(SAMPLES).split(PIECE):
        drawn = reference.draw(weight.expand(PIECE, 10), seeds, torch.zeros_like(seeds), chunk=4)
        counts += outcomes(drawn[:, None])
    law = {(token,): share for token, share in enumerate(weight.tolist()) if share}
    assert p_value(counts, law) > FALSE_ALARM


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_is_the_published_one(key: int, counter: tuple[int, ...], words: tuple[int, ...]) -> None:
    # The known answers of Random123's distribution, kat_vectors.
    assert tuple(int(x) for x in reference.philox(torch.tensor(key), *(torch.tensor(c) for c in counter))) == words


def test_greedy_and_sampled_in_one_batch() -> None:
    logits = torch.zeros(2, 2, 4)
    logits[:, 0, 2], logits[:, 1, 1] = 50.0, 50.0
    made = verify_chain(
        logits,
        torch.tensor([[2], [2]]),
        torch.tensor([1, 1]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([5, 5]),
        torch.tensor([0, 0]),
    )
    assert made.tokens.tolist() == [[2, 1], [2, 1]]
    assert made.num_accepted.tolist() == [1, 1]


def arguments(num: int = 3, depth: int = 2, vocab: int = 7) -> list[Any]:
    make = torch.Generator().manual_seed(1)
    return [
        torch.randn(num, depth + 1, vocab, generator=make),
        torch.randint(vocab, (num, depth), generator=make),
        torch.full((num,), depth),
        torch.ones(num),
        torch.arange(num),
        torch.arange(num),
    ]


def test_results_go_where_they_are_wanted() -> None:
    out = ChainVerdict(torch.zeros(3).int(), torch.zeros(3, 3).int(), torch.zeros(3).int())
    assert verify_chain(*arguments(), out=out) is out
    assert all(torch.equal(a, b) for a, b in zip(out, verify_chain(*arguments()), strict=True))


@pytest.mark.parametrize("full_q", [False, True])
def test_the_op_is_registered_as_it_should_be(full_q: bool) -> None:
    out = ChainVerdict(torch.zeros(3).int(), torch.zeros(3, 3).int(), torch.zeros(3).int())
    q = torch.randn(3, 2, 7) if full_q else None
    torch.library.opcheck(kernel._verify_chain, (*arguments(), None, q, None, *out, 8192))


@pytest.mark.parametrize(
    ("index", "wrong", "message"),
    [
        (0, torch.zeros(3, 2, 7), "target_logits"),
        (0, torch.zeros(9, 7), "first_rows"),
        (0, torch.zeros(3, 3, 0), "vocabulary"),
        (1, torch.zeros(3), "draft_tokens"),
        (2, torch.zeros(4), "lengths"),
        (4, torch.zeros(3, 1), "seeds"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(index: int, wrong: torch.Tensor, message: str) -> None:
    given = arguments()
    given[index] = wrong
    with pytest.raises(ValueError, match=message):
        verify_chain(*given)


def test_draft_logits_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="draft_logits"):
        verify_chain(*arguments(), draft_logits=torch.zeros(3, 3, 7))


@needs_triton
def test_the_kernels_equal_their_twin_under_the_interpreter() -> None:
    run_cases("verify_chain", "cpu")


@pytest.mark.gpu
@needs_gpu
def test_the_kernels_equal_their_twin_on_a_gpu() -> None:
    run_cases("verify_chain", "cuda")
