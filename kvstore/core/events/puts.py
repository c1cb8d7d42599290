"""Putting blocks: reserve, then bytes, then commit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvstore.core.extent import Extent
from kvstore.ids import AS_SEALED, BlockRef, KeySpace, RequestId, RungCode, WriteToken
from kvstore.units import Nanos


class ReserveStatus(IntEnum):
    GRANTED = 1
    EXISTS = 2
    PENDING = 3
    NO_ROOM = 4
    QUOTA = 5
    TOO_LARGE = 6


class CommitStatus(IntEnum):
    STORED = 1
    EXPIRED = 2
    BAD_CHECKSUM = 3
    INCOMPLETE = 4
    DURABLE = 5
    """STORED, and on the SSD: a crash does not lose it. Given with write_through, and by a node without a host tier."""
    NO_ROOM = 6
    """No tier took it in time. Of a node without a host tier alone: the others have given the room with the reservation."""

    @property
    def is_stored(self) -> bool:
        return self in (CommitStatus.STORED, CommitStatus.DURABLE)


class ReserveItem(NamedTuple):
    block: BlockRef
    payload_bytes: int
    """Exact size of the payload that will come."""
    ttl: Nanos | None = None
    """From its listing on; 0: no end; None: what the namespace has by configuration. At most MAX_TTL."""
    rung: RungCode = AS_SEALED
    """Of the payload that will come."""


class ReserveGrant(NamedTuple):
    status: ReserveStatus
    write_token: WriteToken = WriteToken(0)
    """0 unless GRANTED."""
    extent: Extent | None = None
    """Where the bytes go; None unless GRANTED. Always memory of the host: the host tier, or staging on a node without one."""


class CommitItem(NamedTuple):
    write_token: WriteToken
    checksum: int
    """XXH3-64 of the whole payload, as the writer announced it."""
    received_bytes: int
    """How many bytes the shell put into the extent. The shell counts, because it takes the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRequested:
    """A writer wants to put these blocks. Comes back: AnswerReserve with one grant per item, in order; at once, unless room would cost
    blocks that are being written to the SSD: then when they are, or after SsdConfig.patience."""

    request_id: RequestId
    key_space: KeySpace
    items: tuple[ReserveItem, ...]
    spare_room_only: bool = False
    """NO_ROOM rather than cost a block its last copy here, and no wait: for copies that nobody asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReserve:
    """The shell keeps token -> extent and writes arriving bytes there, never past `length`, until commit or DiscardReservation."""

    request_id: RequestId
    grants: tuple[ReserveGrant, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardReservation:
    """The reservation expired, was abandoned or its block deleted: the shell must not write to its extent any more, starting now.

    Not sent for tokens that ended by a commit. No outcome.
    """

    write_token: WriteToken


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationsAbandoned:
    """The shell saw the writer go away (its stream broke): free these now instead of at their timeout. Unknown tokens are ignored. No
    answer."""

    write_tokens: tuple[WriteToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequested:
    """The writer says its bytes are down. Comes back: one VerifyExtents for all items that may be good, and after its ExtentsVerified one
    AnswerCommit with a status per item, in order. From this event on the shell writes nothing to these extents."""

    request_id: RequestId
    items: tuple[CommitItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCommit:
    request_id: RequestId
    statuses: tuple[CommitStatus, ...]
