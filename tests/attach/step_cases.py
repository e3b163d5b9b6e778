"""Steps as the engine's thread writes them down, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from honed.attach.events.request_book import Tracked
from honed.attach.events.step_log import Started, Step, Verified


def started(request_id: str = "r", workload: str = "a", prompt: int = 40, temperature: float = 0.5) -> Started:
    """A request came in; its key is the sum of its name's bytes."""
    return Started(request_id, Tracked(sum(request_id.encode()), workload, temperature, prompt, prompt))


def a_step(
    number: int,
    verified: Sequence[Verified] = (("r", 3, 2),),
    plain: Mapping[str, int] | None = None,
    version: str = "v1",
    silent: Sequence[str] = (),
    has_token_ids: bool = False,
    **fields: Any,
) -> Step:
    """A step with these rounds, and with requests that had no drafts (`plain`: tokens of each), of which some gave nothing."""
    drafts = {request_id: list(range(100, 100 + k)) for request_id, k, _ in verified}
    scheduled = {request_id: 1 + k for request_id, k, _ in verified} | dict(plain or {})
    accepted = {request_id: n for request_id, _, n in verified}
    row_of = {request_id: i for i, request_id in enumerate(scheduled)}
    sampled = [[] if r in silent else [100 + i for i in range(accepted.get(r, 0))] + [7] for r in scheduled]
    made = Step(
        step=number,
        end_ns=1000 * number,
        duration_us=50,
        num_tokens=sum(scheduled.values()),
        num_drafting=7,
        decision="policy",
        drafter_version=version,
        verified=list(verified),
        scheduled=scheduled,
        drafts=drafts,
        sampled=sampled,
        row_of=row_of,
        invalid={},
        emitted=[list(row) for row in sampled] if has_token_ids else None,
    )
    return made._replace(**fields)
