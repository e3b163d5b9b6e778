"""A running swap, trial or training decides what else may begin."""

from __future__ import annotations

import pytest

from honed.adapt.monitor.canary import Canary, CanarySettings
from honed.daemon.errors import ConflictError
from honed.daemon.lifecycle.rollout import Rollout
from honed.daemon.lifecycle.trial import Kind, Trial
from honed.daemon.store.operations import Operation, Operations
from honed.daemon.store.store import Store
from tests.daemon.conftest import Clock


@pytest.fixture
def operations(store: Store, clock: Clock) -> Operations:
    return Operations(store, clock)


@pytest.fixture
def rollout(operations: Operations) -> Rollout:
    return Rollout(operations)


def begin(operations: Operations, kind: str, **detail: str) -> Operation:
    return operations.create(kind, "running", "", "test", None, **detail)


def trial_of(operation: Operation, kind: Kind = "canary") -> Trial:
    canary = Canary(CanarySettings(), "v1", "v2", 3, old_begins=True)
    return Trial(operation.operation_id, kind, canary, "sha", 0.0, 0.0)


def test_nothing_is_under_way_at_first(rollout: Rollout) -> None:
    assert (rollout.current, rollout.is_quiet, rollout.versions) == (None, True, set())
    rollout.check_no_swap()


def test_a_swap_comes_before_a_canary_before_a_training(rollout: Rollout, operations: Operations) -> None:
    rollout.training = begin(operations, "recalibrate", parent="v1")
    assert rollout.current is rollout.training
    tried = begin(operations, "adopt")
    rollout.trial = trial_of(tried)
    assert rollout.current is tried
    rollout.swapping = begin(operations, "rollback", version="v3", rolled_back="v4")
    assert rollout.current is rollout.swapping
    assert not rollout.is_quiet
    assert rollout.versions == {"v1", "v2", "v3", "v4"}


def test_a_watch_keeps_from_being_quiet_though_its_operation_has_ended(rollout: Rollout, operations: Operations) -> None:
    promoted = begin(operations, "promote")
    operations.finish(promoted, "succeeded", stage="watching")
    rollout.trial = trial_of(promoted, "watch")
    assert (rollout.current, rollout.is_quiet) == (None, False)


def test_one_swap_at_a_time(rollout: Rollout, operations: Operations) -> None:
    rollout.swapping = begin(operations, "promote", version="v2")
    with pytest.raises(ConflictError, match=f"operation {rollout.swapping.operation_id} is swapping") as caught:
        rollout.check_no_swap()
    assert f"`honed operations {rollout.swapping.operation_id}`" in caught.value.cure
