"""Names the difference between a policy and the one in force, and decides if it is worth a new generation."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from honed.adapt.acceptance.context_shift import NUM_BUCKETS, bucket_starts
from honed.adapt.acceptance.depth_calibration import DepthLines
from honed.adapt.protocol.wire import Policy, WorkloadPrior
from honed.adapt.steps.step_time import StepTimeModel

ACCEPTANCE_STEP = 0.005
"""A conditional acceptance that moved by more is material."""
GAIN_STEP = 0.02
"""Expected accepted drafts that moved by more (relative) are material: small steps of many nodes add up."""
SECONDS_STEP = 0.01
"""A predicted step time that moved by more (relative) is material."""
KIND_STEP = 0.02
"""The same for one kind of steps: many kinds are rare."""
SHIFT_STEP = 0.05
"""A factor on the failure odds that moved by more (relative) is material."""
LINE_STEP = 0.05
"""A line's intercept or slope that moved by more is material."""
_LEAST_CONTEXT = 500
"""Context of a request for which step times are compared, where typical ones are shorter."""
_LIMITS = (
    "override",
    "kind",
    "static_k",
    "max_k",
    "request_ceiling",
    "capture_share",
    "table",
    "explore_share",
    "compare_share",
    "equal_lengths",
    "captured_lengths",
    "equal_up_to",
    "feeds_estimates",
    "tells_steps",
)


def what_changed(old: Policy | None, new: Policy, max_num_seqs: int, context_tokens: float = 0.0) -> str:
    """Name the first material difference in a few words; "" when there is none.

    Args:
        context_tokens: context of a typical request.
    """
    if old is None:
        return "first policy"
    chain_tokens = min((len(prior.acceptance) for prior in new.priors if prior.keeps_chain), default=new.max_k)
    context = max(int(context_tokens), _LEAST_CONTEXT)
    chains, trees = ((read(old), read(new)) for read in (StepTimeModel.from_policy, StepTimeModel.of_trees))
    return (
        _limits(old, new)
        or _acceptance(old, new)
        or _step_time(*chains, "step time", min(new.max_k, chain_tokens), max_num_seqs, context)
        or _step_time(*trees, "step time with trees", new.max_k, max_num_seqs, context)
    )


def _limits(old: Policy, new: Policy) -> str:
    for name in _LIMITS:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            return f"{name} {before!r} -> {after!r}"
    as_old = msgspec.structs.replace(
        new,
        generation=old.generation,
        priors=old.priors,
        step_seconds=old.step_seconds,
        kind_effects=old.kind_effects,
        tree_step_seconds=old.tree_step_seconds,
        tree_kind_effects=old.tree_kind_effects,
    )
    return "settings" if as_old != old else ""


def _acceptance(old: Policy, new: Policy) -> str:
    curves = {(prior.workload, prior.keeps_chain): prior for prior in old.priors}
    gone = curves.keys() - {(prior.workload, prior.keeps_chain) for prior in new.priors}
    if gone:
        return f"workload {min(gone)[0]!r} is forgotten"
    for prior in new.priors:
        before = curves.get((prior.workload, prior.keeps_chain))
        name = f"workload {prior.workload!r}" if prior.workload else "the engine"
        name += "'s chains" if prior.keeps_chain else ""
        if before is None:
            return f"{name} is new"
        if reason := _context_shift(before.context_shift, prior.context_shift):
            return f"failure odds of {name} {reason}"
        if len(before.acceptance) != len(prior.acceptance):
            return f"acceptance of {name}: {len(before.acceptance)} -> {len(prior.acceptance)} figures"
        moved = np.abs(np.subtract(before.acceptance, prior.acceptance))
        if moved.max(initial=0.0) > ACCEPTANCE_STEP:
            at = int(moved.argmax())
            return f"acceptance of {name} at position {at + 1}: {before.acceptance[at]:.3f} -> {prior.acceptance[at]:.3f}"
        was, now = (float(np.cumprod(one.acceptance).sum()) for one in (before, prior))
        if abs(was - now) > GAIN_STEP * now:
            return f"accepted drafts of {name}, of {len(prior.acceptance)}: {was:.2f} -> {now:.2f}"
        if reason := _lines(before, prior):
            return f"acceptance of {name} {reason}"
        if not 0.8 <= prior.strength / before.strength <= 1.25:
            return f"spread between requests of {name}: strength {before.strength:.1f} -> {prior.strength:.1f}"
    return ""


def _lines(before: WorkloadPrior, after: WorkloadPrior) -> str:
    depth = len(after.acceptance)
    was, now = (DepthLines.usable(one.depth_intercepts, one.depth_slopes, depth) for one in (before, after))
    for name, old, new in (("intercept", was.intercepts, now.intercepts), ("slope", was.slopes, now.slopes)):
        moved = np.abs(new - old)
        if moved.max(initial=0.0) > LINE_STEP:
            at = int(moved.argmax())
            return f"at depth {at + 1}: {name} of the line {old[at]:.2f} -> {new[at]:.2f}"
    return ""


def _context_shift(before: list[float], after: list[float]) -> str:
    was, now = (shift or [1.0] * NUM_BUCKETS for shift in (before, after))
    for tokens, old, new in zip(bucket_starts(), was, now, strict=False):
        if abs(new / old - 1.0) > SHIFT_STEP:
            return f"at {tokens} tokens of context and more: x {old:.2f} -> x {new:.2f}"
    return ""


def _step_time(
    before: StepTimeModel, after: StepTimeModel, what: str, max_k: int, max_num_seqs: int, context_tokens: int
) -> str:
    if before.is_ready != after.is_ready:
        return f"{what} is known" if after.is_ready else f"{what} is unknown again"
    if not after.is_ready:
        return ""
    for count in (1, max(max_num_seqs // 8, 1), max_num_seqs):
        for k in (0, max_k):
            was, now = (model.seconds(count, count * (1 + k), count * context_tokens, 0, k) for model in (before, after))
            if abs(was / now - 1.0) > SECONDS_STEP:
                return f"{what} of {count} requests with {k} drafts: {1e3 * was:.2f} -> {1e3 * now:.2f} ms"
    for batch, k in sorted({(batch, k) for batch, k, _ in (*before.kinds, *after.kinds)}):
        count = math.ceil(2.0 ** (batch / 4.0))  # the smallest batch of the kind
        was, now = (model.seconds(count, count * (1 + k), count * context_tokens, 0, k) for model in (before, after))
        if abs(was / now - 1.0) > KIND_STEP:
            return f"{what} of {count} requests with {k} drafts each: {1e3 * was:.2f} -> {1e3 * now:.2f} ms"
    return ""
