"""Entries that the engine's thread hands over to the publisher's thread.

The queue is a `deque`: its append and popleft are atomic. Entries are in order of occurrence. So the publisher can follow
running requests and their lengths without reading vLLM's own, which keep changing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from honed.attach.events.outbox import Losses
from honed.attach.events.request_book import Tracked

Verified: TypeAlias = tuple[str, int, int]
"""A verify round: (request id, draft tokens, accepted tokens), as vLLM counts them."""

DRAFT_IDS = "honed_draft_ids"
"""Attribute of a `ModelRunnerOutput`: draft token ids [R, K] in the order of its `req_ids`, where the scheduler has none."""
NUM_VERIFIED = "honed_num_verified"
"""Attribute of a `ModelRunnerOutput`: drafts that were verified [R], in that order, where vLLM trims them on the device."""


TREES = "honed_trees"
"""Attribute of a `ModelRunnerOutput`: `TreeRound`s by request id, where drafts were the nodes of a tree."""
UNWALKED = "honed_unwalked"
"""Attribute of a `ModelRunnerOutput`: requests whose drafts were a tree's nodes, or padding, but weren't verified as a tree's.
That vLLM refused them tells nothing about the drafter."""
TREES_ARE_OFF = "honed_trees_are_off"
"""Attribute of a `ModelRunnerOutput`: trees failed so often that the worker makes none any more."""


class TreeRound(NamedTuple):
    """A verify round's accepted nodes, and what the drafter's own chain in its tree would have got."""

    nodes: Sequence[int]
    """The accepted nodes, from the root down; node 0 was the best."""
    chain_tokens: int
    """Nodes of the drafter's own chain in the tree: from the root on, each the most likely child."""
    chain_accepted: int
    """Accepted tokens if that chain alone had been verified."""


class Step(NamedTuple):
    """One engine step. It refers to vLLM's objects, which no longer change when the step is over."""

    step: int
    end_ns: int
    duration_us: int
    num_tokens: int
    num_drafting: int
    decision: str
    drafter_version: str
    verified: Sequence[Verified]
    scheduled: Mapping[str, int]
    """Tokens of each request in the step."""
    drafts: Mapping[str, Sequence[int]]
    sampled: Sequence[Sequence[int]]
    """Delivered tokens, a row a request (`row_of`): vLLM's own lists, which it cuts where a request ends."""
    row_of: Mapping[str, int]
    invalid: Mapping[str, int]
    """Drafts that a grammar rejected, by request."""
    num_verified: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None
    """Drafts that the device verified, a row a request (`row_of`); None: all."""
    emitted: Sequence[Sequence[int]] | None = None
    """Copy of `sampled` before vLLM cut it, if token ids are to be logged; then `drafts` is a copy too."""
    padded: Collection[str] = ()
    """Requests whose drafts were padding: vLLM counts them, but they tell nothing about the drafter."""
    trees: Mapping[str, TreeRound] = MappingProxyType({})
    """Of requests whose drafts were the nodes of a tree."""
    struck: Mapping[str, int] = MappingProxyType({})
    """Drafts that a grammar struck, behind the verified ones, by request; `invalid` has those of them that were scheduled."""

    @property
    def has_token_ids(self) -> bool:
        """Whether to log token ids."""
        return self.emitted is not None

    def answered(self, request_ids: Iterable[str]) -> list[str]:
        """Those of the requests that got a token in this step."""
        rows, sampled = self.row_of, self.sampled
        return [r for r in request_ids if (row := rows.get(r, len(sampled))) < len(sampled) and len(sampled[row])]


class Started(NamedTuple):
    """A request came in, or more input for a session: its tokens are all that it has then."""

    request_id: str
    request: Tracked


class Over(NamedTuple):
    """A request is over."""

    request_id: str


Entry: TypeAlias = Step | Started | Over


class StepLog:
    """Queue from engine thread to publisher thread, bounded in entries and in rows: a step has one for each of its requests.

    When it is full, the newest steps are refused and counted. It normally holds the steps of one sleep of the publisher, so a
    full queue means that its thread is dead or starved. A row takes from 0.45 KB, with 3 drafts, to 3.5 KB, with a tree of 63
    nodes: 100,000 rows are 45 to 350 MB.
    """

    def __init__(self, max_entries: int = 100_000, max_rows: int = 100_000) -> None:
        self._entries: deque[Entry] = deque()
        self._max_entries, self._max_rows = max_entries, max_rows
        self._rows_in = self._rows_out = 0
        """Each is written by one thread only."""
        self.lost = Losses()

    def append(self, entry: Entry) -> None:
        """Engine thread: add an entry."""
        rows = len(entry.scheduled) if isinstance(entry, Step) else 0
        has_room = not rows or self._rows_in + rows - self._rows_out <= self._max_rows
        if has_room and len(self._entries) < self._max_entries:
            self._rows_in += rows
            self._entries.append(entry)
        elif isinstance(entry, Step):
            self.lost += losses_of(entry.verified, entry.invalid)

    def __len__(self) -> int:
        return len(self._entries)

    def take(self) -> Entry | None:
        """Publisher thread: remove the oldest entry; None when there is none."""
        if not self._entries:
            return None
        entry = self._entries.popleft()
        self._rows_out += len(entry.scheduled) if isinstance(entry, Step) else 0
        return entry


def losses_of(verified: Iterable[Verified], invalid: Mapping[str, int]) -> Losses:
    """vLLM's counts for these rounds, in case they get lost."""
    rounds = draft_tokens = accepted_tokens = 0
    for request_id, num_draft, num_accepted in verified:
        rounds += 1
        draft_tokens += num_draft - invalid.get(request_id, 0)
        accepted_tokens += num_accepted
    return Losses(rounds=rounds, draft_tokens=draft_tokens, accepted_tokens=accepted_tokens)
