"""Traces whose step time jumps at token counts, as where a kernel changes or the next captured graph is larger.

Each has one workload and a steady number of requests, so that one fixed length is nearly the best possible. Honed is compared
with it from round `FIRST_ROUND` on: the ratio of their seconds for the same work with the same luck, 1 where they are equal.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.simulated.dictated import Dictated
from benchmarks.simulated.engine import simulate
from benchmarks.simulated.oracle import run_steered
from benchmarks.simulated.traffic import Cost, Load, Trace, Traffic, Workload, linear
from honed.adapt.protocol.arrays import Floats

FIRST_ROUND = 2000
_FALL = 0.97
"""Acceptance of a draft relative to the one before."""
_NUM_RANDOM = 24


def with_jumps(smooth: Callable[[Floats], Floats], *jumps: tuple[int, float]) -> Callable[[Floats], Floats]:
    """Make a token cost that is so many seconds higher above each (tokens)."""

    def seconds(tokens: Floats) -> Floats:
        total = smooth(tokens)
        for most, added_s in jumps:
            total = total + added_s * (tokens > most)
        return total

    return seconds


def _trace(name: str, seed: int, num_spec_tokens: int, requests: int, first: float, cost: Cost, is_shortened: bool) -> Trace:
    curve = tuple(first * _FALL**position for position in range(num_spec_tokens))
    work = min(400_000, 6000 * (requests + 1))
    load, chat = Load(concurrency=((0.0, requests),)), Workload("chat", curve)
    return Trace(name, seed, num_spec_tokens, requests, work, (chat,), load, ((0.0, cost),), is_block_shortened=is_shortened)


def _one_jump(num_spec_tokens: int, most: int) -> Trace:
    cost = Cost(13e-3, with_jumps(linear(20e-6), (most, 6.5e-3)), drafting_s=0.5e-3)
    return _trace(f"jump-k{num_spec_tokens}-at-{most}", 200 + num_spec_tokens, num_spec_tokens, 4, 0.77, cost, True)


def _random(seed: int) -> Trace:
    rng = np.random.default_rng([seed, 77])
    k, requests = int(rng.choice([3, 7, 15])), int(rng.choice([1, 2, 4, 8, 16, 32]))
    base_s, per_token_s = float(rng.uniform(5e-3, 25e-3)), float(np.exp(rng.uniform(np.log(5e-6), np.log(4e-4))))
    num_jumps, most = int(rng.integers(0, 4)), requests * (k + 1)
    jumps = [(int(rng.integers(requests, most)), base_s * float(rng.uniform(0.1, 0.6))) for _ in range(num_jumps)]
    drafting_s, per_block_token_s = base_s * float(rng.uniform(0.02, 0.1)), base_s * float(rng.uniform(0.0, 0.02))
    tokens = with_jumps(linear(per_token_s), *jumps)
    cost = Cost(base_s, tokens, 4e-6, 1.5e-9, drafting_s=drafting_s, per_block_token_s=per_block_token_s)
    name = f"jumps-{seed}-k{k}-n{requests}-{'-'.join(str(at) for at, _ in sorted(jumps)) or 'none'}"
    return _trace(name, seed, k, requests, float(rng.uniform(0.4, 0.92)), cost, bool(rng.random() < 0.6))


JUMPS = (_one_jump(7, 16), _one_jump(15, 20), *map(_random, range(_NUM_RANDOM)))


def ratio_to_best_length(trace: Trace, seed: int = 0) -> float:
    """Seconds of the best fixed length / honed's, for the work from `FIRST_ROUND` on."""
    traffic, k = Traffic(trace), trace.num_spec_tokens
    run = run_steered(traffic, seed=seed)
    rounds, fixed = np.cumsum(run.num_requests), [simulate(traffic, Dictated(k, length)) for length in range(k + 1)]
    begin = float(run.work[min(int(np.searchsorted(rounds, FIRST_ROUND)), len(rounds) - 1)])
    end = float(min([run.work[-1], *(one.work[-1] for one in fixed)]))
    return min(one.seconds_between(begin, end) for one in fixed) / run.seconds_between(begin, end)
