"""Catalog: what a node holds, stripe by stripe: the unit of placement, of repair, and of comparing replicas.

Kept in step with the index by what happens to single blocks, so nobody has to walk a whole index to plan a repair: some 40 bytes a block.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.ids import BlockHash, KeySpace, StripeId

BUCKETS = 256
"""By the first byte of the stripe id, a hash: all are about as full."""


class Stripe:
    """The blocks of one stripe that are here. Mutable; owned by the catalog."""

    __slots__ = ("blocks", "bytes", "digest", "key_space", "stripe")

    def __init__(self, stripe: StripeId, key_space: KeySpace) -> None:
        self.stripe = stripe
        self.key_space = key_space
        self.blocks: list[BlockHash] = []
        self.bytes = 0
        """Payload bytes, as the blocks came."""
        self.digest = 0
        """Of which blocks are here, whatever their order: 64 bits."""


class Catalog:
    """Cost of a change: O(blocks of its stripe)."""

    def __init__(self) -> None:
        self._buckets: list[dict[StripeId, Stripe]] = [{} for _ in range(BUCKETS)]
        self.blocks = 0
        self.bytes = 0

    def add(self, key_space: KeySpace, stripe: StripeId, block: BlockHash, length: int) -> None:
        """Adding what is here already changes nothing."""
        bucket = self._buckets[bucket_of(stripe)]
        found = bucket.get(stripe)
        if found is None:
            found = bucket[stripe] = Stripe(stripe, key_space)
        elif block in found.blocks:
            return
        found.blocks.append(block)
        found.bytes += length
        found.digest ^= digest_of(block)
        self.blocks += 1
        self.bytes += length

    def key_spaces(self) -> set[KeySpace]:
        """Of which anything is here. Cost: O(stripes)."""
        return {stripe.key_space for bucket in self._buckets for stripe in bucket.values()}

    def remove(self, stripe: StripeId, block: BlockHash) -> None:
        """Removing what is not here changes nothing. The bytes are an average over the stripe: copies of a block may differ in length."""
        bucket = self._buckets[bucket_of(stripe)]
        found = bucket.get(stripe)
        if found is None or block not in found.blocks:
            return
        length = found.bytes // len(found.blocks)
        found.blocks.remove(block)
        found.bytes -= length
        found.digest ^= digest_of(block)
        self.blocks -= 1
        self.bytes -= length
        if not found.blocks:
            del bucket[stripe]

    def get(self, stripe: StripeId) -> Stripe | None:
        return self._buckets[bucket_of(stripe)].get(stripe)

    def stripes(self, bucket: int) -> tuple[Stripe, ...]:
        """Those of one bucket now; the catalog may change while the caller goes through them."""
        return tuple(self._buckets[bucket].values())

    def filled(self, first: int, count: int) -> list[int]:
        """Which of these buckets have anything in them now."""
        return [bucket for bucket in range(first, first + count) if self._buckets[bucket]]

    def __iter__(self) -> Iterator[Stripe]:
        """Bucket by bucket, each as it is when its turn comes: fit for a walk with pauses."""
        for bucket in range(BUCKETS):
            yield from self.stripes(bucket)


def bucket_of(stripe: StripeId) -> int:
    return stripe[0]


def digest_of(block: BlockHash) -> int:
    """Block hashes are hashes already: 64 of their bits tell them apart as well as a hash of them would. What the bytes of a copy are is
    not part of it: each node compares its own with their checksum, and two replicas could not say which is right."""
    return int.from_bytes(block[:8], "little")
