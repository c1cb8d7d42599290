"""Copy: one block's bytes in one tier of this node, and the table of its life."""

from __future__ import annotations

from enum import Enum, auto

from kvstore.core.extent import Extent, Tier
from kvstore.ids import Generation


class CopyState(Enum):
    RESERVED = auto()
    """Has room; a writer may be filling it."""
    VERIFYING = auto()
    """Commit asked for; the bytes are being compared with the announced checksum."""
    WRITING = auto()
    """Being filled from another tier of this node."""
    READABLE = auto()
    RECLAIMING = auto()
    """Unlisted; its room is freed when the last reader is gone. Until then leases it has still read it."""
    QUARANTINED = auto()
    """Found bad: nobody reads it any more; its room is freed when the last hold is gone."""
    FREE = auto()


class CopyEvent(Enum):
    COMMIT_ASKED = auto()
    VERIFIED = auto()
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


class Copy:
    """Mutable; owned by the store state. Slots, no dict: there is one per copy."""

    __slots__ = ("generation", "holds", "length", "offset", "region", "state", "tier")

    def __init__(self, extent: Extent, state: CopyState) -> None:
        self.tier: Tier = extent.tier
        self.region = extent.region
        self.offset = extent.offset
        self.length = extent.length
        self.generation: Generation = extent.generation
        self.state = state
        self.holds = 0
        """I/O operations in flight that read it (reads, verifications, copies out of it). While above 0 its bytes stay."""

    @property
    def extent(self) -> Extent:
        return Extent(self.tier, self.region, self.offset, self.length, self.generation)

    def on(self, event: CopyEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    def hold(self) -> None:
        assert self.state in (CopyState.READABLE, CopyState.RECLAIMING)
        self.holds += 1

    def unhold(self) -> None:
        assert self.holds > 0
        self.holds -= 1
