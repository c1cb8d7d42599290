"""Arena: hands out spans of one fixed piece of memory. Knows sizes and places only, never bytes."""

from __future__ import annotations

from kvstore.core.extent import ALIGNMENT, Extent, Tier, make_extent

_SPLIT_BITS = 4
"""16 size classes per power of two: a span taken from a larger class than needed wastes nothing, since the rest is split off."""


class Arena:
    """Two-level segregated fit with immediate coalescing, in pages of ALIGNMENT bytes.

    `allocate` fails only when no free span is long enough. Cost: O(1) apart from the last resort, a look through the one class whose
    spans may or may not be long enough.
    Source: Masmano et al., TLSF, ECRTS 2004; here the links are dicts.
    """

    def __init__(self, *, tier: Tier, capacity: int) -> None:
        self.tier = tier
        self._pages = capacity // ALIGNMENT
        self._used_pages = 0
        self._generation = 0
        self._starts = bytearray(-(-self._pages // 8))  # bit per page: a live extent starts there
        self._free_at: dict[int, int] = {}  # first page -> pages
        self._free_until: dict[int, int] = {}  # page after the last -> first page
        self._classes: dict[int, dict[int, None]] = {}  # size class -> first pages, oldest first
        self._filled = 0  # bit per size class that has a span
        if self._pages:
            self._put_free(0, self._pages)

    @property
    def capacity(self) -> int:
        return self._pages * ALIGNMENT

    @property
    def used(self) -> int:
        return self._used_pages * ALIGNMENT

    @property
    def largest_free(self) -> int:
        """Cost: O(spans in the largest class)."""
        if not self._filled:
            return 0
        return max(self._free_at[page] for page in self._classes[self._filled.bit_length() - 1]) * ALIGNMENT

    def allocate(self, length: int) -> Extent | None:
        """An extent for `length` bytes that no live extent overlaps, with a generation no extent had before; None when no free span is
        long enough."""
        pages = _pages_of(length)
        start = self._find(pages)
        if start is None:
            return None
        found = self._free_at[start]
        if found == pages:
            self._take_free(start)
        else:
            # From the span's end: its start, and nearly always its class, stay.
            left = found - pages
            if _class_of(left) == _class_of(found):
                self._free_at[start] = left
                del self._free_until[start + found]
                self._free_until[start + left] = start
            else:
                self._take_free(start)
                self._put_free(start, left)
            start += left
        self._generation = generation = self._generation + 1
        self._starts[start >> 3] |= 1 << (start & 7)
        self._used_pages += pages
        return make_extent((self.tier, 0, start * ALIGNMENT, length, generation))

    def free(self, *, offset: int, length: int) -> None:
        """Gives the extent back. Twice is a bug. (A copy gives its room back once, by the table of its life; so no generation is kept
        here for a second look: that took 50 bytes a block.)"""
        start, pages = offset // ALIGNMENT, _pages_of(length)
        assert self._starts[start >> 3] >> (start & 7) & 1, f"no live extent starts at {offset}"
        self._starts[start >> 3] ^= 1 << (start & 7)
        self._used_pages -= pages
        before = self._free_until.get(start)
        if before is not None:
            pages += self._free_at[before]
            self._take_free(before)
            start = before
        after = self._free_at.get(start + pages)
        if after is not None:
            self._take_free(start + pages)
            pages += after
        self._put_free(start, pages)

    def _find(self, pages: int) -> int | None:
        size_class = _class_of(pages)
        own = self._classes.get(size_class)
        if own:
            first = next(iter(own))
            if self._free_at[first] >= pages:
                return first
        larger = self._filled >> (size_class + 1) << (size_class + 1)
        if larger:
            return next(iter(self._classes[(larger & -larger).bit_length() - 1]))
        return next((start for start in own or () if self._free_at[start] >= pages), None)

    def _put_free(self, start: int, pages: int) -> None:
        self._free_at[start] = pages
        self._free_until[start + pages] = start
        size_class = _class_of(pages)
        members = self._classes.get(size_class)
        if members is None:
            members = self._classes[size_class] = {}
            self._filled |= 1 << size_class
        members[start] = None

    def _take_free(self, start: int) -> None:
        pages = self._free_at.pop(start)
        del self._free_until[start + pages]
        size_class = _class_of(pages)
        members = self._classes[size_class]
        del members[start]
        if not members:
            del self._classes[size_class]
            self._filled &= ~(1 << size_class)


def _pages_of(length: int) -> int:
    """An empty payload takes a page too: each extent has its own place."""
    return -(-length // ALIGNMENT) or 1


def _class_of(pages: int) -> int:
    """Grows with `pages`; exact below 2^(SPLIT_BITS + 1), then 2^SPLIT_BITS classes per power of two."""
    shift = pages.bit_length() - 1 - _SPLIT_BITS
    return (shift << _SPLIT_BITS) + (pages >> shift) if shift > 0 else pages
