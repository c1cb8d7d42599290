"""Staging: the way of a put on a node without a host tier. Its bytes come into a small memory, and go on to a tier before it is listed.

Nothing is ever read from staging: a block is listed, and its commit answered, when it is on the SSD, or on the device of a node that has no
SSD (or whose disk is being left alone). So a commit is refused, and nothing lost that anybody was promised, when no tier takes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvstore.core.events.moves import CopyOutcome
from kvstore.core.events.puts import CommitStatus
from kvstore.core.extent import round_up
from kvstore.core.gpu_tiering import GpuTiering
from kvstore.core.index import Entry
from kvstore.core.reservation import Reservation
from kvstore.core.staged_put import StagedPut
from kvstore.core.stock import Stock
from kvstore.core.tiering import Tiering
from kvstore.ids import KeySpace
from kvstore.units import Nanos


class Staging:
    """Staged puts in the order of their commits, each with a bound. Cost: O(1) each."""

    def __init__(self, stock: Stock, tiering: Tiering | None, gpu_tiering: GpuTiering | None) -> None:
        self._stock = stock
        self._tiering = tiering
        self._gpu_tiering = gpu_tiering
        self._queue: deque[StagedPut] = deque()
        self._open: deque[StagedPut] = deque()
        """Not over yet, the oldest first: those of the queue and those under way."""

    def is_busy(self) -> bool:
        """Room in staging is about to be given back."""
        return bool(self._open)

    def fits(self, key_space: KeySpace, length: int) -> bool:
        """The tier that puts go to could ever hold such a payload."""
        regions = self._stock.regions
        if regions is not None:
            return regions.fits_a_region(key_space, length)
        return round_up(length) <= self._stock.gpu_arena.capacity

    def takes(self, length: int, now: Nanos) -> bool:
        """A tier takes such a put now, as far as is known."""
        return self._shelf(length, now) is not None

    def place(self, reservation: Reservation, entry: Entry, settle: Callable[[CommitStatus], None], now: Nanos) -> None:
        """`settle` is called once, by `pump` or when the outcome of the copy has come."""
        until = Nanos(now + self._stock.config.placed_within)
        staged = StagedPut(self._stock, reservation, entry, settle, until)
        self._queue.append(staged)
        self._open.append(staged)

    def pump(self, now: Nanos) -> None:
        """Starts what may start now, and answers those whose time is over."""
        while self._queue:
            staged = self._queue[0]
            shelf = None if staged.doomed or now >= staged.until else self._shelf(staged.source.length, now)
            if shelf is None:
                self._queue.popleft().failed(CopyOutcome.TARGET_FAILED)
            elif shelf.place(staged):
                self._queue.popleft()
            else:
                break
        while self._open and (self._open[0].ended or now >= self._open[0].until):
            self._open.popleft().answer(CommitStatus.NO_ROOM)

    def _shelf(self, length: int, now: Nanos) -> Tiering | GpuTiering | None:
        """The SSD; the device when there is no SSD, or it is being left alone after a failed write."""
        if self._tiering is not None and self._tiering.takes_writes(now):
            return self._tiering
        if self._gpu_tiering is not None and round_up(length) <= self._stock.gpu_arena.capacity:
            return self._gpu_tiering
        return None
