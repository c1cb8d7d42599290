"""Durability: commits that wait until their blocks are on the SSD."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.core.index import Entry
from kvstore.units import Nanos

Settled = Callable[[bool], None]
"""Called once: True when the block is on the SSD."""

_MOST_WAITING = 4096
"""Blocks; the commits of more do not wait and are not called durable."""


class Durability:
    """Every wait is settled by its write, by its failure, or by its time. Cost: O(1) each."""

    def __init__(self, within: Nanos) -> None:
        self._within = within
        self._waiting: dict[Entry, tuple[Nanos, Settled]] = {}  # by age, so by deadline

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, entry: Entry, settled: Settled, *, now: Nanos) -> bool:
        """False: too many wait, and `settled` will not be called."""
        if len(self._waiting) >= _MOST_WAITING:
            return False
        assert entry not in self._waiting
        self._waiting[entry] = (Nanos(now + self._within), settled)
        return True

    def settle(self, entry: Entry, *, durable: bool) -> None:
        """The entry's write has ended, or will not be. Harmless when nobody waits for it."""
        waiting = self._waiting.pop(entry, None)
        if waiting is not None:
            waiting[1](durable)

    def sweep(self, now: Nanos) -> None:
        """Those whose time is over, or whose block is gone meanwhile, wait no longer."""
        while self._waiting:
            entry, (until, _) = next(iter(self._waiting.items()))
            if now < until and entry.listed:
                return
            self.settle(entry, durable=False)
