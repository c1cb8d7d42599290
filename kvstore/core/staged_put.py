"""StagedPut: one verified put on its way from staging to a tier."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.core.copies import Copy, CopyEvent
from kvstore.core.events.moves import CopyOutcome
from kvstore.core.events.notes import NoteKind
from kvstore.core.events.puts import CommitStatus
from kvstore.core.extent import Tier
from kvstore.core.index import Entry
from kvstore.core.reservation import Reservation
from kvstore.core.stock import Stock
from kvstore.units import Nanos


class StagedPut:
    """Its reservation keeps the key until it ends, well or not."""

    def __init__(self, stock: Stock, reservation: Reservation, entry: Entry, settle: Callable[[CommitStatus], None], until: Nanos) -> None:
        self.entry = entry
        self.until = until
        """When the commit is answered at the latest."""
        self._stock = stock
        self._reservation = reservation
        self._settle: Callable[[CommitStatus], None] | None = settle
        self._charged = True
        self.ended = False

    @property
    def source(self) -> Copy:
        return self._reservation.copy

    @property
    def doomed(self) -> bool:
        return self._reservation.doomed

    def starts(self) -> None:
        """Room in a tier will be charged in a moment, and one put is paid for once. The block's life begins, for its end goes into the
        record."""
        stock, ttl = self._stock, self._reservation.ttl
        stock.quota.refund(self.entry.key_space.namespace, self.source.length)
        self._charged = False
        self.entry.expires_at = stock.today + ttl if ttl else 0

    def placed(self, target: Copy) -> None:
        """The bytes are in a tier: the copy there, READABLE, is the entry's."""
        self._stock.add_copy(self.entry, target)
        self._stock.list_entry(self.entry)
        self._stock.note(NoteKind.STORED, "put", self.entry, target.tier)
        self._end(CopyEvent.PLACED, CommitStatus.DURABLE if target.tier is Tier.SSD else CommitStatus.STORED)

    def failed(self, outcome: CopyOutcome) -> None:
        if self.doomed:
            status = CommitStatus.EXPIRED
        else:
            status = CommitStatus.BAD_CHECKSUM if outcome is CopyOutcome.SOURCE_CORRUPT else CommitStatus.NO_ROOM
        self._end(CopyEvent.REFUSED, status)

    def answer(self, status: CommitStatus) -> None:
        """The first answer counts: a commit that waited too long is answered while its write goes on."""
        if self._settle is not None:
            settle, self._settle = self._settle, None
            settle(status)

    def _end(self, event: CopyEvent, status: CommitStatus) -> None:
        self.ended = True
        self._stock.reservations.close(self._reservation)
        self.source.on(event)
        self._stock.give_back(self.entry.key_space, self.source, charged=self._charged)
        self.answer(status)
