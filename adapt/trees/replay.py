"""Predicts tree policies' results on logged candidates.

The text is kept. DDTree's walk emits the target's own samples, and those were logged. So a tree's walk follows the text as long
as the text is in the tree, at any temperature: accepted tokens are exact wherever candidates were logged where a round begins.
An engine's log has only the rounds that it ran. Without candidates the round begins at the next position that has them, the
tokens between are skipped, and `exact_rounds` falls below 1.

The load is kept: `num_requests` are in the batch at all times, in the log's order. When the log is used up it begins again to
keep the batch full; repeated requests don't count and teach nothing. A step of N requests costs, by a step-time model,

    seconds = T(N, N + Σ nodes, Σ context, block)        block: D, or K for chain:K, 0 where the drafter is skipped

They are shared equally among its requests: so each has its own tokens and seconds, and the bootstrap can draw requests:

    tokens per second = N · Σ_i tokens_i / Σ_i (N · seconds_i)       value, 2.5 % and 97.5 % quantile over draws of requests

With fewer requests than `LEAST_REQUESTS` there is no interval.

Learning and deciding cost nothing here. Letters: N = requests of a step, Q = requests of the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from honed.adapt.protocol.arrays import Floats
from honed.adapt.replay.replay import LEAST_REQUESTS, Figure
from honed.adapt.steps.step_time import StepTimeModel
from honed.adapt.trees.candidate_log import CandidateRequest
from honed.adapt.trees.policies import Chain, Grower, Planned, Round, TreePolicy, parse_tree_policy

NUM_RESAMPLES = 1000
_TOKENS, _SECONDS, _ROUNDS, _NODES, _EXACT = range(5)


@dataclass(frozen=True)
class TreePrediction:
    """A policy's predicted figures."""

    policy: str
    num_requests: int
    tokens_per_s: Figure
    acceptance_length: Figure
    """Tokens per round, bonus token included, rounds without a tree too."""
    nodes_per_round: float
    exact_rounds: float
    calibration_error: float | None
    """Expected calibration error of the verified nodes' probabilities; None: the policy has none."""
    calibration_error_before: float | None
    """The same nodes by the drafter's own log-probabilities."""
    sums: Floats
    """Sums of each request of the log: tokens, its share of seconds, rounds, nodes, exact rounds, [Q, 5]."""


def predict(
    requests: Sequence[CandidateRequest], policy: str, model: StepTimeModel, num_requests: int = 1, seed: int = 0
) -> TreePrediction:
    """Replay a log with one policy.

    Raises:
        ValueError: no such policy, no requests, or a batch of none.
    """
    if not requests or num_requests < 1:
        raise ValueError("there must be at least one request in the log, and one in the batch")
    depths = requests[0].candidates.shape[1]
    rule = parse_tree_policy(policy, depths, model)
    sums = run(requests, rule, model, num_requests, rule.length if isinstance(rule, Chain) else depths)
    grower = getattr(rule, "grower", None)
    after = before = None
    if isinstance(grower, Grower) and grower.calibration.num_nodes:
        after, before = grower.calibration.error, grower.calibration_before.error
    total = sums.sum(axis=0)
    return TreePrediction(
        policy,
        num_requests,
        ratio_of(sums, _TOKENS, _SECONDS, seed),
        ratio_of(sums, _TOKENS, _ROUNDS, seed),
        float(total[_NODES] / total[_ROUNDS]),
        float(total[_EXACT] / total[_ROUNDS]),
        after,
        before,
        sums,
    )


def run(requests: Sequence[CandidateRequest], rule: TreePolicy, model: StepTimeModel, num_requests: int, block: int) -> Floats:
    """Play the log through a batch of `num_requests`; sums of each request, [Q, 5]."""
    sums = np.zeros((len(requests), 5))
    waiting, left = 0, len(requests)
    places: list[tuple[int, int, bool]] = []  # request, tokens emitted so far, whether it counts
    while left:
        while len(places) < num_requests:
            places.append((waiting % len(requests), 0, waiting < len(requests)))
            waiting += 1
        rounds, is_exact = _begin(requests, places)
        plans = rule.plan(rounds, model)
        nodes = [plan.num_nodes for plan in plans] if plans is not None else [0] * num_requests
        context = sum(one.context_tokens for one in rounds)
        seconds = model.seconds(num_requests, num_requests + sum(nodes), context, 0, block if plans is not None else 0)
        after = []
        accepted = [plan.num_accepted_tokens for plan in plans] if plans is not None else [0] * num_requests
        for index, (one, (request, _, counts)) in enumerate(zip(rounds, places, strict=True)):
            begin = int(one.request.starts[one.row])
            emitted = min(1 + accepted[index], len(one.request.tokens) - begin)
            if counts:
                sums[request] += (emitted, seconds / num_requests, 1.0, nodes[index], is_exact[index])
            if begin + emitted < len(one.request.tokens) and one.request.row_at[begin + emitted] < len(one.request.starts):
                after.append((request, begin + emitted, counts))
            else:
                left -= counts
        if plans is not None:
            _teach(rule, places, rounds, plans)
        places = after
    return sums


def _begin(requests: Sequence[CandidateRequest], places: list[tuple[int, int, bool]]) -> tuple[list[Round], list[bool]]:
    rounds, is_exact = [], []
    for number, emitted, _ in places:
        request = requests[number]
        row = int(request.row_at[emitted])
        begin = int(request.starts[row])
        rounds.append(Round(request, row, request.first_position + begin))
        is_exact.append(begin == emitted)
    return rounds, is_exact


def _teach(rule: TreePolicy, places: list[tuple[int, int, bool]], rounds: Sequence[Round], plans: Sequence[Planned]) -> None:
    kept = [index for index, (_, _, counts) in enumerate(places) if counts]
    if kept:
        rule.observe([rounds[index] for index in kept], [plans[index] for index in kept])


def ratio_of(sums: Floats, over: int, under: int, seed: int = 0) -> Figure:
    """Estimate Σ over / Σ under with its 95 % interval, drawing requests with replacement."""
    draws = np.random.default_rng(seed).multinomial(len(sums), np.full(len(sums), 1.0 / len(sums)), NUM_RESAMPLES)
    drawn = (draws @ sums[:, over]) / (draws @ sums[:, under])
    return _figure(float(sums[:, over].sum() / sums[:, under].sum()), drawn, len(sums))


def _figure(value: float, drawn: Floats, num_requests: int) -> Figure:
    if num_requests < LEAST_REQUESTS:
        return Figure(value, None, None)
    low, high = np.quantile(drawn, (0.025, 0.975)).tolist()
    return Figure(value, low, high)


def speed_ratio(one: TreePrediction, other: TreePrediction, seed: int = 0) -> Figure:
    """Tokens per second of one policy over another's, on the same draws of requests."""
    count = len(one.sums)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1.0 / count), NUM_RESAMPLES)

    def speed(weights: npt.NDArray[Any], sums: Floats) -> Floats:
        rate: Floats = (weights @ sums[:, _TOKENS]) / (weights @ sums[:, _SECONDS])
        return rate

    every = np.ones((1, count))
    ratios = speed(draws, one.sums) / speed(draws, other.sums)
    return _figure(float((speed(every, one.sums) / speed(every, other.sums))[0]), ratios, count)
