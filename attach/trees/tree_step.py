"""A step's tree requests: their rows among the step's, and what these attend to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from honed.kernels.trees.cached_attention import CachedRows, cached_rows
from honed.kernels.trees.reference import DraftTrees

# Letters: B tree requests, I rows of the largest, R rows of all of them, T rows of the step.


@dataclass(frozen=True, eq=False)
class TreeStep:
    """Requests whose drafts of this step are trees; tensors are on the runner's device."""

    request_ids: list[str]
    batch_index: torch.Tensor  # [B] int64, place in the runner's batch
    first_row: torch.Tensor  # [B] int64, the anchor's row among the step's
    trees: DraftTrees  # of B requests; those nodes are verified that come first
    num_nodes: torch.Tensor  # [B] int64
    rows: torch.Tensor  # [R] int64, rows of the step: each request's anchor, then its nodes
    rows_at: torch.Tensor | slice
    """`rows`, as a slice where they lie one after another: an index that copies nothing."""
    request: torch.Tensor  # [R] int64, request of each row
    row_starts: torch.Tensor  # [B + 1] int32
    max_rows: int
    prefix: torch.Tensor  # [B] int32, tokens before the anchor
    _counts: list[tuple[int, int]]  # B, place in the runner's batch and nodes, on the host
    _firsts: dict[int, torch.Tensor] = field(default_factory=dict)
    _tables: dict[int, torch.Tensor] = field(default_factory=dict)
    _followed: dict[int, torch.Tensor] = field(default_factory=dict)
    _cached: dict[tuple[int, int, int], CachedRows] = field(default_factory=dict)
    _sums: dict[int, torch.Tensor] = field(default_factory=dict)
    _others: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict)

    @cached_property
    def num_verified(self) -> torch.Tensor:  # [B] int64
        """Nodes that are verified and real: a tree may have fewer than were scheduled."""
        return torch.minimum(self.num_nodes, self.trees.num_nodes)

    @property
    def batch_rows(self) -> list[int]:  # R
        """Each row's request as a place in the runner's batch, on the host."""
        return [index for index, count in self._counts for _ in range(count + 1)]

    @cached_property
    def is_first(self) -> bool:
        """Whether these are the step's first requests and rows."""
        indices = [index for index, _ in self._counts]
        return isinstance(self.rows_at, slice) and self.rows_at.start == 0 and indices == list(range(len(indices)))

    @cached_property
    def place(self) -> torch.Tensor:  # [R] int64
        """Place of each row in its request: 0 for an anchor, n + 1 for node n."""
        return self.rows - self.first_row[self.request]

    @cached_property
    def depths(self) -> torch.Tensor:  # [R] int64
        """Depth of each row; an anchor has 0."""
        place = self.place
        depth = self.trees.depths.long()[self.request, (place - 1).clamp(min=0)]
        return torch.where(place > 0, depth, 0)

    def firsts(self, window: int) -> torch.Tensor:  # [R] int32
        """The first token of the prefix that each row attends to in a window of so many tokens, its own among them."""
        if window not in self._firsts:
            first = self.prefix[self.request] + self.depths - window + 1
            self._firsts[window] = first.clamp(min=0).int()
        return self._firsts[window]

    def followed(self, taps: int) -> torch.Tensor:  # [R, X] int64
        """The X inputs that end at each row: rows as long as there are ancestors, then what leads up to the anchor.

        Inputs are numbered as the R rows, then `taps` − 1 of each request that end at its anchor. The oldest comes first.
        """
        if taps not in self._followed:
            parents = torch.nn.functional.pad(self.trees.parents.long() + 1, (1, 0))  # of each place; an anchor is its own
            depths, start = self.depths, self.row_starts[self.request].long()
            row = torch.arange(len(self.rows), device=self.rows.device)
            found = [row]
            for back in range(1, taps):
                row = start + parents[self.request, row - start]
                column = (taps - 2 - back + depths).clamp(0, taps - 2)
                found.insert(0, torch.where(back <= depths, row, len(self.rows) + self.request * (taps - 1) + column))
            self._followed[taps] = torch.stack(found, 1)
        return self._followed[taps]

    def block_table(self, of_batch: torch.Tensor) -> torch.Tensor:  # [requests of the step, P] -> [B, P]
        """Rows of a group's block table, which all of its layers share."""
        if (key := of_batch.data_ptr()) not in self._tables:
            self._tables[key] = of_batch[self.batch_index]
        return self._tables[key]

    def of_others(self, metadata: Any, window: int, make: Callable[[], Any]) -> Any:
        """Make metadata for the step's other requests, once for all layers that share an attention's metadata."""
        if (key := (id(metadata), window)) not in self._others:
            self._others[key] = metadata, make()  # held, so that no other object gets its id
        return self._others[key][1]

    def log_sums(self, num_heads: int) -> torch.Tensor:  # [R, H] float32
        """Room for the log-sum-exp of an attention's scores, which the next layer overwrites."""
        if num_heads not in self._sums:
            self._sums[num_heads] = torch.empty((len(self.rows), num_heads), device=self.rows.device)
        return self._sums[num_heads]

    def cached_rows(self, table: torch.Tensor, page_tokens: int, group: int, window: int) -> CachedRows:  # [B, P]
        """Where keys are in a CPU's caches, and what rows attend to.

        Args:
            group: heads of a K/V head.
            window: tokens that a row attends to, its own among them; 0: all.
        """
        if (key := (table.data_ptr(), group, window)) not in self._cached:
            firsts = self.firsts(window) if window else None
            shape = self.row_starts, self.trees.row_masks, self.max_rows
            self._cached[key] = cached_rows(table, page_tokens, group, self.rows, *shape, self.prefix, firsts)
        return self._cached[key]

    def by_request(self, values: torch.Tensor) -> torch.Tensor:  # [R] -> [B, 1 + N] int64, −1 past a request's rows
        """Spread a value of each row."""
        spread = torch.full((len(self.request_ids), self.trees.tokens.shape[1] + 1), -1, device=values.device)
        spread[self.request, self.place] = values.long()
        return spread

    def slots(self, slot_of_row: torch.Tensor) -> torch.Tensor:  # [T] -> [B, I], −1 past a request's rows
        """Cache slots of each request's rows."""
        place = torch.arange(self.max_rows, device=self.rows.device)
        rows = (self.first_row[:, None] + place).clamp(max=len(slot_of_row) - 1)
        return torch.where(place <= self.num_nodes[:, None], slot_of_row[rows], -1)


def on_device(values: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:  # k x n -> [k, n] int64
    """Copy integers to a device in one piece, without waiting for it."""
    made = torch.tensor(values)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def tree_step(
    request_ids: list[str],
    batch_index: list[int],
    first_row: list[int],
    prefix: torch.Tensor,  # [B]
    num_nodes: list[int],
    trees: DraftTrees,  # of these requests
) -> TreeStep:
    """Lay out the rows of a step's tree requests."""
    device = trees.tokens.device
    index, first, nodes = on_device((batch_index, first_row, num_nodes), device)
    sizes = nodes + 1
    starts = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    numbers = torch.arange(len(num_nodes), device=device)
    request = torch.repeat_interleave(numbers, sizes, output_size=sum(num_nodes) + len(num_nodes))
    rows = first[request] + torch.arange(len(request), device=device) - starts[request]
    ends = list(accumulate((count + 1 for count in num_nodes), initial=first_row[0]))
    return TreeStep(
        request_ids,
        index,
        first,
        trees,
        nodes,
        rows,
        slice(ends[0], ends[-1]) if ends[:-1] == first_row else rows,
        request,
        starts.int(),
        max(num_nodes) + 1,
        prefix.int(),
        list(zip(batch_index, num_nodes, strict=True)),
    )
