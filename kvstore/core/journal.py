"""What has come to a node and gone from it, in order: the latest, so that a follower knows all of it or that it does not. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.core.events.notes import NoteKind
from kvstore.ids import BlockRef, KeySpace

UNLISTING = frozenset({NoteKind.EVICTED, NoteKind.DELETED, NoteKind.QUARANTINED, NoteKind.EXPIRED})
"""Kinds with which the last copy of a block may go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    sequence: int
    """From 1 in every boot, without a hole."""
    kind: NoteKind
    """STORED, or one of UNLISTING: no copy is left here."""
    reason: str
    key_space: KeySpace
    block: BlockRef


class Journal:
    """The last `most` entries: some 300 bytes each."""

    def __init__(self, *, most: int) -> None:
        assert most >= 1, most
        self._entries: deque[Entry] = deque(maxlen=most)
        self.last = 0
        """Sequence of the latest; 0: none yet."""

    def add(self, kind: NoteKind, reason: str, key_space: KeySpace, block: BlockRef) -> None:
        self.last += 1
        self._entries.append(Entry(sequence=self.last, kind=kind, reason=reason, key_space=key_space, block=block))

    def after(self, sequence: int, *, most: int) -> Sequence[Entry] | None:
        """The next ones, at most so many. None: some of them are forgotten, or were never here. Cost: O(their number + 64)."""
        first = self.last - len(self._entries) + 1
        if not first - 1 <= sequence <= self.last:
            return None
        start = sequence - first + 1
        return [self._entries[number] for number in range(start, min(start + most, len(self._entries)))]
