"""The catalog of a node, kept in step with its core by the notes on single blocks."""

from __future__ import annotations

from collections.abc import AsyncIterable

from kvstore.core.catalog import Catalog
from kvstore.core.events import Note, NoteKind, OwnedBlock
from kvstore.core.store_state import StoreState
from kvstore.ids import KeySpace

_MAY_UNLIST = frozenset({NoteKind.EVICTED, NoteKind.DELETED, NoteKind.QUARANTINED, NoteKind.EXPIRED})


class Inventory:
    """A note is about one copy; whether the block is still here is the core's to say, after the event that the note belongs to."""

    def __init__(self, state: StoreState) -> None:
        self.catalog = Catalog()
        self._state = state

    def note(self, note: Note) -> None:
        if note.key_space is None or note.block is None:
            return
        if note.kind is NoteKind.STORED:
            self.catalog.add(note.key_space, note.block.stripe, note.block.hash, note.payload_bytes)
        elif note.kind in _MAY_UNLIST and not self._state.holds(note.key_space, note.block.hash):
            self.catalog.remove(note.block.stripe, note.block.hash)

    async def fill(self, blocks: AsyncIterable[tuple[KeySpace, OwnedBlock]]) -> None:
        """With a walk through what a restart found. Before the node serves."""
        async for key_space, owned in blocks:
            if self._state.holds(key_space, owned.block.hash):  # it may have gone since the walk saw it
                self.catalog.add(key_space, owned.block.stripe, owned.block.hash, owned.payload_bytes)
