"""verify_tree: the law of what it emits, on its twin; the kernels themselves in a process of their own.

The χ² tests have a false-alarm rate of 1e-6 each and, at 300,000 samples, find one percent of the mass moved from the likeliest
outcome to the next with a probability above 0.999.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from honed.kernels.verify import verify_tree as kernel
from honed.kernels.verify.verify_tree import TreeVerdict, verify_tree
from tests.kernels.interpreting import needs_gpu, needs_triton, run_cases
from tests.kernels.verify_oracle import FALSE_ALARM, first_token, outcomes, p_value, shifted, softmax, tree_law

SAMPLES, PIECE = 300_000, 20_000
VOCAB = 5
TOKENS, PARENTS, DEPTHS = [2, 4, 1, 3, 2, 0], [-1, -1, 0, 0, 1, 2], [1, 1, 2, 2, 2, 3]


def target_logits() -> torch.Tensor:  # [V, V]
    return 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(21))


def emitted(temperature: float, seed: int = 0) -> Counter[tuple[int, ...]]:
    """What SAMPLES requests emit, some thousands a round."""
    pieces = (sampled(PIECE, temperature, TOKENS, PARENTS, DEPTHS, seed + i).tokens for i in range(0, SAMPLES, PIECE))
    return sum((outcomes(piece) for piece in pieces), Counter())


def sampled(
    num: int, temperature: float, tokens: list[int], parents: list[int], depths: list[int], seed: int = 0
) -> TreeVerdict:
    """A round of `num` requests with the same tree, each with a seed of its own."""
    spread = [torch.tensor(x).expand(num, len(tokens)) for x in (tokens, parents, depths)]
    return verify_tree(
        target_logits()[[0, *tokens]].expand(num, len(tokens) + 1, VOCAB),
        *spread,
        torch.full((num,), temperature),
        torch.arange(num) + seed,
        torch.full((num,), 17),
        3,
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_law_of_what_is_emitted(temperature: float) -> None:
    law = tree_law(softmax(target_logits().numpy() / temperature), 0, TOKENS, PARENTS)
    assert p_value(emitted(temperature), law) > FALSE_ALARM


def test_the_test_finds_a_law_that_is_one_percent_off() -> None:
    law = tree_law(softmax(target_logits().numpy()), 0, TOKENS, PARENTS)
    for seed in range(0, 2 * SAMPLES, SAMPLES):
        counts = emitted(1.0, seed)
        assert p_value(counts, law) > FALSE_ALARM
        assert p_value(counts, shifted(law, 0.01)) < FALSE_ALARM


def test_the_law_itself_is_lossless() -> None:
    p = softmax(target_logits().numpy())
    law = tree_law(p, 0, TOKENS, PARENTS)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(first_token(law, VOCAB), p[0], atol=1e-12)


def test_the_text_is_that_of_plain_sampling_whatever_was_drafted() -> None:
    num = 200
    plain = torch.empty(num, 3, dtype=torch.int64)
    previous = torch.zeros(num, dtype=torch.int64)
    for i in range(3):
        made = verify_tree(
            target_logits()[previous][:, None],
            *[torch.zeros(num, 0).int()] * 3,
            torch.ones(num),
            torch.arange(num),
            torch.full((num,), 17 + i),
            0,
        )
        previous = made.bonus_token_ids.long()
        plain[:, i] = previous
    trees = ((TOKENS, PARENTS, DEPTHS), ([1, 1], [-1, 0], [1, 2]), ([], [], []))
    for tokens, parents, depths in trees:
        made = sampled(num, 1.0, tokens, parents, depths).tokens[:, :3]
        assert torch.where(made >= 0, made, plain).equal(plain)


def test_greedy_follows_the_likeliest_tokens() -> None:
    best = target_logits().argmax(-1).tolist()
    first, second = best[0], best[best[0]]
    made = sampled(2, 0.0, [(first + 1) % VOCAB, first, second], [-1, -1, 1], [1, 1, 2])
    assert made.path.tolist() == [[2, 3, -1]] * 2
    assert made.tokens.tolist() == [[first, second, best[second], -1]] * 2


def arguments(num: int = 3, nodes: int = 4, vocab: int = 7) -> list[Any]:
    make = torch.Generator().manual_seed(1)
    return [
        torch.randn(num, nodes + 1, vocab, generator=make),
        torch.randint(vocab, (num, nodes), generator=make),
        torch.arange(-1, nodes - 1).expand(num, nodes),
        torch.arange(1, nodes + 1).expand(num, nodes),
        torch.ones(num),
        torch.arange(num),
        torch.arange(num),
        3,
    ]


def results() -> TreeVerdict:
    return TreeVerdict(torch.zeros(3).int(), torch.zeros(3, 3).int(), torch.zeros(3, 4).int(), torch.zeros(3).int())


def test_results_go_where_they_are_wanted() -> None:
    out = results()
    assert verify_tree(*arguments(), out=out) is out
    assert all(torch.equal(a, b) for a, b in zip(out, verify_tree(*arguments()), strict=True))


def test_the_op_is_registered_as_it_should_be() -> None:
    torch.library.opcheck(kernel._verify_tree, (*arguments(), None, *results(), 8192))


@pytest.mark.parametrize(
    ("index", "wrong", "message"),
    [
        (0, torch.zeros(3, 4, 7), "target_logits"),
        (0, torch.zeros(15, 7), "first_rows"),
        (2, torch.zeros(3, 5), "parents"),
        (3, torch.zeros(4), "depths"),
        (4, torch.zeros(4), "temperatures"),
        (7, -1, "max_depth"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(index: int, wrong: Any, message: str) -> None:
    given = arguments()
    given[index] = wrong
    with pytest.raises(ValueError, match=message):
        verify_tree(*given)


@needs_triton
def test_the_kernels_equal_their_twin_under_the_interpreter() -> None:
    run_cases("verify_tree", "cpu")


@pytest.mark.gpu
@needs_gpu
def test_the_kernels_equal_their_twin_on_a_gpu() -> None:
    run_cases("verify_tree", "cuda")
