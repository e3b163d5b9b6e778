"""Costs of trees on two machines, as `StepTimeModel`s, for logs without step times.

`cpu`: every token costs the same from the first on, as on a few cores, where verifying is compute-bound at once. `gpu`: a
roofline. A step reads the weights once, for any tokens up to the knee where arithmetic takes longer. 8·10⁹ parameters in
bfloat16 at 3.35 TB/s take 4.8 ms; 2 · 8·10⁹ operations a token at 400 TFLOP/s take 40 µs, and exceed that near 120 tokens. The
model's knots are at 64 and 256, so the slope is half of it between them and all above. K/V cache: 131 kB a context token, 40
ns. The drafter is a sixth of the target's depth in one pass. These are round figures to compare policies, not measurements.
"""

from __future__ import annotations

from honed.adapt.steps.step_time import PARAMETERS, StepTimeModel

_CAPTURED = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))

TREE_COSTS: dict[str, StepTimeModel] = {
    "cpu": StepTimeModel.of(
        base=8e-3, per_request=2e-4, per_token=2e-3, per_context_token=1e-7, drafting=3e-3, drafting_per_request=1e-3
    ),
    "gpu": StepTimeModel.of(
        _CAPTURED,
        base=5.2e-3,
        per_request=1e-5,
        per_token=2e-6,
        per_token_above_64=2e-5,
        per_token_above_256=2e-5,
        per_context_token=4e-8,
        drafting=9e-4,
        drafting_per_request=2e-5,
    ),
}


def parse_cost(text: str) -> StepTimeModel:
    """Read `cpu`, `gpu`, or the figures of a step-time model (`PARAMETERS`), separated by commas.

    Raises:
        ValueError: it is none of these.
    """
    if text in TREE_COSTS:
        return TREE_COSTS[text]
    known = f"a cost is {', '.join(TREE_COSTS)}, or {len(PARAMETERS)} figures in seconds: {', '.join(PARAMETERS)}"
    try:
        figures = tuple(float(figure) for figure in text.split(","))
    except ValueError as error:
        raise ValueError(f"unknown cost {text!r}: {known}") from error
    if len(figures) != len(PARAMETERS) or not all(0.0 <= figure < float("inf") for figure in figures) or not any(figures):
        raise ValueError(f"unknown cost {text!r}: {known}")
    return StepTimeModel(figures)
