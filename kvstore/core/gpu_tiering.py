"""GPU tiering: copies of the hottest host blocks on the device, and the way back of a block that is on the device alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.core.copies import Copy, CopyEvent, CopyState
from kvstore.core.events.moves import CopyExtent, CopyOutcome, CopyReason
from kvstore.core.events.notes import NoteKind
from kvstore.core.extent import Extent, Tier
from kvstore.core.index import Entry
from kvstore.core.room import Room
from kvstore.core.staged_put import StagedPut
from kvstore.core.stock import Stock
from kvstore.core.store_config import GpuConfig
from kvstore.ids import OperationId

_MOST_WANTED = 1024
"""Blocks that wait for their promotion; of more, those leased last are not promoted this time."""


@dataclass(slots=True, kw_only=True)
class _Move:
    entry: Entry
    source: Copy
    target: Copy
    staged: StagedPut | None = None
    """The put whose block will be listed."""


class GpuTiering:
    """Promotes a host block (on a node without a host tier: an SSD block) that was leased often enough. Room is taken from copies that
    another tier has too; when there are none, the coldest block that the device has alone is copied back to the host tier, if that costs
    no block there its last copy, and forgotten if not. On a node without a host tier and without an SSD puts come here. All work is
    started by `pump`, within bounds."""

    def __init__(self, stock: Stock, room: Room, config: GpuConfig) -> None:
        self._stock = stock
        self._room = room
        self._config = config
        self._wanted: dict[Entry, None] = {}
        self._moves: dict[OperationId, _Move] = {}

    def used(self, entries: Iterable[Entry]) -> None:
        """The blocks were leased just now."""
        for entry in entries:
            if entry.gpu is None and len(self._wanted) < _MOST_WANTED and self._stock.admission.promotes(entry):
                self._wanted[entry] = None

    def place(self, staged: StagedPut) -> bool:
        """Copies a put to the device that has no other tier to go to, by eviction of the coldest if need be. False: not now."""
        entry = staged.entry
        if len(self._moves) >= self._config.max_moves:
            return False
        extent = self._room.on_gpu(staged.source.length, entry.key_space.namespace)
        if extent is None:
            return False
        staged.starts()
        self._start(entry, staged.source, extent, CopyReason.PLACE, staged)
        return True

    def pump(self) -> None:
        """Starts what may start now."""
        while self._wanted and len(self._moves) < self._config.max_moves:
            entry = next(iter(self._wanted))
            source = self._source(entry)
            if source is not None and self._worth_promoting(entry, source.length):
                extent = self._room.spare_on_gpu(source.length)
                if extent is None:
                    if self._make_room():
                        continue
                    return
                self._start(entry, source, extent, CopyReason.PROMOTE)
            del self._wanted[entry]

    def _source(self, entry: Entry) -> Copy | None:
        copy = entry.host if self._stock.config.has_host else entry.ssd
        return copy if copy is not None and copy.state is CopyState.READABLE else None

    def _worth_promoting(self, entry: Entry, length: int) -> bool:
        stock = self._stock
        return (
            entry.listed
            and entry.gpu is None
            and entry.move is None
            and length <= stock.gpu_arena.capacity
            and not stock.quota.missing(entry.key_space.namespace, length)
        )

    def _make_room(self) -> bool:
        """True: something was evicted. False: what could go is on its way to the host tier, or nothing can go."""
        stock = self._stock
        entry = stock.candidates.last_gpu_copies.take()
        if entry is None:
            if not self._moves:
                self._wanted.clear()  # every copy here is leased
            return False
        extent = None
        returns = stock.config.has_host and entry.move is None and entry.host is None
        assert entry.gpu is not None
        length = entry.gpu.length
        if returns and not stock.quota.missing(entry.key_space.namespace, length):
            extent = self._room.spare_in_host(length, entry.key_space.namespace)
        if extent is None:
            stock.evict(entry, Tier.GPU, "room")
            return True
        self._start(entry, entry.gpu, extent, CopyReason.DEMOTE)
        return False

    def _start(self, entry: Entry, source: Copy, extent: Extent, reason: CopyReason, staged: StagedPut | None = None) -> None:
        stock = self._stock
        if staged is None:
            source.hold()
        target = stock.take_room(entry.key_space, extent, CopyState.WRITING, checksum=source.checksum, rung=source.rung)
        operation = stock.moves.start(lambda outcome: self._finish(operation, outcome))
        self._moves[operation] = _Move(entry=entry, source=source, target=target, staged=staged)
        entry.move = operation
        stock.say(CopyExtent(operation=operation, reason=reason, source=source.extent, target=extent, checksum=source.checksum, header=b""))

    def _finish(self, operation: OperationId, outcome: CopyOutcome) -> None:
        stock, move = self._stock, self._moves.pop(operation)
        entry, source, target = move.entry, move.source, move.target
        entry.move = None
        doomed = operation in stock.doomed_moves
        stock.doomed_moves.discard(operation)
        if move.staged is not None:
            self._finish_staged(move, move.staged, outcome)
            return
        if outcome is CopyOutcome.OK and not doomed:
            target.on(CopyEvent.FILLED)
            stock.add_copy(entry, target)
            stock.note(NoteKind.PROMOTED if target.tier is Tier.GPU else NoteKind.DEMOTED, "done", entry, target.tier)
        else:
            self._undo(move, outcome)
        if outcome is CopyOutcome.SOURCE_CORRUPT:
            stock.quarantine(entry, source, "checksum")
        elif outcome is CopyOutcome.SOURCE_FAILED:
            stock.quarantine(entry, source, "io_error")
        elif entry.listed and entry.readable_host and not entry.readable_ssd:
            stock.want_demotion(entry)  # its turn may have come while this move was under way
        stock.unhold(entry, source)

    def _finish_staged(self, move: _Move, staged: StagedPut, outcome: CopyOutcome) -> None:
        if outcome is CopyOutcome.OK and not staged.doomed:
            move.target.on(CopyEvent.FILLED)
            staged.placed(move.target)
        else:
            self._undo(move, outcome)
            staged.failed(outcome)

    def _undo(self, move: _Move, outcome: CopyOutcome) -> None:
        move.target.on(CopyEvent.FILL_FAILED)
        if outcome is not CopyOutcome.OK:
            self._stock.note(NoteKind.COPY_FAILED, outcome, move.entry, move.target.tier)
        self._stock.give_back(move.entry.key_space, move.target)
