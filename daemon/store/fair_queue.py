"""A queue in which sources take turns, so that one that floods it delays only itself."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """First in, first out for each source; sources take turns. Not thread-safe.

    Sizes are in the caller's unit, e.g. bytes.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[tuple[T, int]]] = {}
        """By source, in the order of their turns; none is empty."""
        self._sizes: Counter[str] = Counter()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def size(self) -> int:
        """Size of all items."""
        return sum(self._sizes.values())

    def size_of(self, source: str) -> int:
        """Size of a source's items."""
        return self._sizes[source]

    def put(self, source: str, item: T, size: int) -> None:
        """Add an item behind the others of its source."""
        self._queues.setdefault(source, deque()).append((item, size))
        self._sizes[source] += size
        self._length += 1

    def take(self) -> T:
        """Remove the oldest item of the source whose turn it is. Raises IndexError if there is none."""
        if not self._queues:
            raise IndexError("the queue is empty")
        source = next(iter(self._queues))
        item = self._take(source)
        if source in self._queues:
            self._queues[source] = self._queues.pop(source)  # behind the others
        return item

    def drop(self) -> T:
        """Remove the oldest item of the source that has most; it keeps its turn. Raises IndexError if there is none."""
        if not self._queues:
            raise IndexError("the queue is empty")
        return self._take(max(self._queues, key=self._sizes.__getitem__))

    def take_all(self, source: str) -> list[tuple[T, int]]:
        """Remove a source's items, oldest first, with their sizes."""
        taken = list(self._queues.pop(source, ()))
        del self._sizes[source]
        self._length -= len(taken)
        return taken

    def put_back(self, source: str, items: Iterable[tuple[T, int]]) -> None:
        """Put items, oldest first, before the others of their source."""
        for item, size in [*items, *self.take_all(source)]:
            self.put(source, item, size)

    def _take(self, source: str) -> T:
        item, size = self._queues[source].popleft()
        self._length -= 1
        self._sizes[source] -= size
        if not self._queues[source]:
            del self._queues[source], self._sizes[source]
        return item
