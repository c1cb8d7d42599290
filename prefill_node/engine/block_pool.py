"""Who holds which block of the device pool. Pure: it hands out numbers, the tensor is elsewhere.

A block is *free* (no meaning), *held* (referenced by sequences or loaders), or *kept* (sealed, referenced by nobody, listed by its
chain hash for local hits, reused when nothing is free).

    free --take--> held --release, sealed and listed--> kept --match--> held
                   held --release, otherwise---------> free
                   kept --take, oldest release first--> held
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from kvstore.ids import BlockHash, BlockRef


class BlockPool:
    """Not thread-safe: the engine guards it with its lock."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = deque(range(total))
        self._references = [0] * total
        self._by_hash: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._recoded: set[int] = set()

    @property
    def available(self) -> int:
        """Blocks that `take` could hand out now."""
        return len(self._free) + len(self._kept)

    @property
    def held(self) -> int:
        return self.total - self.available

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None and nothing changed. Kept blocks go only when nothing is free."""
        if count > self.available:
            return None
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._kept.popitem(last=False)
            self._unlist(block)
        self._references[block] = 1
        return block

    def _unlist(self, block: int) -> None:
        del self._by_hash[self._hash_of.pop(block)]
        self._recoded.discard(block)

    def list_sealed(self, block: int, ref: BlockRef, *, recoded: bool = False) -> None:
        """The held `block` now has the canonical KV of `ref`, or with `recoded` other numbers for it: it was stepped down, or computed
        behind such a block. When another block already is listed for it, that one stays listed."""
        assert self._references[block] > 0
        if ref.hash not in self._by_hash and block not in self._hash_of:
            self._by_hash[ref.hash] = block
            self._hash_of[block] = ref.hash
            if recoded:
                self._recoded.add(block)

    def is_recoded(self, block: int) -> bool:
        return block in self._recoded

    def match(self, chain: Iterable[BlockRef], *, as_sealed: bool = False) -> list[int]:
        """One more reference on each block of the longest leading run of `chain` that is in the pool; with `as_sealed`, that is there with
        its canonical numbers."""
        found = []
        for ref in chain:
            block = self._by_hash.get(ref.hash)
            if block is None or (as_sealed and block in self._recoded):
                break
            if self._references[block] == 0:
                del self._kept[block]
            self._references[block] += 1
            found.append(block)
        return found

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each of these blocks of one sequence, in chain order.

        Released from the end: so the last blocks of a chain are reused first, and no listed block loses its predecessor before
        itself (a prefix without its head is worthless).
        """
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released more often than referenced"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def forget(self) -> int:
        """Unlist every kept block. Returns how many."""
        count = len(self._kept)
        for block in self._kept:
            self._unlist(block)
            self._free.append(block)
        self._kept.clear()
        return count

    def references(self, block: int) -> int:
        return self._references[block]
