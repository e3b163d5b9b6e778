"""What an engine under test has logged, as the daemon would get it."""

from __future__ import annotations

from typing import Any

from honed.adapt.protocol import wire
from honed.attach.events.request_book import key_of
from tests.e2e.engine import K, TestEngine


def take_batches(running: TestEngine) -> list[wire.EventBatch]:
    """What was logged since the last call."""
    honed = running.honed
    publisher = honed._publisher
    publisher._stop.set()  # from here on this thread collects
    publisher._thread.join(5)
    publisher._collect()
    publisher._seal()
    frames = [batch.frame for batch in publisher._outbox._unsent]
    publisher._outbox._unsent.clear()
    return [b for b in map(wire.decode_to_daemon, frames) if isinstance(b, wire.EventBatch)]


def rounds(batches: list[wire.EventBatch]) -> list[dict[str, Any]]:
    """Rounds as rows, with their own slices of the token lists."""
    rows = []
    for batch in batches:
        columns, at_emitted, at_draft = batch.rounds, 0, 0
        for i in range(len(columns.step)):
            emitted = columns.emitted[at_emitted : at_emitted + columns.num_emitted[i]]
            draft = columns.draft[at_draft : at_draft + columns.num_draft_tokens[i]]
            at_emitted, at_draft = at_emitted + len(emitted), at_draft + len(draft)
            rows.append(
                {
                    "step": columns.step[i],
                    "request": columns.request[i],
                    "version": batch.drafter_version,
                    "workload": batch.workloads[columns.workload[i]],
                    "position": columns.position[i],
                    "k": columns.num_draft_tokens[i],
                    "invalid": columns.num_invalid_tokens[i],
                    "trimmed": columns.num_trimmed_tokens[i] if columns.num_trimmed_tokens else 0,
                    "struck": columns.num_struck_tokens[i] if columns.num_struck_tokens else 0,
                    "accepted": columns.num_accepted_tokens[i],
                    "num_emitted": columns.num_emitted[i],
                    "delivered": columns.num_delivered[i] if columns.num_delivered else columns.num_emitted[i],
                    "emitted": emitted,
                    "draft": draft,
                }
            )
    return rows


def without_tree(batches: list[wire.EventBatch], chain_tokens: int) -> list[dict[str, Any]]:
    """Rounds with more drafts than the drafter's chain has, of which no tree is told."""
    chains = [chain for batch in batches for chain in batch.rounds.chain_tokens or [0] * len(batch.rounds.step)]
    return [row for row, chain in zip(rounds(batches), chains, strict=True) if row["k"] > chain_tokens and not chain]


def counted(rows: list[dict[str, Any]]) -> dict[str, int]:
    """The rows' sums, as vLLM counts."""
    return {
        "num_drafts": len([r for r in rows if r["k"]]),
        "num_draft_tokens": sum(r["k"] - r["invalid"] for r in rows),
        "num_accepted_tokens": sum(r["accepted"] for r in rows),
    }


def keys_of(running: TestEngine) -> list[int]:
    """Under which keys the running requests are logged, in the order in which they came."""
    secret = running.honed._requests.secret
    return [int.from_bytes(key_of(request_id, secret)) for request_id in running.scheduler.requests]


def check_tokens(rows: list[dict[str, Any]], texts: dict[int, list[int]]) -> None:
    """Each round emits what stands in its request's text after its position.

    Args:
        texts: prompt and completion, by the request's key.
    """
    assert {row["request"] for row in rows} == texts.keys()
    for row in rows:
        text, at = texts[row["request"]], row["position"] + 1
        # A request's last round may emit more than the request had room for.
        assert text[at : at + row["num_emitted"]] == row["emitted"][: len(text) - at], f"not what stands at {at}: {row}"


def set_policy(running: TestEngine, **fields: Any) -> None:
    """Put a policy in force: static K, but for `fields`."""
    base: dict[str, Any] = {"generation": 1, "ttl_s": 1e9, "kind": "static", "static_k": K, "max_k": K}
    running.honed._on_policy(wire.Policy(**(base | fields)))
    running.honed.before_schedule()
