"""The node's journal as streams: a snapshot of what is here, then every change; never a queue for a follower who is slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from kvpb.v1 import admin_pb2

from kvstore.clock import Clock
from kvstore.core.departures import Departures
from kvstore.core.events.notes import Note, NoteKind
from kvstore.core.journal import UNLISTING, Entry, Journal
from kvstore.core.store_state import StoreState
from kvstore.ids import BlockRef, BootId, Epoch, KeySpace
from kvstore.node.node import Node
from kvstore.node.walk import walk
from kvstore.rpc.convert import block_refs_to_proto, key_space_to_proto

JOURNAL_ENTRIES = 16_384
"""Some 5 MB; at 1,000 blocks a second a follower may be a quarter of a minute behind."""
DEPARTURES = 16_384
"""Some 4 MB."""
_PART = 512
"""Entries sent before others of the loop have their turn."""


class EventFeed:
    """`note` is called with the notes of each event of the core, as for the inventory."""

    def __init__(
        self, state: StoreState, *, node_id: str, boot_id: BootId, epoch: Callable[[], Epoch], clock: Clock, most: int = JOURNAL_ENTRIES
    ) -> None:
        self.journal = Journal(most=most)
        self.departures = Departures(most=DEPARTURES)
        self._clock = clock
        self._state = state
        self._node_id, self._boot_id, self._epoch = node_id, boot_id, epoch
        self._changed = asyncio.Event()

    def note(self, notes: Iterable[Note]) -> None:
        now = self._clock.now()
        for kind, reason, _, _, key_space, block in notes:
            if key_space is None or block is None:
                continue
            if kind is NoteKind.STORED:
                self.departures.back(key_space, block.hash)
            elif kind in UNLISTING and not self._state.holds(key_space, block.hash):
                self.departures.gone(key_space, block.hash, _reason(kind, reason), now)
            else:
                continue
            self.journal.add(kind, reason, key_space, block)
            self._changed.set()

    async def follow(self, node: Node, *, boot_id: bytes, after: int) -> AsyncGenerator[admin_pb2.BlockEvent, None]:
        """Without end. Goes on behind `after` of the boot named when it can; else with GAP (unless no boot is named), the snapshot as HELD,
        what changed meanwhile, and SNAPSHOT: with that the follower's picture is exact as of its sequence."""
        cursor = after
        if boot_id != self._boot_id or self.journal.after(after, most=1) is None:
            if boot_id:
                yield self._event(admin_pb2.BLOCK_EVENT_GAP, cursor)
            cursor = -1
        while True:
            if cursor < 0:
                cursor = self.journal.last
                async with aclosing(walk(node)) as blocks:
                    async for key_space, owned in blocks:
                        yield self._event(admin_pb2.BLOCK_EVENT_HELD, cursor, key_space, owned.block)
                snapshot_until = self.journal.last
            else:
                snapshot_until = -1
            while True:
                self._changed.clear()
                entries = self.journal.after(cursor, most=_PART)
                if entries is None:
                    yield self._event(admin_pb2.BLOCK_EVENT_GAP, cursor)
                    cursor = -1
                    break
                for entry in entries:
                    cursor = entry.sequence
                    yield self._of(entry)
                if 0 <= snapshot_until <= cursor:
                    yield self._event(admin_pb2.BLOCK_EVENT_SNAPSHOT, cursor)
                    snapshot_until = -1
                if cursor == self.journal.last:
                    await self._changed.wait()

    def _of(self, entry: Entry) -> admin_pb2.BlockEvent:
        kind = admin_pb2.BLOCK_EVENT_STORED if entry.kind is NoteKind.STORED else admin_pb2.BLOCK_EVENT_EVICTED
        event = self._event(kind, entry.sequence, entry.key_space, entry.block)
        event.reason = _reason(entry.kind, entry.reason)
        return event

    def _event(self, kind: int, sequence: int, key_space: KeySpace | None = None, block: BlockRef | None = None) -> admin_pb2.BlockEvent:
        event = admin_pb2.BlockEvent(kind=kind, node_id=self._node_id, boot_id=self._boot_id, epoch=self._epoch(), sequence=sequence)
        if key_space is not None and block is not None:
            event.key_space.CopyFrom(key_space_to_proto(key_space))
            event.block.CopyFrom(block_refs_to_proto([block])[0])
        return event


def _reason(kind: NoteKind, reason: str) -> str:
    """ "room", "operator", ... of an eviction; "deleted", "expired", "quarantined" of what it says itself."""
    return reason if kind in (NoteKind.STORED, NoteKind.EVICTED) else kind.value
