"""A running trial of two drafter versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from honed.adapt.monitor.canary import Canary

Kind = Literal["canary", "watch"]


@dataclass(slots=True)
class Trial:
    """Two versions taking turns: the new one is the candidate (canary) or already active (watch)."""

    operation_id: str
    kind: Kind
    canary: Canary
    new_key: str
    """`Manifest.trial_key` of the new one."""
    began_unix_s: float
    window_began_s: float
    active_s: float = 0.0
    """Time with traffic to compare."""
    heard_s: float = float("-inf")
    sent_s: float = float("-inf")
    is_swapping: bool = False
    fitting_s: float | None = None
    """Latest time at which an engine that can run both versions was there, be it asleep; None: not looked for yet."""

    @property
    def home(self) -> str:
        """The version that is `active` during it."""
        return self.canary.old if self.kind == "canary" else self.canary.new

    @property
    def other(self) -> str:
        """The version not serving now."""
        canary = self.canary
        return canary.new if canary.serving == canary.old else canary.old

    @property
    def versions(self) -> frozenset[str]:
        return frozenset((self.canary.old, self.canary.new))

    def view(self) -> dict[str, Any]:
        """Document for the API."""
        canary, verdict = self.canary, self.canary.verdict
        return {
            "operation_id": self.operation_id,
            "kind": self.kind,
            "old": canary.old,
            "new": canary.new,
            "serving": canary.serving,
            "began_unix_s": self.began_unix_s,
            "pairs": canary.pairs,
            "rounds": canary.rounds,
            "max_pairs": canary.settings.max_pairs,
            "evidence_worse": verdict.evidence_worse,
            "evidence_better": verdict.evidence_better,
            "change": verdict.change,
            "other_trials": canary.num_others,
            "text": verdict.text,
            "workloads": canary.figures(),
        }


@dataclass(frozen=True, slots=True)
class Due:
    """The verdict of a trial that has ended, which couldn't be carried out yet."""

    trial: Trial
    decision: Literal["better", "worse"]
    text: str
    why: str
    """Why not."""

    @property
    def problem(self) -> str:
        """Say what is wrong, for an operator."""
        state = (
            "has proven better, but isn't active yet" if self.decision == "better" else "was found worse, but is still active"
        )
        return f"{self.trial.canary.new} {state}: {self.why}"
