"""Every new generation of a policy says why it was made."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from honed.adapt.control.policy_change import what_changed
from honed.adapt.protocol.wire import Policy, WorkloadPrior
from honed.adapt.steps.step_time import StepTimeModel

STEP_SECONDS = list(StepTimeModel.of(base=5e-3, per_token=3e-4, drafting=5e-4, per_block_token=1e-4).parameters)
CURVE = [0.8, 0.7, 0.6]
POLICY = Policy(
    generation=3,
    ttl_s=10.0,
    kind="goodput",
    static_k=3,
    max_k=3,
    step_seconds=STEP_SECONDS,
    priors=[WorkloadPrior(workload="", acceptance=CURVE), WorkloadPrior(workload="chat", acceptance=CURVE, strength=8.0)],
)


def chat(**changes: Any) -> list[WorkloadPrior]:
    return [POLICY.priors[0], msgspec.structs.replace(POLICY.priors[1], **changes)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"generation": 4}, ""),
        ({"kind": "static"}, "kind 'goodput' -> 'static'"),
        ({"override": "draft_tokens", "kind": "static"}, "override '' -> 'draft_tokens'"),
        ({"max_k": 2}, "max_k 3 -> 2"),
        ({"ttl_s": 5.0}, "settings"),
        ({"priors": POLICY.priors[:1]}, "workload 'chat' is forgotten"),
        ({"priors": chat(acceptance=[*CURVE, 0.5])}, "acceptance of workload 'chat': 3 -> 4 figures"),
        ({"priors": [*POLICY.priors, WorkloadPrior(workload="new", acceptance=CURVE)]}, "workload 'new' is new"),
        ({"priors": chat(acceptance=[0.8, 0.5, 0.6])}, "acceptance of workload 'chat' at position 2: 0.700 -> 0.500"),
        ({"priors": chat(acceptance=[0.8, 0.703, 0.6])}, ""),
        ({"priors": chat(strength=20.0)}, "spread between requests of workload 'chat': strength 8.0 -> 20.0"),
        (
            {"priors": chat(context_shift=[1.0, 1.03, 1.5, *[1.0] * 8])},
            "failure odds of workload 'chat' at 256 tokens of context and more: x 1.00 -> x 1.50",
        ),
        ({"priors": chat(context_shift=[1.04] * 11)}, ""),
        (
            {"priors": chat(depth_intercepts=[0.0, 0.4, 0.0], depth_slopes=[1.0] * 3)},
            "acceptance of workload 'chat' at depth 2: intercept of the line 0.00 -> 0.40",
        ),
        ({"priors": chat(depth_intercepts=[0.0, 0.04, 0.0], depth_slopes=[1.0, 1.0, 0.97])}, ""),
        ({"equal_lengths": True}, "equal_lengths False -> True"),
        ({"step_seconds": []}, "step time is unknown again"),
        ({"tree_step_seconds": STEP_SECONDS}, "step time with trees is known"),
        ({"step_seconds": [6e-3, *STEP_SECONDS[1:]]}, "step time of 1 requests with 0 drafts: 5.30 -> 6.30 ms"),
        ({"step_seconds": [5.01e-3, *STEP_SECONDS[1:]]}, ""),
        ({"kind_effects": [(8, 2, 0.1)]}, "step time of 4 requests with 2 drafts each: 9.30 -> 10.23 ms"),
        ({"kind_effects": [(8, 2, 0.01)]}, ""),
        ({"kind_effects": [(14, 2, 0.1)]}, "step time of 12 requests with 2 drafts each: 16.50 -> 18.15 ms"),
    ],
)
def test_the_first_material_difference_is_named(changes: dict[str, Any], said: str) -> None:
    assert what_changed(POLICY, msgspec.structs.replace(POLICY, **changes), 16) == said


def test_small_steps_of_many_nodes_add_up() -> None:
    old, new = (
        msgspec.structs.replace(POLICY, priors=[WorkloadPrior(workload="", acceptance=[value] * 31)]) for value in (0.9, 0.896)
    )
    assert what_changed(old, new, 8) == "accepted drafts of the engine, of 31: 8.66 -> 8.33"


def test_a_cost_of_contexts_is_material_where_contexts_are_long() -> None:
    """It went unseen at 128,000 tokens, where a step takes half as long again."""
    dearer = StepTimeModel.of(base=5e-3, per_token=3e-4, drafting=5e-4, per_block_token=1e-4, per_context_token=4e-8)
    new = msgspec.structs.replace(POLICY, step_seconds=list(dearer.parameters))
    assert what_changed(POLICY, new, 2) == ""
    assert what_changed(POLICY, new, 2, 128_000.0) == "step time of 1 requests with 0 drafts: 5.30 -> 10.42 ms"


def test_the_first_policy_says_so() -> None:
    assert what_changed(None, POLICY, 16) == "first policy"
