"""What a follower of a node's events knows of it, and whether that is exact. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvstore.ids import BlockHash, BlockRef, BootId, Epoch, KeySpace, NodeId


class BlockEventKind(IntEnum):
    """As in admin.proto."""

    HELD = 1
    SNAPSHOT = 2
    STORED = 3
    EVICTED = 4
    GAP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvent:
    kind: BlockEventKind
    node_id: NodeId
    boot_id: BootId
    epoch: Epoch
    sequence: int
    key_space: KeySpace | None = None
    """With the block: of HELD, STORED and EVICTED."""
    block: BlockRef | None = None
    reason: str = ""
    """Why it went."""


class Picture:
    """The blocks of one node, as its events tell of them."""

    def __init__(self) -> None:
        self.blocks: set[tuple[KeySpace, BlockHash]] = set()
        self.exact = False
        """Whether `blocks` is what the node held as of the last event. False while a snapshot comes, and after anything was missed."""
        self.boot_id: BootId | None = None
        self.sequence = 0

    def see(self, event: BlockEvent) -> None:
        """In the order sent. A hole in the sequence or another boot, which the stream itself never has without a GAP, makes it inexact."""
        changes = event.kind in (BlockEventKind.STORED, BlockEventKind.EVICTED)
        if event.kind is BlockEventKind.GAP or (self.boot_id is not None and event.boot_id != self.boot_id):
            self.exact = False
            self.blocks.clear()
        elif changes and self.exact and event.sequence != self.sequence + 1:
            self.exact = False
        self.boot_id, self.sequence = event.boot_id, event.sequence
        if event.kind is BlockEventKind.SNAPSHOT:
            self.exact = True
        elif event.block is not None:
            assert event.key_space is not None
            held = (event.key_space, event.block.hash)
            if event.kind is BlockEventKind.EVICTED:
                self.blocks.discard(held)
            else:
                self.blocks.add(held)
