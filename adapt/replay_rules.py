"""The rules that can be replayed, by name, and what each would have drafted on a log.

    static:K           K draft tokens for everybody
    table:B=K,B=K      by batch size: K up to B requests, as vLLM's own table
    goodput            honed's own decision, with the log's acceptance and step times as its policy
    threshold …        the others of `adapt.contenders`

A rule learns as it goes: after each step it is told what its drafts would have come to, sampled where the log doesn't say.
What `goodput` and the priced contenders know in advance, the averages of the whole log, the engine learns as well, a little
later: in a log shorter than a few hundred steps they look better here than they would have done.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from honed.adapt.acceptance import Ints, scale_odds
from honed.adapt.decider import Decider
from honed.adapt.length_policy import LengthPolicy
from honed.adapt.replay_acceptance import Beliefs
from honed.adapt.replay_log import Log
from honed.adapt.step_time import StepTimeModel
from honed.adapt.wire import Policy, WorkloadPrior

OWN = "goodput"
_FOREVER_S = 1e12


@dataclass(frozen=True)
class Rule:
    """A rule and its figures."""

    text: str
    name: str
    static_k: int = -1
    table: tuple[tuple[int, int], ...] = ()


def parse_rule(text: str, num_spec_tokens: int) -> Rule:
    """Read a rule's name and figures. Raises ValueError, naming what there is, for anything else."""
    from honed.adapt.contenders import CONTENDERS

    name, _, figures = text.partition(":")
    try:
        if name == "static" and 0 <= int(figures) <= num_spec_tokens:
            return Rule(text, name, int(figures))
        if name == "table" and figures:
            rows = tuple((int(batch), int(k)) for batch, k in (row.split("=") for row in figures.split(",")))
            if all(0 <= k <= num_spec_tokens for _, k in rows):
                return Rule(text, name, table=rows)
        elif not figures and name not in ("static", "table") and name in (OWN, *CONTENDERS):
            return Rule(text, name)
    except ValueError:
        pass
    others = ", ".join(sorted({OWN, *CONTENDERS} - {"static", "table"}))
    raise ValueError(
        f"unknown policy {text!r}: there are static:0 … static:{num_spec_tokens}, table:BATCH=K,BATCH=K (K at most "
        f"{num_spec_tokens}), {others}"
    )


def lengths_of(rule: Rule, log: Log, num_spec_tokens: int, beliefs: Beliefs, model: StepTimeModel, seed: int) -> Ints:
    """Say how many tokens the rule would have drafted in each round, [R]."""
    if rule.name == "static":
        return np.full(len(log.step), rule.static_k)
    return play(log, make(rule, log, num_spec_tokens, beliefs, model, seed), num_spec_tokens, beliefs, seed)


def make(rule: Rule, log: Log, num_spec_tokens: int, beliefs: Beliefs, model: StepTimeModel, seed: int) -> LengthPolicy:
    """Make a rule that knows the log's step times, and honed's own also its acceptance."""
    if rule.name != OWN:
        from honed.adapt.contenders import make_contender

        contender = make_contender(rule.name, num_spec_tokens, seed)
        contender.set_limits(num_spec_tokens, num_spec_tokens, rule.table, model)
        return contender
    decider = Decider(num_spec_tokens, int(log.num_requests.max()), seed)
    order = np.argsort(-np.bincount(log.cell, minlength=len(log.cells)), kind="stable")  # the first serves as engine-wide one
    priors = [
        WorkloadPrior(workload=str(cell), acceptance=beliefs.curves[cell].tolist(), strength=float(beliefs.strengths[cell]))
        for cell in order.tolist()
    ]
    decider.set_policy(
        Policy(
            engine_id="", generation=1, ttl_s=_FOREVER_S, kind=OWN, static_k=num_spec_tokens, max_k=num_spec_tokens,
            priors=priors, step_seconds=list(model.parameters), captured_tokens=list(model.captured_tokens),
        ),
        now_s=0.0,
    )  # fmt: skip
    return decider


def play(log: Log, policy: LengthPolicy, num_spec_tokens: int, beliefs: Beliefs, seed: int) -> Ints:
    """Let a rule choose at every logged step, and tell it what came of it; what it drafts in each round, [R]."""
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
