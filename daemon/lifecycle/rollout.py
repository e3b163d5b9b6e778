"""Running work on drafter versions: at most one swap, one trial and one training."""

from __future__ import annotations

from dataclasses import dataclass

from honed.daemon.errors import ConflictError
from honed.daemon.lifecycle.trial import Due, Trial
from honed.daemon.store.operations import Operation, Operations


@dataclass(slots=True)
class Rollout:
    """The running swap, trial and training. Guarded by the service's lock."""

    operations: Operations
    swapping: Operation | None = None
    """The operation that swaps engines."""
    trial: Trial | None = None
    training: Operation | None = None
    """The recalibration that waits for its candidate."""
    due: Due | None = None
    """A verdict to carry out, before anything else begins by itself."""

    @property
    def current(self) -> Operation | None:
        """The running operation: a swap before a canary before a training. A watch doesn't count: it may be ended."""
        trial = self.trial  # read once: readers hold no lock
        tried = self.operations.find(trial.operation_id) if trial is not None else None
        is_running = tried is not None and not tried.is_finished
        return self.swapping or (tried if is_running else None) or self.training

    @property
    def is_quiet(self) -> bool:
        """True if nothing is running, and nothing is due."""
        return self.current is None and self.trial is None and self.due is None

    @property
    def versions(self) -> set[str]:
        """Versions in use by it."""
        found = set(self.trial.versions) if self.trial is not None else set()
        for operation in (self.swapping, self.training):
            if operation is not None:
                found |= {str(operation.detail.get(name, "")) for name in ("version", "parent", "rolled_back")}
        return found - {""}

    def check_no_swap(self) -> None:
        """Raise ConflictError while a swap is running."""
        if self.swapping is not None:
            running = self.swapping.operation_id
            cure = f"Wait for its end: `honed operations {running}`."
            if self.swapping.kind == "promote":
                cure = f"Wait for its end (`honed operations {running}`), or end it: `honed cancel {running}`."
            raise ConflictError(f"operation {running} is swapping a drafter", cure=cure)

    def check_nothing_due(self) -> None:
        """Raise ConflictError while a verdict waits to be carried out."""
        if self.due is not None:
            raise ConflictError(self.due.problem, cure="honed tries again every half minute; `honed status` shows it.")
