"""Expiry: which listed blocks have an end, the soonest first."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from kvstore.core.index import Entry
from kvstore.units import Nanos

MAX_TTL = Nanos(10 * 365 * 86_400 * 10**9)
"""Ten years: longer is no cache any more, and a moment must fit the record's 64 bits."""


class ExpiryTable:
    """A heap by `Entry.expires_at`, put right lazily: a block that is given a longer life, or is gone, costs nothing until it is met.

    Moments are by the time of day, for they must mean the same after a restart.

    Cost: watch O(log n), forget O(1), due O(log n), all amortized; nothing for blocks without an end.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Entry]] = []
        self._pushes = 0
        self._forgotten = 0

    def watch(self, entry: Entry) -> None:
        """The entry, listed now, ends at its `expires_at`."""
        self._pushes += 1
        heappush(self._heap, (entry.expires_at, self._pushes, entry))

    def forget(self, entry: Entry) -> None:
        """The entry was unlisted."""
        self._forgotten += 1
        if self._forgotten > 64 and self._forgotten * 2 > len(self._heap):
            self._heap = [item for item in self._heap if item[2].listed]
            heapify(self._heap)
            self._forgotten = 0

    def is_behind(self, today: Nanos) -> bool:
        """Some block may be listed whose end has come."""
        return bool(self._heap) and self._heap[0][0] <= today

    def take_due(self, today: Nanos) -> Entry | None:
        """A listed entry whose end has come, not given again; None when there is none."""
        heap = self._heap
        while heap and heap[0][0] <= today:
            _, _, entry = heappop(heap)
            if not entry.listed or not entry.expires_at:
                continue
            if entry.expires_at > today:
                self.watch(entry)
                continue
            return entry
        return None
