"""What a client is asked with and what it answers. A miss is an answer; cache trouble is an answer with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvstore.core.extent import Tier
from kvstore.ids import AS_SEALED, BlockRef, NodeId, RungCode
from kvstore.units import Nanos


class Acknowledge(StrEnum):
    """How many replicas must hold a block before `put` returns; the others go on behind it."""

    ONE = "one"
    QUORUM = "quorum"
    ALL = "all"

    def replicas_needed(self, replicas: int) -> int:
        match self:
            case Acknowledge.ONE:
                return 1
            case Acknowledge.QUORUM:
                return replicas // 2 + 1
            case Acknowledge.ALL:
                return replicas


@dataclass(frozen=True, slots=True)
class PayloadMaker:
    """A payload that is made where it will lie: in the arena of its node, when that is the block's only replica and is mapped here for
    writing, else in memory of the client's own. Nothing is made of a block that the node holds already."""

    payload_bytes: int
    make: Callable[[memoryview], None]
    """Fills all of the memory given, within a few milliseconds (it runs on the event loop, above 4 MiB in a thread), and keeps no hold of
    it. May be called more than once, and makes the same bytes each time; until `put` returns. A CodecFailure fails the block."""


@dataclass(frozen=True, slots=True)
class BlockPut:
    ref: BlockRef
    payload: bytes | memoryview | PayloadMaker
    """What the codec made of the block, or will. `put` copies it at the call unless it is `bytes`, so the caller may reuse its memory."""
    ttl: Nanos | None = None
    """How long the block shall live; 0: until it is evicted; None: as the nodes are configured for the namespace. Put again, it lives as
    long as the longest of its puts asked for."""
    rung: RungCode = AS_SEALED
    """BEHIND_RECODED: computed behind blocks that were read re-coded."""


class PutOutcome(StrEnum):
    """What is known of a block when `put` returns."""

    STORED = "stored"
    """At least as many replicas as asked hold it, and none is known to have failed."""
    EXISTS = "exists"
    """As STORED, and nothing had to be sent: every replica that answered had it."""
    DEGRADED = "degraded"
    """Readable, but on fewer replicas than there should be: repair owes the rest."""
    FAILED = "failed"
    """On no replica."""


@dataclass(frozen=True, slots=True)
class PutReport:
    outcomes: tuple[PutOutcome, ...]
    """One per block, in the order asked."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why replicas that should hold a block do not, one count per block and replica: no_room, quota, too_large, empty, pending,
    unreachable, timeout, circuit_open, refused, bad_checksum, no_replica, ..."""
    durable: tuple[int, ...] = ()
    """One per block: how many of the nodes that took it now have said that it is on their SSD and survives a crash. Those with
    write_policy = "write_through" do."""


def owned() -> bool:
    """Of a payload whose memory is its reader's."""
    return True


class ReadBlock(NamedTuple):
    index: int  # type: ignore[assignment]  # a field; nobody searches a ReadBlock with tuple.index
    """Position in the run of the lease, from 0: that of the chain given to `acquire_prefix`."""
    payload: memoryview | None
    """Verified by checksum; owned by the receiver. None: no replica could give it, the caller recomputes."""
    tier: Tier | None
    node_id: NodeId | None
    """Which replica it came from; None with the payload."""
    reason: str
    """"ok", or why the last replica asked could not give it."""
    rung: RungCode = AS_SEALED
    """Other than AS_SEALED: re-coded, or computed behind such blocks. Not the numbers that a sequence attends to which had it as sealed."""
    still_good: Callable[[], bool] = owned
    """Asked after the last use of a payload that was read in place: False when its lease ended meanwhile, and it may be another's by now.
    True for every other payload."""
