"""What the clients of a simulated cluster have written and been promised: the truth that nodes and clients are held against."""

from __future__ import annotations

import hashlib

from sim.media import checksum_of

from kvstore.ids import BlockHash, BlockRef, KeySpace, NodeId

Key = tuple[KeySpace, BlockHash]


class ByteOracle:
    """Payloads are a function of key and variant: whoever has a payload can tell whether it is right."""

    VARIANTS = 2
    """As from writers with different codecs: replicas of one block may differ, and all are right."""

    def __init__(self) -> None:
        self.written: dict[Key, set[int]] = {}
        """Checksums that some writer announced, by key."""
        self.stepped_from: dict[int, int] = {}
        """Checksum of everything that some node has stepped down -> of what was put."""
        self.acknowledged: dict[Key, frozenset[NodeId]] = {}
        """Blocks whose last put was acknowledged as stored on as many replicas as asked -> the replicas that said so."""

    @staticmethod
    def length(block: BlockRef) -> int:
        return 1 + block.hash[0] * 48

    def payload(self, key_space: KeySpace, block: BlockRef, variant: int) -> bytes:
        seed = hashlib.sha256(key_space.namespace.encode() + block.hash + bytes([variant])).digest()
        return (seed * 400)[: self.length(block)]

    def announced(self, key_space: KeySpace, block: BlockRef, checksum: int) -> None:
        """Called before the first byte leaves the writer."""
        self.written.setdefault((key_space, block.hash), set()).add(checksum)

    def check_read(self, key_space: KeySpace, block: BlockRef, payload: bytes, *, as_sealed: bool) -> None:
        """What a client is about to hand to its user."""
        checksum, written = checksum_of(payload), self.written.get((key_space, block.hash), ())
        right = checksum in written or (not as_sealed and self.stepped_from.get(checksum) in written)
        assert right, "wrong bytes reached a reader"
