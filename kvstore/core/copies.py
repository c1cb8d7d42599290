"""Copy: one block's bytes in one tier of this node, and the table of its life."""

from __future__ import annotations

from enum import IntEnum, auto
from struct import Struct

from kvstore.core.extent import ALIGNMENT, Extent, Tier, make_extent
from kvstore.ids import AS_SEALED, Generation, RungCode


class CopyState(IntEnum):
    RESERVED = auto()
    """Has room; a writer may be filling it."""
    VERIFYING = auto()
    """Commit asked for; the bytes are being compared with the announced checksum and, without a host tier, copied to another."""
    WRITING = auto()
    """Being filled from another tier of this node."""
    READABLE = auto()
    RECLAIMING = auto()
    """Unlisted; its room is freed when the last reader is gone. Until then leases it has still read it."""
    QUARANTINED = auto()
    """Found bad: nobody reads it any more; its room is freed when the last hold is gone."""
    FREE = auto()


class CopyEvent(IntEnum):
    COMMIT_ASKED = auto()
    VERIFIED = auto()
    PLACED = auto()
    """Another tier has the bytes: the copy was staging alone."""
    REFUSED = auto()
    """Expired, incomplete, bad checksum, or deleted before it was ready."""
    FILLED = auto()
    FILL_FAILED = auto()
    UNLISTED = auto()
    FOUND_BAD = auto()
    LAST_HOLD_GONE = auto()


TRANSITIONS: dict[tuple[CopyState, CopyEvent], CopyState] = {
    (CopyState.RESERVED, CopyEvent.COMMIT_ASKED): CopyState.VERIFYING,
    (CopyState.RESERVED, CopyEvent.REFUSED): CopyState.FREE,
    (CopyState.VERIFYING, CopyEvent.VERIFIED): CopyState.READABLE,
    (CopyState.VERIFYING, CopyEvent.PLACED): CopyState.FREE,
    (CopyState.VERIFYING, CopyEvent.REFUSED): CopyState.FREE,
    (CopyState.WRITING, CopyEvent.FILLED): CopyState.READABLE,
    (CopyState.WRITING, CopyEvent.FILL_FAILED): CopyState.FREE,
    (CopyState.READABLE, CopyEvent.UNLISTED): CopyState.RECLAIMING,
    (CopyState.READABLE, CopyEvent.FOUND_BAD): CopyState.QUARANTINED,
    (CopyState.RECLAIMING, CopyEvent.FOUND_BAD): CopyState.QUARANTINED,
    (CopyState.RECLAIMING, CopyEvent.LAST_HOLD_GONE): CopyState.FREE,
    (CopyState.QUARANTINED, CopyEvent.LAST_HOLD_GONE): CopyState.FREE,
}
"""A pair without a row is a bug."""


_FACTS = Struct("<IIQQH")  # page, length, generation, checksum, rung


class Copy:
    """Mutable; owned by the store state. There is one per copy, so the numbers that seldom change are packed: an int object takes 32
    bytes, a packed one 4 or 8 (kvstore/core/LOG.md). The copies of one block may differ in length, checksum and rung: one on
    the SSD may have been stepped down."""

    __slots__ = ("holds", "packed", "state")

    tier: Tier
    region: int

    def __init__(self, extent: Extent, state: CopyState, *, checksum: int = 0, rung: RungCode = AS_SEALED) -> None:
        _, _, offset, length, generation = extent
        self.packed = _FACTS.pack(offset // ALIGNMENT, length, generation, checksum, rung)
        """_FACTS, and after it what a subclass keeps there."""
        self.state = state
        self.holds = 0
        """I/O operations in flight that read it (reads, verifications, copies out of it). While above 0 its bytes stay."""

    @property
    def extent(self) -> Extent:
        page, length, generation, _, _ = _FACTS.unpack_from(self.packed)
        return make_extent((self.tier, self.region, page * ALIGNMENT, length, generation))

    @property
    def offset(self) -> int:
        return int(_FACTS.unpack_from(self.packed)[0] * ALIGNMENT)

    @property
    def length(self) -> int:
        return int(_FACTS.unpack_from(self.packed)[1])

    @property
    def generation(self) -> Generation:
        return Generation(_FACTS.unpack_from(self.packed)[2])

    @property
    def checksum(self) -> int:
        return int(_FACTS.unpack_from(self.packed)[3])

    @property
    def rung(self) -> RungCode:
        return RungCode(_FACTS.unpack_from(self.packed)[4])

    def stamp(self, *, checksum: int, rung: RungCode) -> None:
        """What its bytes are is known now."""
        page, length, generation, _, _ = _FACTS.unpack_from(self.packed)
        self.packed = _FACTS.pack(page, length, generation, checksum, rung) + self.packed[_FACTS.size :]

    def on(self, event: CopyEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    def hold(self) -> None:
        assert self.state in (CopyState.READABLE, CopyState.RECLAIMING)
        self.holds += 1

    def unhold(self) -> None:
        assert self.holds > 0
        self.holds -= 1


class GpuCopy(Copy):
    __slots__ = ()
    tier = Tier.GPU
    region = 0


class HostCopy(Copy):
    __slots__ = ()
    tier = Tier.HOST
    region = 0


class SsdCopy(Copy):
    __slots__ = ("region",)
    tier = Tier.SSD

    def __init__(self, extent: Extent, state: CopyState, *, checksum: int = 0, rung: RungCode = AS_SEALED) -> None:
        super().__init__(extent, state, checksum=checksum, rung=rung)
        self.region = extent.region


_KINDS: dict[Tier, type[Copy]] = {Tier.GPU: GpuCopy, Tier.HOST: HostCopy, Tier.SSD: SsdCopy}


def copy_at(extent: Extent, state: CopyState, *, checksum: int = 0, rung: RungCode = AS_SEALED) -> Copy:
    return _KINDS[extent.tier](extent, state, checksum=checksum, rung=rung)
