"""Ghost list: which blocks were evicted lately. Remembers a fingerprint of each, no more."""

from __future__ import annotations

from array import array

from kvstore.ids import BlockHash

_WAYS = 4
_FIRST_BUCKETS = 16
_MASK = (1 << 32) - 1


class GhostList:
    """A lossy table of 32-bit fingerprints: buckets of four, of which the oldest makes room.

    16 to 32 bytes a block instead of the 100 and more of an ordered dict. With n blocks remembered, one of 2^32 / n strangers is taken
    for one of them, which costs a little hit rate and nothing else.

    Cost: O(1) each; growing is O(slots).
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * _WAYS * _FIRST_BUCKETS))  # fingerprint << 32 | when; 0: empty
        self._buckets = _FIRST_BUCKETS
        self._when = 0

    def remember(self, block: BlockHash, *, limit: int) -> None:
        """`limit`: how many later ones it will outlive at least, about."""
        while limit > self._buckets * _WAYS // 2:
            self._grow()
        self._when = (self._when + 1) & _MASK
        fingerprint = _fingerprint(block)
        self._put(fingerprint, self._when)

    def recall(self, block: BlockHash, *, limit: int) -> bool:
        """Whether the block is among the last `limit` remembered; it is not from now on."""
        if not self._when:
            return False
        fingerprint = _fingerprint(block)
        first = (fingerprint & (self._buckets - 1)) * _WAYS
        slots = self._slots
        for at in range(first, first + _WAYS):
            slot = slots[at]
            if slot >> 32 == fingerprint and slot:
                slots[at] = 0
                return (self._when - slot & _MASK) < limit
        return False

    def _put(self, fingerprint: int, when: int) -> None:
        first = (fingerprint & (self._buckets - 1)) * _WAYS
        slots = self._slots
        oldest, oldest_age = first, -1
        for at in range(first, first + _WAYS):
            slot = slots[at]
            if not slot or slot >> 32 == fingerprint:
                oldest = at
                break
            age = self._when - slot & _MASK
            if age > oldest_age:
                oldest, oldest_age = at, age
        slots[oldest] = fingerprint << 32 | when

    def _grow(self) -> None:
        old = self._slots
        self._buckets *= 2
        self._slots = array("Q", bytes(8 * _WAYS * self._buckets))
        for slot in old:
            if slot:
                self._put(slot >> 32, slot & _MASK)


def _fingerprint(block: BlockHash) -> int:
    return int.from_bytes(block[:4], "little")
