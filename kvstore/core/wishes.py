"""Wishes of an operator: pins and quotas."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core.events.wishes import AnswerPin, AnswerQuota, AnswerUnpin, PinKind, PinRequested, PinStatus, QuotaRequested, UnpinRequested
from kvstore.core.index import Entry
from kvstore.core.pins import HARD_SHARE, MAX_PIN_TTL, Pin, PinnedBlock
from kvstore.core.room import Room
from kvstore.core.stock import Stock
from kvstore.units import Bytes, Nanos

_PER_TICK = 256
"""Pins that end, and copies that a lowered quota takes, with one tick."""


class Wishes:
    def __init__(self, stock: Stock, room: Room) -> None:
        self._stock = stock
        self._room = room

    def pin(self, event: PinRequested) -> None:
        """Cost: O(blocks + pins)."""
        stock = self._stock
        stock.end_due_among(event.key_space, event.hashes)
        pin = Pin(event.kind, Nanos(stock.today + min(event.ttl, MAX_PIN_TTL)))
        in_host = sum(entry.best.length for entry, found in stock.pins if found.kind is PinKind.HARD and not entry.readable_ssd)
        statuses = []
        for block in event.hashes:
            entry = stock.index.get(event.key_space, block)
            if entry is None:
                statuses.append(PinStatus.ABSENT)
                continue
            if event.kind is PinKind.HARD and not stock.pins.is_hard(entry):
                size = 0 if entry.readable_ssd else entry.best.length
                if not self._has_share(entry, in_host + size):
                    statuses.append(PinStatus.NO_SHARE)
                    continue
                in_host += size
            stock.pins.pin(entry, pin)
            stock.offer(entry)
            statuses.append(PinStatus.PINNED)
        stock.say(AnswerPin(request_id=event.request_id, statuses=tuple(statuses)))

    def restore(self, pins: Iterable[PinnedBlock], *, today: Nanos) -> None:
        for pinned in pins:
            entry = self._stock.index.get(pinned.key_space, pinned.hash)
            if entry is not None and pinned.expires_at > today:
                self._stock.pins.pin(entry, Pin(pinned.kind, pinned.expires_at))
                self._stock.offer(entry)

    def _has_share(self, entry: Entry, in_host: int) -> bool:
        stock = self._stock
        memory = stock.arena if stock.config.has_host else stock.gpu_arena
        if in_host > HARD_SHARE * memory.capacity:
            return False
        regions = stock.regions
        return regions is None or stock.pins.hard_bytes + entry.best.length <= HARD_SHARE * len(regions) * regions.region_bytes

    def unpin(self, event: UnpinRequested) -> None:
        stock = self._stock
        unpinned = []
        for block in event.hashes:
            entry = stock.index.get(event.key_space, block)
            unpinned.append(entry is not None and stock.pins.unpin(entry))
            if entry is not None:
                stock.offer(entry)
        stock.say(AnswerUnpin(request_id=event.request_id, unpinned=tuple(unpinned)))

    def quota(self, event: QuotaRequested) -> None:
        quota = self._stock.quota
        if event.change:
            quota.set_limit(event.namespace, event.limit)
        limit = quota.limit(event.namespace)
        self._stock.say(
            AnswerQuota(request_id=event.request_id, used=Bytes(quota.used(event.namespace)), limit=None if limit is None else Bytes(limit))
        )

    def sweep(self) -> None:
        stock = self._stock
        for entry in stock.pins.expire(stock.today, at_most=_PER_TICK):
            stock.offer(entry)
        for namespace in list(stock.quota.over):
            self._room.evict_of_namespace(namespace, stock.quota.missing(namespace, 0), at_most=_PER_TICK)
            if not stock.quota.missing(namespace, 0):
                del stock.quota.over[namespace]
