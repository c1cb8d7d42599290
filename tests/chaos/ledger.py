"""What was put, what of it was acknowledged, and what each block must read as. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.client import PutOutcome
from kvstore.ids import BlockHash, BlockRef, KeySpace, LayoutFingerprint, Namespace, StripeId

KEY_SPACE = KeySpace(Namespace("chaos"), LayoutFingerprint(hashlib.sha256(b"chaos").digest()))
STRIPE_BLOCKS = 8


def payload_of(ref: BlockRef) -> bytes:
    """The oracle: 4 to 36 KiB, by the block's hash alone."""
    return hashlib.shake_256(ref.hash).digest(4096 + int.from_bytes(ref.hash[:2], "little") // 2)


@dataclass(slots=True)
class Chain:
    refs: tuple[BlockRef, ...]
    acknowledged: set[int]
    """Indices of blocks that at least a quorum of their replicas holds, by the client's word."""

    @property
    def run(self) -> int:
        """Leading blocks that are acknowledged: as many must be found."""
        return next((index for index in range(len(self.refs)) if index not in self.acknowledged), len(self.refs))


class Ledger:
    """The chains in play, oldest first; above `most` the oldest is retired and may be forgotten by the store."""

    def __init__(self, *, seed: int, most: int) -> None:
        self._seed, self._most = seed, most
        self._made = 0
        self.chains: dict[int, Chain] = {}

    def make(self, blocks: int) -> int:
        """The number of a new chain."""
        number, self._made = self._made, self._made + 1
        hashes = [BlockHash(hashlib.sha256(f"{self._seed}/{number}/{index}".encode()).digest()) for index in range(blocks)]
        root = BlockHash(hashlib.sha256(f"{self._seed}/{number}".encode()).digest())
        refs = [
            BlockRef(own, hashes[index - 1] if index else root, StripeId(hashes[index - index % STRIPE_BLOCKS]), index)
            for index, own in enumerate(hashes)
        ]
        self.chains[number] = Chain(tuple(refs), set())
        return number

    def retire(self) -> list[Chain]:
        retired = list(self.chains)[: max(0, len(self.chains) - self._most)]
        return [self.chains.pop(number) for number in retired]

    def put(self, number: int, outcomes: Sequence[PutOutcome]) -> int:
        """How many blocks are acknowledged anew. DEGRADED is honest, and no promise."""
        chain = self.chains.get(number)
        if chain is None:
            return 0
        kept = {index for index, outcome in enumerate(outcomes) if outcome in (PutOutcome.STORED, PutOutcome.EXISTS)}
        new = len(kept - chain.acknowledged)
        chain.acknowledged |= kept
        return new

    def promised(self) -> list[BlockRef]:
        return [chain.refs[index] for chain in self.chains.values() for index in sorted(chain.acknowledged)]

    def excuse(self) -> None:
        """As many nodes as there are replicas were lost at once: nothing put so far is promised any more."""
        for chain in self.chains.values():
            chain.acknowledged.clear()
