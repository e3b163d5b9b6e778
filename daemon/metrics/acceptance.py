"""Metrics of verify rounds: drafted and accepted tokens, by position too, and acceptance lengths."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from honed.daemon.control.live_rounds import LiveRounds
from honed.daemon.ingest.engines import Engines
from honed.daemon.metrics.labels import ENGINE_LABELS, MOST_POSITIONS, engines_shown, labels_of
from honed.daemon.store.rollups import Counts

ROUND_LABELS = [*ENGINE_LABELS, "workload", "drafter_version"]
Rounds = list[tuple[list[str], Counts]]
"""Values of ROUND_LABELS, with their counts."""


def read(engines: Engines, live: LiveRounds) -> Rounds:
    """Data of the group; call under the service's lock."""
    known = {engine.engine_id: labels_of(engine) for engine in engines_shown(engines)}
    return [
        ([*known[engine_id], workload, version], counts)
        for (engine_id, workload, version), counts in live.snapshot()
        if engine_id in known
    ]


def families(rounds: Rounds) -> Iterator[Metric]:
    """The group, from the result of `read`."""
    yield from _totals(rounds)
    yield from _by_position(rounds)
    length = HistogramMetricFamily(
        "honed_acceptance_length",
        "Tokens sampled per round with drafts, bonus token included: vLLM's own figure, past a request's end too.",
        labels=ROUND_LABELS,
    )
    found = [counts.accepted_histogram()[:MOST_POSITIONS].tolist() for _, counts in rounds]
    longest = max(map(len, found), default=0)  # series with other buckets couldn't be added up
    for (labels, counts), histogram in zip(rounds, found, strict=True):
        buckets = _buckets(histogram + [0] * (longest - len(histogram)), counts.rounds)
        length.add_metric(labels, buckets, counts.rounds + counts.accepted_tokens)
    yield length


def _totals(rounds: Rounds) -> Iterator[Metric]:
    for name, text, field in (
        ("honed_verify_rounds", "Verify rounds with at least one draft token, as vLLM counts drafts.", "rounds"),
        ("honed_plain_rounds", "Decode rounds without draft tokens.", "plain_rounds"),
        ("honed_draft_tokens", "Draft tokens verified: vLLM's own figure.", "draft_tokens"),
        ("honed_accepted_tokens", "Draft tokens accepted: vLLM's own figure, past a request's end too.", "accepted_tokens"),
        (
            "honed_emitted_tokens",
            "Tokens sampled in rounds with or without drafts, past a request's end too.",
            "emitted_tokens",
        ),
        ("honed_delivered_tokens", "Tokens of these up to their request's end.", "delivered_tokens"),
        ("honed_tree_rounds", "Verify rounds with a draft tree.", "tree_rounds"),
        ("honed_tree_nodes", "Nodes of these trees; they are among the draft tokens.", "tree_nodes"),
        ("honed_tree_accepted_tokens", "Nodes accepted; they are among the accepted tokens.", "tree_accepted_tokens"),
        (
            "honed_tree_chain_accepted_tokens",
            "Tokens that the drafter's own chain in these trees would have got.",
            "chain_accepted_tokens",
        ),
    ):
        family = CounterMetricFamily(name, text, labels=ROUND_LABELS)
        for labels, counts in rounds:
            family.add_metric(labels, getattr(counts, field))
        yield family


def _by_position(rounds: Rounds) -> Iterator[Metric]:
    for name, text, field in (
        ("honed_position_drafted", "Rounds that drafted this position (from 0); of a tree, its chain.", "drafted"),
        ("honed_position_tried", "Rounds that drafted this position and accepted every one before it.", "tried"),
        ("honed_position_accepted", "Rounds that accepted this position; of a tree, of its chain.", "accepted"),
    ):
        family = CounterMetricFamily(name, text, labels=[*ROUND_LABELS, "position"])
        for labels, counts in rounds:
            for position, value in enumerate(getattr(counts, field)[:MOST_POSITIONS].tolist()):
                family.add_metric([*labels, str(position)], value)
        yield family


def _buckets(histogram: list[int], num_rounds: int) -> list[tuple[str, float]]:
    """Cumulative buckets of rounds by number of accepted drafts, one for each length up to MOST_POSITIONS."""
    sums = enumerate(accumulate(histogram), 1)
    return [*((str(float(length)), float(total)) for length, total in sums), ("+Inf", float(num_rounds))]
