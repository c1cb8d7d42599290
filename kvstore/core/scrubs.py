"""Scrubs: does a copy still read back as stored? Asked by an operator, by the background scrub, or after a reader's complaint."""

from __future__ import annotations

from kvstore.core.copies import Copy, CopyState
from kvstore.core.events.verification import AnswerVerify, CopyVerdict, VerifyExtents, VerifyOutcome, VerifyRequested
from kvstore.core.index import Entry
from kvstore.core.stock import Stock
from kvstore.ids import RequestId
from kvstore.units import Bytes


class Scrubs:
    """One verification per copy at a time: a flood of complaints about one block costs one read."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._waiting: dict[Copy, list[RequestId]] = {}
        """Copies being verified -> who wants to know."""

    def verify(self, event: VerifyRequested) -> None:
        entry = self._stock.index.get(event.key_space, event.hash)
        copy = None if entry is None else entry.copy_in(event.tier)
        if entry is None or copy is None or copy.state is not CopyState.READABLE:
            self._stock.say(AnswerVerify(request_id=event.request_id, verdict=CopyVerdict.GONE, checked_bytes=Bytes(0)))
            return
        self.check(entry, copy)
        self._waiting[copy].append(event.request_id)

    def check(self, entry: Entry, copy: Copy) -> None:
        """Starts a verification of the copy, which must be readable by somebody, unless one is under way."""
        if copy in self._waiting:
            return
        self._waiting[copy] = []
        copy.hold()
        operation = self._stock.verifications.start(lambda outcomes: self._checked(entry, copy, *outcomes))
        self._stock.say(VerifyExtents(operation=operation, extents=(copy.extent,), checksums=(copy.checksum,)))

    def _checked(self, entry: Entry, copy: Copy, outcome: VerifyOutcome) -> None:
        good = outcome is VerifyOutcome.OK
        if not good:
            self._stock.quarantine(entry, copy, "checksum" if outcome is VerifyOutcome.CORRUPT else "io_error")
        self._stock.unhold(entry, copy)
        for request_id in self._waiting.pop(copy):
            verdict = CopyVerdict.GOOD if good else CopyVerdict.BAD
            self._stock.say(AnswerVerify(request_id=request_id, verdict=verdict, checked_bytes=Bytes(copy.length)))
