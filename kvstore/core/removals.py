"""Removals: delete (for ever, leases served to their end) and evict (forget what nobody uses)."""

from __future__ import annotations

from functools import partial

from kvstore.core.candidates import is_loose, suffixes_first
from kvstore.core.erasures import Erasures
from kvstore.core.events.notes import NoteKind
from kvstore.core.events.removals import AnswerDelete, AnswerEvict, DeleteRequested, EvictRequested
from kvstore.core.index import Entry
from kvstore.core.puts import Puts
from kvstore.core.stock import Stock
from kvstore.ids import RequestId
from kvstore.units import Bytes


class _Deletion:
    """One DeleteRequested until the last erasure that makes it last."""

    def __init__(self, request_id: RequestId, size: int) -> None:
        self.request_id = request_id
        self.deleted = [False] * size
        self.waiting = 1
        """Erasures under way, and one for the event still being handled."""


class Removals:
    def __init__(self, stock: Stock, puts: Puts, erasures: Erasures | None) -> None:
        self._stock = stock
        self._puts = puts
        self._erasures = erasures

    def delete(self, event: DeleteRequested) -> None:
        stock = self._stock
        deletion = _Deletion(event.request_id, len(event.hashes))
        for at, block in enumerate(event.hashes):
            entry = stock.index.get(event.key_space, block)
            if entry is not None:
                stock.note(NoteKind.DELETED, "delete", entry)
                stock.unlist(entry)
            withdrawn = self._puts.withdraw(event.key_space, block)
            deletion.deleted[at] = entry is not None or withdrawn
            if self._erasures is not None and self._erasures.erase(event.key_space, block, partial(self._erased, deletion, at)):
                deletion.waiting += 1
        self._done(deletion)

    def _erased(self, deletion: _Deletion, at: int, ok: bool) -> None:
        deletion.deleted[at] &= ok
        self._done(deletion)

    def _done(self, deletion: _Deletion) -> None:
        deletion.waiting -= 1
        if deletion.waiting == 0:
            self._stock.say(AnswerDelete(request_id=deletion.request_id, deleted=tuple(deletion.deleted)))

    def evict(self, event: EvictRequested) -> None:
        """Cost: O(n log n) for n copies in question."""
        stock = self._stock
        evicted = kept = evicted_bytes = 0
        for entry in suffixes_first(self._meant(event), stock.index):
            for tier in entry.tiers:
                copy = entry.copy_in(tier)
                size = 0 if copy is None else copy.length
                if is_loose(entry, tier) and not stock.pins.is_hard(entry):
                    stock.evict(entry, tier, "operator")
                    evicted += 1
                    evicted_bytes += size
                else:
                    kept += 1
        stock.say(
            AnswerEvict(request_id=event.request_id, evicted_copies=evicted, evicted_bytes=Bytes(evicted_bytes), leased_copies_kept=kept)
        )

    def _meant(self, event: EvictRequested) -> list[Entry]:
        index = self._stock.index
        if event.everything:
            return list(index)
        if event.namespace is not None:
            spaces = [key_space for key_space in index.key_spaces() if key_space.namespace == event.namespace]
            return [entry for key_space in spaces for entry in index.entries(key_space).values()]
        if event.key_space is None:
            return []
        entries = index.entries(event.key_space)
        if not event.hashes:
            return list(entries.values())
        return [entries[block] for block in dict.fromkeys(event.hashes) if block in entries]
