"""Scenarios for `against_vllm.py`: traffic whose drafts show features, and engines on which vLLM's assumptions hold or don't.

vLLM's adaptive verification assumes that step times stay as at start and depend on tokens and requests alone, and that the
drafter always drafts K. It also assumes that every length fits a captured graph, and that the drafter's log-odds mean the same
in all traffic. All of that is true in the `holds-*` scenarios (even its first guess of the slope, 0.5, is right). Each of the
others violates one assumption. Context costs nothing, so vLLM's profile at 8192 tokens of it is right. Nothing in them is tuned
to a rule. Work is about twice that of the warm-up, or more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.simulated.features import Feature
from benchmarks.simulated.traffic import Cost, Load, Trace, Workload, linear, roofline
from honed.adapt.protocol.arrays import Floats

GOOD = (0.82, 0.8, 0.78, 0.76, 0.75, 0.74, 0.73)
FAIR = (0.7, 0.66, 0.62, 0.6, 0.58, 0.56, 0.55)
LOW = (0.45, 0.4, 0.38, 0.36, 0.35, 0.34, 0.33)
POOR = (0.2, 0.18, 0.16, 0.15)
GRAPHS = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Sizes that vLLM captures by default."""
ALL_GRAPHS = (*GRAPHS, *range(528, 2049, 16))
K = 7

# An 8B target: 5.5 ms to read its weights, compute-bound from some 200 tokens; a one-pass drafter that always drafts K.
EIGHT_B = Cost(
    0.5e-3, roofline(5.5e-3, 2.7e-5), 4e-6, drafting_s=0.9e-3, drafting_per_request_s=6e-6, captured_tokens=ALL_GRAPHS
)
# The same machine shared with another process.
SLOWED = replace(EIGHT_B, base_s=1e-3, token_seconds=linear(1.5e-4), drafting_s=1.5e-3)
SEQUENTIAL = Cost(0.5e-3, roofline(7.5e-3, 3e-5), 4e-6, drafting_s=0.2e-3, per_block_token_s=0.9e-3, captured_tokens=ALL_GRAPHS)


def beyond_graphs(seconds: Callable[[Floats], Floats], largest: int, lost_s: float) -> Callable[[Floats], Floats]:
    """Make a token cost that jumps by (lost_s) beyond the (largest) captured size."""
    return lambda tokens: seconds(tokens) + np.where(tokens > largest, lost_s, 0.0)


@dataclass(frozen=True)
class Scenario:
    """A trace, and vLLM's handling of it."""

    trace: Trace
    is_refused: bool = False
    """vLLM refuses adaptive verification on such a backend: it verifies K for everybody."""


SHOWN = Feature()


def featured(feature: Feature = SHOWN, **changes: object) -> tuple[Workload, ...]:
    """Make two workloads that show the same features."""
    chat, code = Workload("chat", FAIR, feature=feature), Workload("code", GOOD, feature=feature)
    return replace(chat, **changes), replace(code, **changes)  # type: ignore[arg-type]


def scenario(
    name: str,
    requests: int,
    num_tokens: int,
    workloads: tuple[Workload, ...],
    *costs: Cost,
    is_block_shortened: bool = False,
    is_refused: bool = False,
) -> Scenario:
    """Describe a closed loop; costs follow each other in equal shares of the work."""
    stretches = tuple((share / len(costs), cost) for share, cost in enumerate(costs))
    load = Load(concurrency=((0.0, requests),))
    trace = Trace(name, 1, K, requests, num_tokens, workloads, load, stretches, is_block_shortened=is_block_shortened)
    return Scenario(trace, is_refused)


SCENARIOS = (
    scenario("holds-1", 1, 17_000, featured(), EIGHT_B),
    scenario("holds-16", 16, 220_000, featured(), EIGHT_B),
    scenario("holds-64", 64, 400_000, featured(), EIGHT_B),
    scenario("holds-256", 256, 500_000, featured(), EIGHT_B),
    scenario("costs-drift", 32, 300_000, featured(), EIGHT_B, SLOWED),
    scenario(
        "drafter-not-worth-it",
        8,
        30_000,
        (Workload("chat", LOW, feature=SHOWN), Workload("poems", POOR, feature=SHOWN)),
        SEQUENTIAL,
        is_block_shortened=True,
    ),
    scenario("equal-lengths-only", 32, 300_000, featured(), replace(EIGHT_B, mixed_s=3e-3), is_refused=True),
    scenario("blind-features", 64, 400_000, featured(Feature(slope=0.0, noise=1.0)), EIGHT_B),
    scenario(
        "features-differ",
        64,
        350_000,
        (
            Workload("chat", FAIR, feature=SHOWN),
            Workload("code", GOOD, feature=Feature(slope=0.5, offset=-1.0)),
            Workload("poems", POOR, feature=Feature(slope=1.0, offset=5.0)),
        ),
        EIGHT_B,
    ),
    scenario(
        "beyond-graphs",
        256,
        500_000,
        featured(),
        replace(EIGHT_B, captured_tokens=GRAPHS, token_seconds=beyond_graphs(roofline(5.5e-3, 2.7e-5), GRAPHS[-1], 2.5e-3)),
    ),
    scenario("short-requests", 64, 110_000, featured(strength=5.0, output_tokens=(8, 48)), EIGHT_B),
    scenario("scattered-requests", 64, 450_000, featured(strength=2.0, output_tokens=(16, 64), prompt_tokens=(8, 32)), EIGHT_B),
    scenario("shows-nothing-of-tokens", 64, 400_000, featured(Feature(0.0)), EIGHT_B),
    scenario("shows-much-of-tokens", 64, 400_000, featured(Feature(2.0)), EIGHT_B),
)
"""`shows-*` and holds-64 are a series of informativeness: 0, 1 and 2 (σ of the token's part of the log-odds)."""
