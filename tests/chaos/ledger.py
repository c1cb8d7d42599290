"""What was put, what of it was acknowledged, and what each block must read as. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvstore.client import PutOutcome
from kvstore.core.placement import place
from kvstore.core.view import View
from kvstore.ids import BlockHash, BlockRef, KeySpace, LayoutFingerprint, Namespace, NodeId, StripeId

KEY_SPACE = KeySpace(Namespace("chaos"), LayoutFingerprint(hashlib.sha256(b"chaos").digest()))
STRIPE_BLOCKS = 8
REPLICAS = 2


def payload_of(ref: BlockRef) -> bytes:
    """The oracle: 4 to 36 KiB, by the block's hash alone."""
    return hashlib.shake_256(ref.hash).digest(4096 + int.from_bytes(ref.hash[:2], "little") // 2)


@dataclass(slots=True)
class Chain:
    refs: tuple[BlockRef, ...]
    holders: dict[int, frozenset[NodeId]]
    """By the index of an acknowledged block: stores that hold it, by the client's word or, since all was whole, by our own look."""

    @property
    def run(self) -> int:
        """Leading blocks that are acknowledged: as many must be found."""
        return next((index for index in range(len(self.refs)) if index not in self.holders), len(self.refs))


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
        self.chains[number] = Chain(tuple(refs), {})
        return number

    def retire(self) -> list[Chain]:
        retired = list(self.chains)[: max(0, len(self.chains) - self._most)]
        return [self.chains.pop(number) for number in retired]

    def put(self, number: int, outcomes: Sequence[PutOutcome], *, view: View, lost: AbstractSet[NodeId], whole: View) -> int:
        """How many blocks are acknowledged anew. DEGRADED is honest, and no promise. `view`: that under which they were put; `lost`: stores
        that may have lost what they had acknowledged; `whole`: as in `forget_lost`."""
        chain = self.chains.get(number)
        if chain is None:
            return 0
        before = len(chain.holders)
        for index, outcome in enumerate(outcomes):
            if outcome in (PutOutcome.STORED, PutOutcome.EXISTS):
                stripe = chain.refs[index].stripe
                holders = (owners_of(stripe, view) | chain.holders.get(index, frozenset())) - lost
                if holders and not owners_of(stripe, whole) <= lost:
                    chain.holders[index] = holders
        return len(chain.holders) - before

    def promised(self) -> list[BlockRef]:
        return [chain.refs[index] for chain in self.chains.values() for index in sorted(chain.holders)]

    def forget_lost(self, lost: AbstractSet[NodeId], whole: View) -> int:
        """How many blocks may be gone now that these stores have lost what they had: those of which no other store is known to hold one,
        and those of which no other store is an owner in `whole`, the last view in which everything was in its place. (An owner there is
        an owner while any of the others are away, and keeps what it has; who is none may give it up for one that is struck.)"""
        gone = 0
        for chain in self.chains.values():
            for index, holders in list(chain.holders.items()):
                if may_be_missing(chain.refs[index].stripe, holders, lost, whole):
                    del chain.holders[index]
                    gone += 1
        return gone

    def settle(self, view: View) -> None:
        """Every promised block lies with its owners in this view: somebody has looked."""
        for chain in self.chains.values():
            for index in chain.holders:
                chain.holders[index] = owners_of(chain.refs[index].stripe, view)


def owners_of(stripe: StripeId, view: View) -> frozenset[NodeId]:
    return frozenset(place(stripe, view, replicas=REPLICAS))


def may_be_missing(stripe: StripeId, holders: AbstractSet[NodeId], gone: AbstractSet[NodeId], whole: View) -> bool:
    """Whether nobody who has the block for certain is left when these stores are away, or have lost what they had."""
    return holders <= gone or owners_of(stripe, whole) <= gone
