"""Two hits: a block stays on probation until it is asked for a second time; how much room probation has follows the load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvstore.core.eviction import RankedQueue, UseClock
from kvstore.core.ghost import GhostList
from kvstore.core.index import Entry

FIRST_SHARE = 0.1
LEAST_SHARE = 0.01
MOST_SHARE = 0.3
"""Of probation. Above it, on the conversation trace, once-used blocks push out those that return (kvstore/core/LOG.md)."""
GHOSTS_PER_BLOCK = 3
"""Evicted blocks remembered of each segment, as a multiple of the listed ones."""
_PROBATION, _PROVEN = 0, 1
_SEGMENTS = 2


class TwoHitPolicy:
    """Two least-recently-used segments. A new block is on probation; a use, or its return soon after an eviction, proves it. Room is taken
    from probation while that has more than its share, else from the proven ones.

    The share adapts as in ARC: the return of a block that probation let go says that probation was too small, the return of a
    proven one that it was too large. Regrets of the rarer kind count more.
    Source: Megiddo and Modha, ARC, FAST 2003; 2Q, VLDB 1994, for the longer ghost list.
    """

    def __init__(self) -> None:
        self._uses = UseClock()
        self._queues = 0
        self._count = [0, 0]
        self._ghosts = (GhostList(), GhostList())
        self._remembered = [0, 0]
        self._share = FIRST_SHARE

    def listed(self, entry: Entry) -> None:
        total = self._count[_PROBATION] + self._count[_PROVEN]
        limit = GHOSTS_PER_BLOCK * total
        entry.segment = _PROBATION
        for segment in (_PROBATION, _PROVEN):
            if self._ghosts[segment].recall(entry.hash, limit=limit):
                self._remembered[segment] = max(0, self._remembered[segment] - 1)
                self._regret(segment, total)
                entry.segment = _PROVEN
                break
        self._count[entry.segment] += 1
        self._uses.listed(entry)

    def _regret(self, segment: int, total: int) -> None:
        other = self._remembered[1 - segment]
        step = max(1.0, other / max(1, self._remembered[segment])) / max(1, total)
        if segment == _PROBATION:
            self._share = min(MOST_SHARE, self._share + step)
        else:
            self._share = max(LEAST_SHARE, self._share - step)

    def used(self, entries: Sequence[Entry]) -> None:
        self._uses.used(entries)
        proven = 0
        for entry in entries:
            if entry.segment == _PROBATION and entry.listed:
                entry.segment = _PROVEN
                proven += 1
        self._count[_PROBATION] -= proven
        self._count[_PROVEN] += proven

    def unlisted(self, entry: Entry, *, evicted: bool) -> None:
        segment = entry.segment
        self._count[segment] -= 1
        if evicted:
            limit = GHOSTS_PER_BLOCK * sum(self._count)
            self._ghosts[segment].remember(entry.hash, limit=limit)
            self._remembered[segment] = min(limit, self._remembered[segment] + 1)

    @property
    def probation_is_full(self) -> bool:
        probation, proven = self._count
        return probation > self._share * (probation + proven)

    def queue(self, may_go: Callable[[Entry], bool]) -> Callable[[], TwoHitQueue]:
        self._queues += 1
        return partial(TwoHitQueue, self, may_go, first_bit=1 << (self._queues - 1) * _SEGMENTS)


class TwoHitQueue:
    def __init__(self, policy: TwoHitPolicy, may_go: Callable[[Entry], bool], *, first_bit: int) -> None:
        self._policy = policy
        self._segments = (
            RankedQueue(lambda entry: entry.segment == _PROBATION and may_go(entry), bit=first_bit),
            RankedQueue(lambda entry: entry.segment == _PROVEN and may_go(entry), bit=first_bit << 1),
        )

    def offer(self, entry: Entry) -> None:
        self._segments[entry.segment].offer(entry)

    def discard(self, entry: Entry) -> None:
        for segment in self._segments:
            segment.discard(entry)

    def take(self) -> Entry | None:
        first = _PROBATION if self._policy.probation_is_full else _PROVEN
        return self._segments[first].take() or self._segments[1 - first].take()
