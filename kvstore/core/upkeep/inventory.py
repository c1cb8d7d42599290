"""The catalog of a node, kept in step with its core by the notes on single blocks."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable

from kvstore.core.catalog import Catalog
from kvstore.core.events.notes import Note, NoteKind
from kvstore.core.events.questions import OwnedBlock
from kvstore.core.store_state import StoreState
from kvstore.ids import KeySpace

_MAY_UNLIST = frozenset({NoteKind.EVICTED, NoteKind.DELETED, NoteKind.QUARANTINED, NoteKind.EXPIRED})


class Inventory:
    """A note is about one copy; whether the block is still here is the core's to say, after the event that the note belongs to."""

    def __init__(self, state: StoreState) -> None:
        self.catalog = Catalog()
        self._state = state

    def note(self, notes: Iterable[Note]) -> None:
        """All of one event, before the next is handled."""
        for kind, _, _, payload_bytes, key_space, block in notes:
            if key_space is None or block is None:
                continue
            if kind is NoteKind.STORED:
                self.catalog.add(key_space, block.stripe, block.hash, payload_bytes)
            elif kind in _MAY_UNLIST and not self._state.holds(key_space, block.hash):
                self.catalog.remove(block.stripe, block.hash)

    async def fill(self, blocks: AsyncIterable[tuple[KeySpace, OwnedBlock]]) -> None:
        """With a walk through what a restart found. Before the node serves."""
        async for key_space, owned in blocks:
            if self._state.holds(key_space, owned.block.hash):  # it may have gone since the walk saw it
                self.catalog.add(key_space, owned.block.stripe, owned.block.hash, owned.payload_bytes)
