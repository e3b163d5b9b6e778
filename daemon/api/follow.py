"""Live events: drift, swaps, roll-backs and overrides as server-sent events.

Each mark on disk is sent once, in order. A client that lost its connection names its last mark and misses none.
Source: WHATWG HTML, section 9.2 (server-sent events).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from pydantic.json_schema import SkipJsonSchema

from honed.daemon.errors import ConflictError
from honed.daemon.store.store import Store

POLL_S = 0.5
SILENCE_S = 15.0
"""Time without a mark after which a comment is sent, so that both sides notice a dead connection."""
MOST_STREAMS = 16
AT_ONCE = 500

LastEvent = Annotated[
    str | SkipJsonSchema[None],
    Header(alias="Last-Event-ID", max_length=20, description="Like `after`.", json_schema_extra={"pattern": "^[0-9]{1,18}$"}),
]


class EventStreamResponse(StreamingResponse):
    """An endless body."""

    media_type = "text/event-stream"


def add_follow(router: APIRouter, store: Store, is_ending: threading.Event) -> None:
    """Add the stream, which ends when `is_ending` is set."""
    open_streams = threading.Semaphore(MOST_STREAMS)

    @router.get("/v1/marks:follow", response_class=EventStreamResponse)
    def follow(after: Annotated[int, Query(ge=-1, le=2**62)] = -1, last_event_id: LastEvent = None) -> EventStreamResponse:
        """Stream server-sent events from now on, or after a number: drift, swap, promote, rollback, override."""
        if last_event_id is not None and last_event_id.isascii() and last_event_id.isdecimal():
            after = int(last_event_id)
        start = after if after >= 0 else newest(store)
        if not open_streams.acquire(blocking=False):
            raise ConflictError(f"{MOST_STREAMS} clients follow already", cure="End one of them.")
        return EventStreamResponse(marks(store, start, open_streams, is_ending), headers={"cache-control": "no-store"})


def newest(store: Store) -> int:
    """Number of the last mark; 0 without any."""
    return int(store.read("SELECT coalesce(max(id), 0) AS id FROM marks")[0]["id"])


async def marks(
    store: Store, after: int, open_streams: threading.Semaphore, is_ending: threading.Event
) -> AsyncIterator[bytes]:
    """The body: marks after `after`, while the client listens and the daemon runs."""
    try:
        yield f": honed\nid: {after}\n\n".encode()  # a client that loses it before the first mark misses none either
        silent_s = 0.0
        while not is_ending.is_set():
            rows = await run_in_threadpool(
                store.read,
                "SELECT id, t, kind, text, engine_id FROM marks WHERE id > ? ORDER BY id LIMIT ?",
                (after, AT_ONCE),
            )
            for row in rows:
                after, silent_s = row["id"], 0.0
                yield f"id: {after}\nevent: {row['kind']}\ndata: {json.dumps(row)}\n\n".encode()
            if len(rows) < AT_ONCE:
                await asyncio.sleep(POLL_S)
                silent_s += POLL_S
            if silent_s >= SILENCE_S:
                silent_s = 0.0
                yield b": nothing new\n\n"
    finally:
        open_streams.release()
