"""Recoder: blocks that are being stepped down, until what came out of it can be written.

The length is known only when the shell has done it, and a region is written without gaps: so a step-down is two instructions, RecodeExtent
and then the CopyExtent of a demotion or relocation. What cannot be stepped down goes on as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstore.core.copies import Copy, CopyState
from kvstore.core.events.moves import CopyReason, DropRecoded, ExtentRecoded, RecodeExtent, RecodeOutcome
from kvstore.core.events.notes import NoteKind
from kvstore.core.extent import Tier
from kvstore.core.index import Entry
from kvstore.core.stock import Stock
from kvstore.ids import OperationId, RungCode


@dataclass(slots=True, kw_only=True)
class Recoding:
    """Mutable: what is to be written is known with the outcome."""

    entry: Entry
    source: Copy
    """Held until the recoding is over."""
    reason: CopyReason
    """DEMOTE or RELOCATE."""
    rung: RungCode
    """Wanted; of the source, when it stays as it is."""
    length: int
    """Like the checksum of the source until the outcome."""
    checksum: int
    recoded: OperationId | None = None
    """None: nothing came out, it stays as it is."""
    ready: bool = False


class Recoder:
    """The caller bounds how many are under way. Cost: O(1) each."""

    def __init__(self, stock: Stock, *, given_up: Callable[[Entry], None]) -> None:
        """`given_up` is told of each block that will not be written for this."""
        self._stock = stock
        self._given_up = given_up
        self._recodings: dict[OperationId, Recoding] = {}
        self.demotions = 0
        """Of those under way."""
        self.demoting_bytes = 0

    def __len__(self) -> int:
        return len(self._recodings)

    @property
    def relocations(self) -> int:
        return len(self._recodings) - self.demotions

    def start(self, entry: Entry, source: Copy, rung: RungCode, reason: CopyReason) -> None:
        stock = self._stock
        source.hold()
        recoding = Recoding(entry=entry, source=source, reason=reason, rung=rung, length=source.length, checksum=source.checksum)
        operation = stock.recodings.start(lambda outcome: self._finish(recoding, outcome))
        self._recodings[operation] = recoding
        self._count(recoding, 1)
        entry.move = operation
        stock.say(RecodeExtent(operation=operation, source=source.extent, checksum=source.checksum, rung=rung))

    def _finish(self, recoding: Recoding, outcome: ExtentRecoded) -> None:
        stock, entry, source = self._stock, recoding.entry, recoding.source
        recoding.ready = True
        match outcome.outcome:
            case RecodeOutcome.OK:
                assert 0 < outcome.length < source.length
                recoding.length, recoding.checksum, recoding.recoded = outcome.length, outcome.checksum, outcome.operation
            case RecodeOutcome.REFUSED:
                recoding.rung = source.rung
                stock.note(NoteKind.NOT_STEPPED_DOWN, outcome.reason, entry, source.tier)
            case RecodeOutcome.SOURCE_CORRUPT:
                stock.quarantine(entry, source, "checksum")
            case RecodeOutcome.SOURCE_FAILED:
                stock.quarantine(entry, source, "io_error")

    def ready(self) -> Iterator[Recoding]:
        """What may be written now, the longest waiting first; what need not be written any more is dropped on the way. The caller may end
        the one that it was given."""
        for operation in [operation for operation, recoding in self._recodings.items() if recoding.ready]:
            recoding = self._recodings[operation]
            if recoding.entry.listed and recoding.source.state is CopyState.READABLE:
                yield recoding
            else:
                self.give_up(recoding)

    def give_up(self, recoding: Recoding) -> None:
        """Nothing is written."""
        self.drop(recoding)
        self._given_up(recoding.entry)

    def drop(self, recoding: Recoding) -> None:
        """Nothing is written now; the caller may want the move again."""
        if recoding.recoded is not None:
            self._stock.say(DropRecoded(recoded=recoding.recoded))
        self.end(recoding)

    def end(self, recoding: Recoding) -> None:
        """A move takes over, and holds the source already; or nobody does."""
        entry = recoding.entry
        assert entry.move is not None
        operation = entry.move
        del self._recodings[operation]
        self._stock.doomed_moves.discard(operation)
        self._count(recoding, -1)
        entry.move = None
        self._stock.unhold(entry, recoding.source)

    def _count(self, recoding: Recoding, one: int) -> None:
        if recoding.reason is CopyReason.DEMOTE:
            self.demotions += one
            self.demoting_bytes += one * recoding.source.length


def saved_bytes(source: Copy, target: Copy) -> int:
    """By which the copy is smaller for having been stepped down; 0 when it was not."""
    return source.length - target.length if target.tier is Tier.SSD and target.rung != source.rung else 0
