"""Twenty simulated traces, each with its seed: the traffic of `benchmarks/regret.py`.

Costs resemble those of targets on a data-centre GPU, or of a small one on a CPU. The GPU targets are an 8B one (about 6 ms to
read its weights, compute-bound from some 200 tokens), a 32B and a 70B one (about 20 and 15 ms, the latter in 8 bits). Drafters
draft in one pass, as DFlash, or token by token. Traces describe traffic and must not be tuned to a rule.
"""

from __future__ import annotations

from benchmarks.simulated.traffic import Cost, Drift, Load, Trace, Workload, linear, roofline

HIGH = (0.92, 0.9, 0.88, 0.87, 0.86, 0.85, 0.84)
GOOD = (0.82, 0.8, 0.78, 0.76, 0.75, 0.74, 0.73)
FAIR = (0.7, 0.66, 0.62, 0.6, 0.58, 0.56, 0.55)
LOW = (0.45, 0.4, 0.38, 0.36, 0.35, 0.34, 0.33)
POOR = (0.2, 0.18, 0.16, 0.15)
GRAPHS = (1, 2, 4, *range(8, 513, 8))
FEW_GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

# Read as: target, then drafter. "one pass": cost barely grows with the block; "sequential": each draft token costs the same.
SMALL = Cost(0.5e-3, roofline(5.5e-3, 2.7e-5), 4e-6, 1.5e-9, drafting_s=0.7e-3, per_block_token_s=4e-5)
SMALL_V2 = Cost(0.5e-3, roofline(5.5e-3, 2.7e-5), 4e-6, 1.5e-9, drafting_s=0.9e-3, drafting_per_request_s=6e-6)
LARGE = Cost(1e-3, roofline(19e-3, 1.1e-4), 6e-6, 4e-9, drafting_s=1.2e-3, per_block_token_s=8e-5)
SEQUENTIAL = Cost(0.5e-3, roofline(7.5e-3, 3e-5), 4e-6, 2e-9, drafting_s=0.2e-3, per_block_token_s=0.9e-3)
COMPUTE = Cost(14e-3, linear(1e-5, (96, 9e-5), (384, 6e-5)), 5e-6, 1.5e-9, drafting_s=1e-3, drafting_per_request_s=1e-5)
GRAPHED = Cost(6e-3, linear(5e-6, (128, 2.5e-5)), 4e-6, 1.5e-9, 0.0, 0.8e-3, 4e-6, 5e-5, 0.0, GRAPHS)
CPU_LIKE = Cost(9e-3, linear(2.1e-3), 1e-4, 5e-8, drafting_s=1.5e-3, per_block_token_s=0.3e-3)

SLOW_CPU = Cost(31e-3, linear(0.8e-3), 3e-4, 5e-8, drafting_s=3e-3, drafting_per_request_s=2e-4, per_block_token_s=1e-4)


def steady(requests: int) -> Load:
    """Make a closed loop of `requests`."""
    return Load(concurrency=((0.0, requests),))


def _always(cost: Cost) -> tuple[tuple[float, Cost], ...]:
    return ((0.0, cost),)


