"""Settings that steer an engine, and an operator's temporary overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, Literal

from honed.adapt.monitor.drift import DriftSettings
from honed.adapt.protocol.ranges import COUNT, DRAFT_TOKENS, SHARE, OneOf, Range, Ranges, check_ranges
from honed.adapt.steps.step_time import StepTimeSettings

MODES = ("goodput", "latency", "off", "static", "table")
_LEAST_STRENGTH = 0.1
"""Least strength of a prior, in pseudo-rounds: a weaker one is no guess where there are no data."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Settings that steer an engine."""

    mode: str = "goodput"
    """"goodput" (most predicted tokens per second of the batch), "latency" (of each request), "off" (observe only), "static"
    or "table" (by batch size)."""
    static_k: int = -1
    """Draft tokens of mode "static" and of every fallback; −1: as many as the drafter drafts."""
    max_k: int = -1
    """Most draft tokens, unless an override of draft_tokens allows more; −1: only the engine's limit."""
    request_ceiling: int = -1
    """Most draft tokens of any request; −1: no limit."""
    hysteresis: float = 0.02
    """Relative gain that other draft lengths must promise before they are chosen. Drafting at all must promise as much over not
    drafting, and twice as much where nothing was drafted before. Less is required where drafts add less than a fifth to a
    step's time."""
    explore_share: float = 0.02
    """Share of the steps that explore, while other lengths are about as good. It is lower where nothing is drafted and drafts
    would be far from worth it, and where whole batches try other lengths. With 0 the step-time model also stays unready
    on an engine whose draft lengths never vary."""
    forgetting_rounds: float = 4000.0
    """Independent rounds after which an observation weighs 1/e while nothing changes: rounds of one request repeat each other.
    After a change, earlier observations count less."""
    request_strength: float = 0.0
    """Pseudo-rounds of a workload's curve against a request's own, 0.1 or more; 0: estimated from the requests' spread."""
    workload_strength: float = 24.0
    """Pseudo-rounds of the engine's curve against a workload's own."""
    policy_ttl_s: float = 10.0
    """Time for which an engine follows a policy after it last heard from the daemon."""
    capture_share: float = 0.25
    """Share of requests whose context features are captured, so that a recalibration has samples."""
    captured_tokens: tuple[int, ...] = ()
    """Token counts of the captured CUDA graphs; empty: the engine's own report, if any."""
    table: tuple[tuple[int, int], ...] = ()
    """Rows for mode "table": (largest batch in requests, draft tokens), ascending; the last row also holds beyond it."""
    equal_lengths: Literal["auto", "always", "never"] = "auto"
    """One length for all requests of a step, where CUDA graphs take no other, as those of vLLM's V2 runner. "auto":
    where the engine reports such graphs."""
    captured_lengths: tuple[int, ...] = ()
    """Draft lengths, the same for all requests of a step, that CUDA graphs were captured for; empty: the engine's report. Where
    lengths are equal, only these and 0 are chosen: a length between two of them is rounded down."""
    feed_estimates: bool = False
    """Where vLLM's own adaptive verification is on, give it current step costs and each workload's acceptance. In simulation it
    gains where these differ from what vLLM measures at its start, and loses nearly nothing elsewhere."""
    drift: DriftSettings = field(default_factory=DriftSettings)
    step_time: StepTimeSettings = field(default_factory=StepTimeSettings)

    RANGES: ClassVar[Ranges] = {
        "mode": OneOf(MODES),
        **dict.fromkeys(("static_k", "max_k", "request_ceiling"), DRAFT_TOKENS),
        **dict.fromkeys(("hysteresis", "explore_share", "capture_share"), SHARE),
        **dict.fromkeys(("forgetting_rounds", "captured_tokens"), COUNT),
        "captured_lengths": Range(0, 1024),
        "request_strength": Range(0),
        "workload_strength": Range(_LEAST_STRENGTH),
        "policy_ttl_s": Range(3, 3600),
    }

    @property
    def are_lengths_equal(self) -> bool:
        """Whether all requests of a step get one length."""
        return self.equal_lengths == "always" or (self.equal_lengths == "auto" and bool(self.captured_lengths))

    @property
    def equal_up_to(self) -> int:
        """Most requests of a step with drafts that has a CUDA graph, see `Policy.equal_up_to`; −1: unknown."""
        drafting = [k for k in self.captured_lengths if k > 0]
        if self.equal_lengths == "always" or not (drafting and self.captured_tokens):
            return -1
        return max(self.captured_tokens) // (min(drafting) + 1)

    def why_no_drafts(self, num_spec_tokens: int = -1) -> str:
        """Reason why no captured length is short enough, and the remedy; empty where one is, or none is wanted.

        Args:
            num_spec_tokens: the engine's K; −1: unknown.
        """
        limits = {"num_speculative_tokens": num_spec_tokens, "max_k": self.max_k, "request_ceiling": self.request_ceiling}
        if self.mode == "static":
            limits["static_k"] = self.static_k
        name, most = min(((name, k) for name, k in limits.items() if k >= 0), key=lambda one: one[1], default=("", -1))
        lengths = [k for k in self.captured_lengths if k > 0]
        if not (self.are_lengths_equal and self.captured_lengths) or most == 0 or self.mode == "off":
            return ""
        if lengths and (most < 0 or min(lengths) <= most):
            return ""
        what = f"begins at {min(lengths)}, and {name} is {most}" if lengths else "has only 0"
        usable = f"from 1 to {most}" if most > 0 else "above 0"
        return (
            f"captured_lengths {what}: nothing would ever be drafted; capture graphs for a length {usable}, or set "
            'equal_lengths to "never"'
        )

    def why_few_lengths(self, num_spec_tokens: int) -> str:
        """Reason why nothing between no drafts and all K is chosen, and the remedy; empty where something is."""
        between = [k for k in self.captured_lengths if 0 < k < num_spec_tokens]
        has_all = self.are_lengths_equal and num_spec_tokens in self.captured_lengths  # else see `why_no_drafts`
        if between or num_spec_tokens < 2 or not has_all or self.mode == "off":
            return ""
        steps = f" in steps of up to {self.equal_up_to} requests" if self.equal_up_to >= 0 else ""
        return (
            f"draft lengths: 0 or {num_spec_tokens} alone{steps}, since vLLM captured CUDA graphs for no other. `honed "
            'vllm-args --graphs` has more captured; controller.equal_lengths = "never" allows all, and steps without a graph'
        )

    def with_graphs(self, captured_tokens: Sequence[int], captured_lengths: Sequence[int]) -> ControllerSettings:
        """These settings, completed with an engine's report of its CUDA graphs."""
        tokens, lengths = self.captured_tokens or tuple(captured_tokens), self.captured_lengths or tuple(captured_lengths)
        return replace(self, captured_tokens=tokens, captured_lengths=lengths)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.mode == "table" and not self.table:
            raise ValueError('mode "table" needs a table: rows (largest batch in requests, draft tokens)')
        if any(len(row) != 2 or row[0] < 1 or row[1] < 0 for row in self.table):
            raise ValueError(f"table takes rows (largest batch >= 1, draft tokens >= 0), not {self.table!r}")
        if any(row[0] >= following[0] for row, following in pairwise(self.table)):
            raise ValueError(f"table takes rows in ascending order of their largest batch, each once, not {self.table!r}")
        if 0 < self.request_strength < _LEAST_STRENGTH:
            raise ValueError(f"request_strength must be 0 or at least {_LEAST_STRENGTH:g}, not {self.request_strength!r}")


@dataclass(frozen=True, slots=True)
class Override:
    """An operator's order, in force until `until_s` on the clock of `propose`."""

    name: str
    """"draft_tokens" (that many for every request), "capture_share" (0 … 1) or "policy" (a mode)."""
    value: int | float | str
    until_s: float

    def __post_init__(self) -> None:
        if self.name not in ("draft_tokens", "capture_share", "policy"):
            raise ValueError(f"unknown override {self.name!r}")
        if self.name == "policy" and self.value not in MODES:
            raise ValueError(f"policy must be one of {', '.join(MODES)}, not {self.value!r}")
        if self.name != "policy" and not (isinstance(self.value, int | float) and self.value >= 0):
            raise ValueError(f"{self.name} must be a number ≥ 0, not {self.value!r}")
