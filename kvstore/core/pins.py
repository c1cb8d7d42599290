"""Pins: wishes against eviction, until a time. A soft one may be broken when nothing else can go, a hard one is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kvstore.core.events.wishes import PinKind
from kvstore.core.index import Entry
from kvstore.ids import BlockHash, KeySpace
from kvstore.units import Nanos

MAX_PIN_TTL = Nanos(366 * 86_400 * 10**9)
"""A year. Every pin ends by itself: nobody can leave one behind for ever."""
HARD_SHARE = 0.5
"""Of a tier that hard pins may take: the rest keeps puts going."""


@dataclass(frozen=True, slots=True)
class Pin:
    kind: PinKind
    expires_at: Nanos
    """By the time of day, since 1970."""


class PinnedBlock(NamedTuple):
    key_space: KeySpace
    hash: BlockHash
    kind: PinKind
    expires_at: Nanos


class PinTable:
    """Of listed blocks. Cost: O(1), expiry O(log pins) amortized; nothing for blocks without a pin."""

    def __init__(self) -> None:
        self._pins: dict[Entry, Pin] = {}
        self._hard: dict[Entry, int] = {}
        """Bytes when it was pinned, of those with a hard pin."""
        self._expiries: list[tuple[int, int, Entry]] = []  # outdated ones are skipped when met
        self._pushes = 0
        self.hard_bytes = 0

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[tuple[Entry, Pin]]:
        return iter(self._pins.items())

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._pins

    def get(self, entry: Entry) -> Pin | None:
        return self._pins.get(entry)

    def is_hard(self, entry: Entry) -> bool:
        pin = self._pins.get(entry)
        return pin is not None and pin.kind is PinKind.HARD

    def pin(self, entry: Entry, pin: Pin) -> None:
        """In place of the one that it had."""
        self.unpin(entry)
        self._pins[entry] = pin
        if pin.kind is PinKind.HARD:
            self._hard[entry] = entry.best.length
            self.hard_bytes += self._hard[entry]
        self._pushes += 1
        heappush(self._expiries, (pin.expires_at, self._pushes, entry))
        if len(self._expiries) > 2 * len(self._pins) + 64:
            self._expiries = [item for item in self._expiries if self._is_current(item)]
            heapify(self._expiries)

    def unpin(self, entry: Entry) -> bool:
        """False: it had none."""
        pin = self._pins.pop(entry, None)
        self.hard_bytes -= self._hard.pop(entry, 0)
        return pin is not None

    def expire(self, today: Nanos, *, at_most: int) -> list[Entry]:
        """Ends pins whose time is over, `at_most` of them; gives their blocks."""
        ended: list[Entry] = []
        while self._expiries and self._expiries[0][0] <= today and len(ended) < at_most:
            item = heappop(self._expiries)
            if self._is_current(item) and self.unpin(item[2]):
                ended.append(item[2])
        return ended

    def _is_current(self, item: tuple[int, int, Entry]) -> bool:
        pin = self._pins.get(item[2])
        return pin is not None and pin.expires_at == item[0]
