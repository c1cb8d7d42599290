"""Eviction: which copy goes next. The policy ranks; what may go at all (not leased, no child left) is the caller's rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace
from typing import Protocol

from kvstore.core.index import Entry
from kvstore.ids import BlockHash

_MOST_OFFERED = 1024


class EvictionQueue(Protocol):
    """Candidates of one tier, coldest first."""

    def offer(self, entry: Entry) -> None:
        """The entry may go now, as far as the caller knows. Offering it again is harmless."""
        ...

    def discard(self, entry: Entry) -> None:
        """The entry has no copy here any more."""
        ...

    def take(self) -> Entry | None:
        """Removes and gives the coldest candidate that may go; None when there is none. Candidates found unable to go are dropped: who
        makes them able again offers them again."""
        ...


class EvictionPolicy(Protocol):
    """Told of each block's way through the index. `Entry.last_used` and `Entry.segment` are the policy's to write."""

    def listed(self, entry: Entry) -> None:
        """The block was not here and is now. Parents come before children."""
        ...

    def used(self, entries: Sequence[Entry]) -> None:
        """The entries, in chain order, were leased or put again just now. The caller offers them again when they may go."""
        ...

    def unlisted(self, entry: Entry, *, evicted: bool) -> None:
        """The block is not here any more; evicted: for want of room, so that its return would be a regret."""
        ...

    def queue(self, may_go: Callable[[Entry], bool]) -> Callable[[], EvictionQueue]:
        """Makes queues for one kind of candidate; asked for once each kind, at start. An entry is in one queue of a kind at a time."""
        ...


class LruPolicy:
    """Least recently used first."""

    def __init__(self) -> None:
        self._uses = UseClock()
        self._queues = 0

    def listed(self, entry: Entry) -> None:
        self._uses.listed(entry)

    def used(self, entries: Sequence[Entry]) -> None:
        self._uses.used(entries)

    def unlisted(self, entry: Entry, *, evicted: bool) -> None:
        """What is gone is forgotten."""

    def queue(self, may_go: Callable[[Entry], bool]) -> Callable[[], RankedQueue]:
        self._queues += 1
        return partial(RankedQueue, may_go, bit=1 << (self._queues - 1))


class UseClock:
    """Ranks uses. The blocks of one use have one rank, for an int of its own takes each 32 bytes; among them the end of the chain is the
    coldest (`Entry.__lt__`): a prefix without its head is worthless."""

    def __init__(self) -> None:
        self._rank = 0
        self._last_listed: BlockHash | None = None

    def listed(self, entry: Entry) -> None:
        """Blocks of a chain that are listed one after another are one use."""
        if entry.parent != self._last_listed:
            self._rank += 1
        self._last_listed = entry.hash
        entry.last_used = self._rank

    def used(self, entries: Sequence[Entry]) -> None:
        self._rank = rank = self._rank + 1
        self._last_listed = None
        for entry in entries:
            entry.last_used = rank


class RankedQueue:
    """A heap by `last_used`, put right lazily: a use or a lease costs no heap operation; an outdated head is re-ranked or dropped when met.
    What is offered waits aside until room is needed, or many have gathered: most blocks have a child by then, and are no candidates.

    Cost: offer O(log n), discard O(1), take O(log n), all amortized.
    """

    def __init__(self, may_go: Callable[[Entry], bool], *, bit: int) -> None:
        """`bit`: of `Entry.queued`; this queue's alone."""
        self._may_go = may_go
        self._bit = bit
        self._heap: list[tuple[int, Entry]] = []
        self._offered: list[Entry] = []  # not in the heap yet
        self._discarded = 0

    def offer(self, entry: Entry) -> None:
        if not entry.queued & self._bit:
            entry.queued |= self._bit
            self._offered.append(entry)
            if len(self._offered) >= _MOST_OFFERED:
                self._look_at_offered()

    def _look_at_offered(self) -> None:
        for entry in self._offered:
            if self._may_go(entry):
                heappush(self._heap, (entry.last_used, entry))
            else:
                entry.queued &= ~self._bit
        self._offered.clear()

    def discard(self, entry: Entry) -> None:
        if entry.queued & self._bit:
            self._discarded += 1
            if self._discarded > 64 and self._discarded * 2 > len(self._heap):
                self._rebuild()

    def take(self) -> Entry | None:
        if self._offered:
            self._look_at_offered()
        heap = self._heap
        while heap:
            rank, entry = heap[0]
            if not self._may_go(entry):
                heappop(heap)
                entry.queued &= ~self._bit
            elif entry.last_used != rank:
                heapreplace(heap, (entry.last_used, entry))
            else:
                heappop(heap)
                entry.queued &= ~self._bit
                return entry
        return None

    def _rebuild(self) -> None:
        """Lets go of the entries that are gone; without it a store of puts and deletes would never forget them."""
        kept: list[tuple[int, Entry]] = []
        for _, entry in self._heap:
            if self._may_go(entry):
                kept.append((entry.last_used, entry))
            else:
                entry.queued &= ~self._bit
        heapify(kept)
        self._heap = kept
        self._discarded = 0
