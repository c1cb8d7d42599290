"""S3-FIFO: a small queue that new blocks must survive, a main queue that goes around, a ghost list of what the small one let go.

Source: Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvstore.core.eviction import RankedQueue
from kvstore.core.ghost import GhostList
from kvstore.core.index import Entry

SMALL_SHARE = 0.1
_MOST_USES = 3
_SMALL, _MAIN = 0, 1
_SEGMENTS = 2
_USE = 2  # Entry.segment holds the segment in its lowest bit and the uses above it


class S3FifoPolicy:
    def __init__(self) -> None:
        self._rank = 0
        self._queues = 0
        self._count = [0, 0]
        self._ghosts = GhostList()

    def listed(self, entry: Entry) -> None:
        known = self._ghosts.recall(entry.hash, limit=sum(self._count))
        entry.segment = _MAIN if known else _SMALL
        self._count[entry.segment] += 1
        self._to_the_back(entry)

    def used(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.segment < _MOST_USES * _USE:
                entry.segment += _USE

    def unlisted(self, entry: Entry, *, evicted: bool) -> None:
        segment = entry.segment & 1
        self._count[segment] -= 1
        if evicted and segment == _SMALL:
            self._ghosts.remember(entry.hash, limit=sum(self._count))

    def queue(self, may_go: Callable[[Entry], bool]) -> Callable[[], S3FifoQueue]:
        self._queues += 1
        return partial(S3FifoQueue, self, may_go, first_bit=1 << (self._queues - 1) * _SEGMENTS)

    @property
    def small_is_full(self) -> bool:
        return self._count[_SMALL] > SMALL_SHARE * sum(self._count)

    def gets_another_round(self, entry: Entry) -> bool:
        """The entry is at the front of its queue. True: it was used, and has gone to the back of the main queue."""
        segment = entry.segment & 1
        if entry.segment < _USE:
            return False
        self._count[segment] -= 1
        self._count[_MAIN] += 1
        entry.segment = _MAIN if segment == _SMALL else entry.segment - _USE
        self._to_the_back(entry)
        return True

    def _to_the_back(self, entry: Entry) -> None:
        self._rank += 1
        entry.last_used = self._rank


class S3FifoQueue:
    def __init__(self, policy: S3FifoPolicy, may_go: Callable[[Entry], bool], *, first_bit: int) -> None:
        self._policy = policy
        self._segments = (
            RankedQueue(lambda entry: not entry.segment & 1 and may_go(entry), bit=first_bit),
            RankedQueue(lambda entry: bool(entry.segment & 1) and may_go(entry), bit=first_bit << 1),
        )

    def offer(self, entry: Entry) -> None:
        self._segments[entry.segment & 1].offer(entry)

    def discard(self, entry: Entry) -> None:
        for segment in self._segments:
            segment.discard(entry)

    def take(self) -> Entry | None:
        """Each candidate passes at most four times, so this ends."""
        while True:
            first = _SMALL if self._policy.small_is_full else _MAIN
            entry = self._segments[first].take() or self._segments[1 - first].take()
            if entry is None or not self._policy.gets_another_round(entry):
                return entry
            self.offer(entry)
