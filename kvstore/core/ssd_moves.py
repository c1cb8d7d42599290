"""SSD moves: payloads under way to the SSD, back from it, or from one region to another, and what becomes of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.core.copies import Copy, CopyEvent, CopyState
from kvstore.core.events.moves import CopyExtent, CopyOutcome, CopyReason
from kvstore.core.events.notes import NoteKind
from kvstore.core.extent import Extent, Tier
from kvstore.core.index import Entry
from kvstore.core.manifest import encode_record_header
from kvstore.core.recoder import saved_bytes
from kvstore.core.region import RegionTable, record_of
from kvstore.core.region_writer import Erased, RegionWriter
from kvstore.core.staged_put import StagedPut
from kvstore.core.stock import Stock
from kvstore.ids import OperationId, RungCode

_DONE_NOTES = {
    CopyReason.DEMOTE: NoteKind.DEMOTED,
    CopyReason.PROMOTE: NoteKind.PROMOTED,
    CopyReason.RELOCATE: NoteKind.RELOCATED,
}


@dataclass(slots=True, kw_only=True)
class SsdMove:
    entry: Entry
    source: Copy
    target: Copy
    reason: CopyReason
    erased: Erased | None = None
    """Its block is being deleted: the record is erased as soon as it is written."""
    staged: StagedPut | None = None
    """PLACE: the put whose block will be listed."""


class SsdMoves:
    """The caller bounds how many are under way. Cost: O(1) each."""

    def __init__(
        self,
        stock: Stock,
        regions: RegionTable,
        writer: RegionWriter,
        *,
        demoted: Callable[[Entry, int], None],
        given_up: Callable[[Entry], None],
    ) -> None:
        """`demoted` is told of each block that is on the SSD now, and of its length in the host tier, `given_up` of each whose move ended
        otherwise."""
        self._stock = stock
        self._regions = regions
        self._writer = writer
        self._demoted = demoted
        self._given_up = given_up
        self.under_way: dict[OperationId, SsdMove] = {}
        self.demotions = 0
        """Of those under way."""
        self.demoting_bytes = 0

    def start(
        self,
        entry: Entry,
        source: Copy,
        extent: Extent,
        reason: CopyReason,
        *,
        staged: StagedPut | None = None,
        checksum: int | None = None,
        rung: RungCode | None = None,
        recoded: OperationId | None = None,
    ) -> None:
        """`checksum` and `rung` are those of the source unless it was recoded."""
        if staged is None:
            source.hold()
        checksum = source.checksum if checksum is None else checksum
        rung = source.rung if rung is None else rung
        target = self._stock.take_room(entry.key_space, extent, CopyState.WRITING, checksum=checksum, rung=rung)
        move = SsdMove(entry=entry, source=source, target=target, reason=reason, staged=staged)
        operation = self._stock.moves.start(lambda outcome: self._finish(operation, outcome))
        self.under_way[operation] = move
        entry.move = operation
        if reason is CopyReason.DEMOTE:
            self.demotions += 1
            self.demoting_bytes += source.length
        header = b""
        if target.tier is Tier.SSD:
            region = self._regions[target.region].header
            assert region is not None
            header = encode_record_header(record_of(entry, target), nonce=region.nonce)
        self._stock.say(
            CopyExtent(
                operation=operation,
                reason=reason,
                source=source.extent,
                target=extent,
                checksum=checksum,
                header=header,
                recoded=recoded,
            )
        )

    def _finish(self, operation: OperationId, outcome: CopyOutcome) -> None:
        stock, move = self._stock, self.under_way.pop(operation)
        entry, source, target = move.entry, move.source, move.target
        entry.move = None
        if move.reason is CopyReason.DEMOTE:
            self.demotions -= 1
            self.demoting_bytes -= source.length
        doomed = operation in stock.doomed_moves
        stock.doomed_moves.discard(operation)
        if target.tier is Tier.SSD:
            self._regions.write_ended(target)
        if move.staged is not None:
            self._finish_staged(move, move.staged, outcome)
            return
        replaces = move.reason is CopyReason.RELOCATE
        saved = saved_bytes(source, target)
        useless = replaces and (source.state is not CopyState.READABLE or (saved and entry.leases))
        if outcome is CopyOutcome.OK and not doomed and not useless:
            target.on(CopyEvent.FILLED)
            if replaces:
                stock.replace_ssd_copy(entry, target)
            else:
                stock.add_copy(entry, target)
            stock.note(_DONE_NOTES[move.reason], "done", entry, target.tier)
            if saved:
                stock.note(NoteKind.STEPPED_DOWN, move.reason, payload_bytes=saved, tier=target.tier)
            if move.reason is CopyReason.DEMOTE:
                self._demoted(entry, source.length)
        else:
            self._given_up(entry)
            self._undo(move, outcome)
        if outcome is CopyOutcome.SOURCE_CORRUPT:
            stock.quarantine(entry, source, "checksum")
        elif outcome is CopyOutcome.SOURCE_FAILED:
            stock.quarantine(entry, source, "io_error")
        stock.unhold(entry, source)

    def _finish_staged(self, move: SsdMove, staged: StagedPut, outcome: CopyOutcome) -> None:
        if outcome is CopyOutcome.OK and not staged.doomed:
            move.target.on(CopyEvent.FILLED)
            staged.placed(move.target)
        else:
            self._undo(move, outcome)
            staged.failed(outcome)

    def _undo(self, move: SsdMove, outcome: CopyOutcome) -> None:
        stock, entry, target = self._stock, move.entry, move.target
        target.on(CopyEvent.FILL_FAILED)
        if outcome is not CopyOutcome.OK:
            stock.note(NoteKind.COPY_FAILED, outcome, entry, target.tier)
        if target.tier is Tier.SSD:
            record = record_of(entry, target)
            if move.erased is not None:
                self._writer.erase(self._regions[target.region], record, move.erased)
            else:
                self._regions.add_dead(record, region=target.region)
            if outcome is CopyOutcome.TARGET_FAILED:
                self._writer.pause()
                if move.reason is CopyReason.DEMOTE and entry.listed and entry.readable_host:
                    stock.want_demotion(entry)
        stock.give_back(entry.key_space, target)