TRACES = (
    Trace("one-high", 101, 7, 1, 50_000, (Workload("chat", HIGH),), steady(1), _always(SMALL)),
    Trace("one-low-sequential", 102, 7, 1, 12_000, (Workload("chat", LOW),), steady(1), _always(SEQUENTIAL)),
    Trace(
        "one-block-15",
        103,
        15,
        1,
        32_000,
        (Workload("code", HIGH, strength=30.0, output_tokens=(256, 2048)),),
        steady(1),
        _always(LARGE),
        is_block_shortened=False,
    ),
    Trace("four-cpu", 104, 7, 4, 40_000, (Workload("chat", FAIR, strength=12.0),), steady(4), _always(CPU_LIKE)),
    Trace(
        "eight-mixed",
        105,
        7,
        8,
        200_000,
        (Workload("code", HIGH, weight=2.0), Workload("chat", FAIR), Workload("poems", POOR)),
        steady(8),
        _always(SMALL),
    ),
    Trace("sixteen-k3", 106, 3, 16, 160_000, (Workload("chat", FAIR), Workload("code", GOOD)), steady(16), _always(LARGE)),
    Trace(
        "thirty-two-v2",
        107,
        7,
        32,
        700_000,
        (Workload("chat", GOOD), Workload("code", HIGH)),
        steady(32),
        _always(SMALL_V2),
        is_block_shortened=False,
    ),
    Trace(
        "sixty-four-graphs",
        108,
        7,
        64,
        600_000,
        (Workload("chat", FAIR), Workload("code", GOOD)),
        steady(64),
        _always(GRAPHED),
    ),
    Trace(
        "hundred-few-graphs",
        109,
        7,
        128,
        700_000,
        (Workload("chat", FAIR),),
        steady(100),
        _always(Cost(6e-3, linear(1.5e-5, (200, 1.5e-5)), 4e-6, 1.5e-9, 0.0, 0.8e-3, captured_tokens=FEW_GRAPHS)),
        is_block_shortened=False,
    ),
    Trace(
        "full-compute-bound",
        110,
        7,
        256,
        1_000_000,
        (Workload("chat", FAIR), Workload("code", GOOD)),
        steady(256),
        _always(COMPUTE),
        is_block_shortened=False,
    ),
    Trace(
        "full-block-15-tiles",
        111,
        15,
        256,
        1_000_000,
        (Workload("code", HIGH, strength=8.0), Workload("chat", LOW, strength=8.0)),
        steady(256),
        _always(Cost(0.5e-3, roofline(7e-3, 2.4e-5, 4.0, tile=64), 4e-6, 1.5e-9, drafting_s=1e-3, drafting_per_request_s=1e-5)),
        is_block_shortened=False,
    ),
    Trace("sixty-four-sequential", 112, 3, 64, 350_000, (Workload("chat", FAIR),), steady(64), _always(SEQUENTIAL)),
    Trace(
        "falls-at-once",
        113,
        7,
        4,
        60_000,
        (Workload("chat", HIGH, drift=(Drift(0.5, LOW),)),),
        steady(4),
        _always(CPU_LIKE),
        events=(0.5,),
    ),
    Trace(
        "rises-at-once",
        114,
        7,
        8,
        100_000,
        (Workload("chat", POOR, drift=(Drift(0.5, GOOD),)),),
        steady(8),
        _always(CPU_LIKE),
        events=(0.5,),
    ),
    Trace(
        "one-falls",
        115,
        15,
        1,
        16_000,
        (Workload("chat", HIGH, output_tokens=(256, 1024), drift=(Drift(0.6, POOR),)),),
        steady(1),
        _always(SEQUENTIAL),
        events=(0.6,),
    ),
    Trace(
        "one-of-three-falls",
        116,
        7,
        32,
        250_000,
        (Workload("code", HIGH, drift=(Drift(0.5, LOW),)), Workload("chat", FAIR), Workload("maths", GOOD, since=0.25)),
        steady(32),
        _always(Cost(2e-3, linear(1e-4), 1e-5, 2e-9, drafting_s=1e-3, per_block_token_s=1e-4)),
        events=(0.5,),
    ),
    Trace(
        "drifts-slowly",
        117,
        7,
        8,
        120_000,
        (Workload("chat", HIGH, drift=(Drift(0.2, LOW, over=0.4), Drift(0.7, GOOD, over=0.2))), Workload("code", GOOD)),
        steady(8),
        _always(CPU_LIKE),
        stall_share=0.005,
    ),
    Trace(
        "bursts",
        118,
        7,
        128,
        400_000,
        (Workload("chat", FAIR), Workload("code", HIGH)),
        Load(concurrency=tuple((0.1 * i, (2, 96)[i % 2]) for i in range(10))),
        _always(COMPUTE),
    ),
    Trace(
        "poisson-scattered",
        119,
        7,
        64,
        200_000,
        (Workload("agents", FAIR, strength=4.0, output_tokens=(16, 128)), Workload("chat", GOOD, is_one_rank=False)),
        Load(utilisation=0.93, burst=4),
        _always(Cost(3e-3, linear(1.5e-4), 2e-5, 2e-8, 2e-6, 0.6e-3, per_block_token_s=1e-4)),
    ),
    Trace(
        "cost-changes",
        120,
        7,
        24,
        250_000,
        (Workload("chat", GOOD), Workload("code", FAIR)),
        steady(24),
        ((0.0, SMALL), (0.5, Cost(4e-3, linear(3e-4), 4e-6, 1.5e-9, drafting_s=2e-3, per_block_token_s=4e-4))),
        stall_share=0.002,
        events=(0.5,),
    ),
)

EXTRA = (
    Trace(
        "slow-spells",
        122,
        7,
        4,
        60_000,
        (Workload("chat", FAIR, output_tokens=(16, 128), strength=8.0),),
        steady(4),
        _always(CPU_LIKE),
        noise=0.08,
        slow_factor=1.7,
        spell_steps=250.0,
    ),
    Trace(
        "short-spells",
        123,
        7,
        16,
        100_000,
        (Workload("code", HIGH, output_tokens=(16, 128)), Workload("poems", LOW, output_tokens=(16, 128))),
        steady(16),
        _always(SLOW_CPU),
        noise=0.12,
        slow_factor=1.5,
        spell_steps=60.0,
    ),
    Trace(
        "contexts-mixed",
        121,
        7,
        48,
        400_000,
        (Workload("search", GOOD, output_tokens=(32, 256), prompt_tokens=(64, 16_000), decay=0.4),),
        steady(48),
        _always(SMALL),
    ),
)
"""Run only when named, and not part of the mean: machines that are sometimes slow, for minutes or moments; acceptance that
falls with the context length, in batches with every context length."""
