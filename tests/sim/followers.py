"""Who knows of a node's blocks by its notes alone: the catalog that repair goes by, and whoever follows its events."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore.core.events.notes import Note, NoteKind
from kvstore.core.store_state import StoreState
from kvstore.core.upkeep.inventory import Inventory
from kvstore.ids import BlockHash, BootId, Epoch, KeySpace
from kvstore.node.event_feed import EventFeed
from kvstore.units import Nanos


class _Clock:
    def __init__(self, now: Callable[[], Nanos]) -> None:
        self.now = now


class Followers:
    def __init__(self, state: StoreState, *, boot_id: BootId, now: Callable[[], Nanos]) -> None:
        self._state = state
        self._inventory = Inventory(state)
        self._feed = EventFeed(state, node_id="s", boot_id=boot_id, epoch=lambda: Epoch(1), clock=_Clock(now))
        self._picture: set[tuple[KeySpace, BlockHash]] = set()
        self._seen = 0

    def begin(self) -> None:
        """With a snapshot of what a restart found."""
        for entry in self._state._stock.index:
            self._picture.add((entry.key_space, entry.hash))
            self._inventory.catalog.add(entry.key_space, entry.stripe, entry.hash, entry.length)

    def note(self, notes: Iterable[Note]) -> None:
        """All of one event."""
        notes = list(notes)
        self._inventory.note(notes)
        self._feed.note(notes)

    def check(self) -> None:
        for entry in self._feed.journal.after(self._seen, most=1 << 20) or ():
            self._seen = entry.sequence
            change = self._picture.add if entry.kind is NoteKind.STORED else self._picture.discard
            change((entry.key_space, entry.block.hash))
        listed = {(entry.key_space, entry.hash) for entry in self._state._stock.index}
        assert self._picture == listed, "a follower of the events knows of other blocks than are here"
        catalog = {(stripe.key_space, block) for stripe in self._inventory.catalog for block in stripe.blocks}
        assert catalog == listed, "the catalog is not what is here"
