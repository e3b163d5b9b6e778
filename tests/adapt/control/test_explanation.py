"""What a controller tells of its plans is what the engine's side would do, without what only that side may use."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.acceptance.estimate import acceptance_length, survival
from honed.adapt.control.explanation import Plans, length_error
from honed.adapt.lengths.block_size import choose, latency_gains
from honed.adapt.protocol.wire import Policy
from honed.adapt.steps.step_time import StepTimeModel


@given(
    st.lists(st.floats(0.05, 0.98), min_size=1, max_size=8),
    st.integers(1, 40),
    st.floats(1e-3, 1e-2),
    st.floats(1e-6, 2e-3),
    st.sampled_from([0.0, 2e-4]),
    st.sampled_from([(), (8, 16, 32, 64, 128, 512)]),
    st.booleans(),
)
def test_a_plan_is_what_the_engine_would_choose(acceptance, count, base, token, block, captured, is_latency):
    model = StepTimeModel.of(captured, base=base, per_token=token, drafting=5e-4, per_block_token=block, per_context_token=1e-8)
    k = len(acceptance)
    policy = Policy(generation=1, ttl_s=10.0, kind="latency" if is_latency else "goodput", static_k=k, max_k=k)
    plan = Plans(model, np.array(acceptance), 700.0, policy).plan(count)
    curve = survival(np.array(acceptance))
    gains = latency_gains(curve) if is_latency else curve
    group = np.zeros(count, dtype=np.int64)
    chosen = choose(gains[None, :], model, is_latency=is_latency, group=group, context_tokens=700 * count)

    def rate(num_drafts):
        depth, rest = divmod(num_drafts, count)
        gained = count * gains[:depth].sum() + rest * gains[depth : depth + 1].sum()
        seconds = model.seconds(count, count + num_drafts, 700 * count, 0, depth + (rest > 0))
        return count / (seconds * (count - gained)) if is_latency else (count + gained) / seconds

    planned = round(plan["draft_tokens_per_request"] * count)
    assert plan["block"] == -(-planned // count)
    assert rate(planned) >= rate(sum(chosen.num_draft_tokens)) * (1.0 - 1e-9)
    assert rate(planned) <= chosen.rate * (1.02 if count * len(acceptance) ** 2 > 500 else 1.0 + 1e-9)


def test_the_daemon_needs_nothing_that_makes_code_at_run_time():
    """Its service may not map memory that is writable and executable; numba in it would end it."""
    code = (
        "import itertools, sys, numpy as np, honed.daemon.service\n"
        "from honed.adapt.control.explanation import Plans\n"
        "from honed.adapt.steps.step_time import StepTimeModel\n"
        "model = StepTimeModel.of(base=5e-3, per_token=1e-4, drafting=5e-4)\n"
        "from honed.adapt.protocol.wire import Policy\n"
        "rest = dict(generation=1, ttl_s=10.0, static_k=7, max_k=7, table=[(64, 3)])\n"
        "for kind, is_equal in itertools.product(('goodput', 'latency', 'static', 'table'), (False, True)):\n"
        "    policy = Policy(kind=kind, equal_lengths=is_equal, **rest)\n"
        "    assert Plans(model, np.full(7, 0.8), 500.0, policy).plan(64)['block'] > 0\n"
        "assert not {'numba', 'llvmlite'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_error_of_an_acceptance_length_is_that_of_repeated_counts():
    rng, acceptance, rounds = np.random.default_rng(1), np.array([0.8, 0.6, 0.5, 0.3]), 200
    reached = rounds * np.concatenate(([1.0], survival(acceptance)[:-1]))
    lengths = []
    for _ in range(4000):
        draws = rng.random((rounds, 4)) < acceptance
        runs = draws.cumprod(axis=1)
        tried = np.column_stack((np.ones(rounds), runs[:, :-1])).sum(axis=0)
        lengths.append(acceptance_length(runs.sum(axis=0) / np.maximum(tried, 1)))
    assert length_error(acceptance, reached) == pytest.approx(np.std(lengths), rel=0.05)
    assert length_error(np.zeros(4), np.zeros(4)) == 0.0
