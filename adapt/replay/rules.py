"""Rules that can be replayed, by name, and their draft lengths on a log.

    static:K           K draft tokens for every request
    table:B=K,B=K      by batch size: K up to B requests, like vLLM's own table; "table" alone: the settings' one
    goodput, latency   honed's own decision, with the log's acceptance and step times as its policy

All but static:K obey the limits of the engine's settings and its graphs, with honed's own hysteresis and exploring.

honed's own decision learns as it goes: after each step it gets the outcome of its drafts, sampled where the log lacks it. It
knows the averages of the whole log in advance. The engine learns them, too, a little later: in a log shorter than a few
hundred steps it looks better here than it would have been. Requests' own ceilings aren't logged, and don't hold here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from honed.adapt.acceptance.estimate import scale_odds
from honed.adapt.control.settings import ControllerSettings
from honed.adapt.lengths.decider import Decider
from honed.adapt.lengths.length_policy import LengthPolicy
from honed.adapt.protocol.arrays import Ints
from honed.adapt.protocol.wire import Policy, WorkloadPrior
from honed.adapt.replay.acceptance import Beliefs
from honed.adapt.replay.log import Log
from honed.adapt.steps.step_time import StepTimeModel

OWN = ("goodput", "latency")
_FOREVER_S = 1e12


@dataclass(frozen=True)
class Rule:
    """A rule and its figures."""

    text: str
    name: str
    static_k: int = -1
    table: tuple[tuple[int, int], ...] = ()


def parse_rule(text: str, num_spec_tokens: int, table: Sequence[tuple[int, int]] = ()) -> Rule:
    """Read a rule's name and figures.

    Args:
        num_spec_tokens: K, the most that a rule may draft.
        table: rows that "table" without figures means; empty: none.

    Raises:
        ValueError: it can't be replayed; the message gives the reason and the possible rules.
    """
    name, _, figures = text.partition(":")
    try:
        if name in OWN:
            if figures:
                raise ValueError(f"{name} takes no figures")
            return Rule(text, name)
        if name == "static":
            return Rule(text, name, _length(figures, num_spec_tokens))
        if name == "table":
            rows = _rows(figures, num_spec_tokens) if figures else tuple(table)
            if not rows:
                example = f"table:4={num_spec_tokens},16={min(num_spec_tokens, 2)}"
                raise ValueError(f"controller.table isn't set: write the rows, as in {example}")
            return Rule(text, name, table=rows)
        if name == "off":
            raise ValueError(f"it leaves lengths to vLLM, which drafts static:{num_spec_tokens} unless told otherwise")
        raise ValueError("there is no such policy")
    except ValueError as error:
        raise ValueError(
            f"policy {text!r} can't be replayed: {error}. There are static:0 … static:{num_spec_tokens}, "
            f"table:BATCH=K,BATCH=K (K at most {num_spec_tokens}), {', '.join(OWN)}"
        ) from error


def _length(text: str, most: int) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} isn't a draft length")
    if int(text) > most:
        raise ValueError(f"{int(text)} draft tokens are more than the engine's {most}")
    return int(text)


def _rows(text: str, most: int) -> tuple[tuple[int, int], ...]:
    rows, last = [], 0
    for row in text.split(","):
        batch, _, length = row.partition("=")
        if not batch.isdecimal() or int(batch) <= last:
            raise ValueError(f"{row!r} isn't a row: each is BATCH=K, batches at least 1 and ascending")
        last = int(batch)
        rows.append((last, _length(length, most)))
    return tuple(rows)


def lengths_of(
    rule: Rule,
    log: Log,
    num_spec_tokens: int,
    beliefs: Beliefs,
    model: StepTimeModel,
    settings: ControllerSettings,
    seed: int,
) -> Ints:
    """Draft tokens of the rule in each round, [R]."""
    if rule.name == "static":
        return np.full(len(log.step), rule.static_k)
    decider = Decider(num_spec_tokens, int(log.num_requests.max()), seed)
    decider.set_policy(_policy(rule, log, num_spec_tokens, beliefs, model, settings), now_s=0.0)
    return play(log, decider, num_spec_tokens, beliefs, seed)


def _policy(rule: Rule, log: Log, most: int, beliefs: Beliefs, model: StepTimeModel, settings: ControllerSettings) -> Policy:
    """Policy that the daemon would send: the settings' limits, the log's step times and acceptance."""
    order = np.argsort(-np.bincount(log.cell, minlength=len(log.cells)), kind="stable")  # the first also stands for the engine
    priors = [
        WorkloadPrior(workload=str(cell), acceptance=beliefs.curves[cell].tolist(), strength=float(beliefs.strengths[cell]))
        for cell in order.tolist()
    ]
    return Policy(
        generation=1,
        ttl_s=_FOREVER_S,
        kind=rule.name,
        static_k=most if settings.static_k < 0 else min(settings.static_k, most),
        max_k=most if settings.max_k < 0 else min(settings.max_k, most),
        priors=priors,
        step_seconds=list(model.parameters),
        kind_effects=list(model.kinds),
        captured_tokens=list(model.captured_tokens),
        hysteresis=settings.hysteresis,
        explore_share=settings.explore_share,
        request_ceiling=settings.request_ceiling,
        table=list(rule.table),
        equal_lengths=settings.are_lengths_equal,
        equal_up_to=settings.equal_up_to,
        captured_lengths=list(settings.captured_lengths),
    )


def play(log: Log, policy: LengthPolicy, num_spec_tokens: int, beliefs: Beliefs, seed: int) -> Ints:
    """Let a rule choose at every logged step, and report the outcome to it; return its draft lengths, [R]."""
    draw = random.Random(seed)
    names = [str(number) for number in range(len(log.cell))]
    cells = [str(number) for number in log.cell.tolist()]
    request, drafted, accepted = log.request.tolist(), log.drafted.tolist(), log.accepted.tolist()
    struck, position, theta = log.is_struck.tolist(), log.position, beliefs.theta.tolist()
    last = np.zeros(len(cells), dtype=np.int64)
    last[log.request] = np.arange(len(request))
    chosen = np.zeros(len(request), dtype=np.int64)
    started: set[int] = set()
    edges = np.flatnonzero(np.diff(log.step, prepend=-1, append=len(log.seconds))).tolist()
    for begin, end in pairwise(edges):
        mine = request[begin:end]
        for number in mine:
            if number not in started:
                started.add(number)
                policy.start(names[number], cells[number])
        step = int(log.step[begin])
        ids = [names[number] for number in mine]
        context = int(position[begin:end].sum()) + end - begin
        decision = policy.decide(ids, context, int(log.num_prefill_tokens[step]), float(step))
        lengths = [min(max(k, 0), num_spec_tokens) for k in decision.num_draft_tokens]
        outcome = []
        for i, k in enumerate(lengths, begin):
            result = min(accepted[i], k)
            if k > drafted[i] <= accepted[i] and not struck[i]:
                curve = beliefs.curves[log.cell[request[i]]]
                while result < k and draw.random() < scale_odds(curve[result], theta[request[i]]):
                    result += 1
            outcome.append(result)
        policy.observe(ids, lengths, outcome)
        chosen[begin:end] = lengths
        for i in range(begin, end):
            if last[request[i]] == i:
                policy.finish(names[request[i]])
    return chosen
