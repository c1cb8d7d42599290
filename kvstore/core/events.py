"""What goes into `StoreState.handle` (events) and what comes out (instructions).

Rules between the core and its shell:

* `handle` is called from one thread; the instructions of one call are carried out, or at least started, in the order given and before
  the next event is handed in.
* A request event has a `request_id` the shell chose; exactly one Answer with that id comes back, at once or after later events.
* Every I/O instruction has an `operation`; the shell hands in exactly one outcome event with that operation, however the I/O ends. Until
  then the core frees nothing that the operation touches. So the shell bounds its I/O; the core does not forget it.
* An outcome that says OK means: the bytes are down (and synced, where the tier promises to survive a crash).
* Instructions without `operation` and without `request_id` (DiscardReservation, CancelRead, DropRecoded, Note) have no outcome.

Enumerations that also travel have the protocol's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple, NewType

from kvstore.core.extent import Extent, Tier
from kvstore.ids import AS_SEALED, BlockHash, BlockRef, KeySpace, LeaseId, Namespace, RequestId, RungCode, WriteToken
from kvstore.units import Bytes, Nanos

OperationId = NewType("OperationId", int)
"""Pairs an I/O instruction with its outcome. Never handed out twice in one boot."""


# --- put: reserve -> bytes -> commit -------------------------------------------------------------------------------------------------


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


# --- verification: of a commit, a reader's complaint, a scrub --------------------------------------------------------------------------


class VerifyOutcome(StrEnum):
    OK = "ok"
    CORRUPT = "corrupt"
    IO_ERROR = "io_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyExtents:
    """Read each of `extents` whole and compare its XXH3-64 with its checksum. Outcome: one ExtentsVerified for all."""

    operation: OperationId
    extents: tuple[Extent, ...]
    checksums: tuple[int, ...]
    """One per extent, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentsVerified:
    operation: OperationId
    outcomes: tuple[VerifyOutcome, ...]
    """One per extent, in order."""


class CopyVerdict(StrEnum):
    GOOD = "good"
    BAD = "bad"
    """Did not read back as stored: quarantined."""
    GONE = "gone"
    """No such copy any more: nothing checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequested:
    """Scrub one copy. Comes back: AnswerVerify, at once with GONE or after the VerifyExtents that is given now."""

    request_id: RequestId
    key_space: KeySpace
    hash: BlockHash
    tier: Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerVerify:
    request_id: RequestId
    verdict: CopyVerdict
    checked_bytes: Bytes


# --- get: probe, acquire, read, renew, release -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequested:
    """Which of these are readable here. Pins nothing, promises nothing, counts as no use. Comes back: AnswerProbe, at once."""

    request_id: RequestId
    key_space: KeySpace
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerProbe:
    request_id: RequestId
    present: tuple[bool, ...]


class AcquiredBlock(NamedTuple):
    payload_bytes: int
    checksum: int
    tier: Tier
    """The tier that a read would be served from now: the host tier if it holds it, since a transfer needs the bytes in host memory."""
    extent: Extent | None = None
    """Of the copy in the host tier: it stays there until the lease ends. None without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireRequested:
    """Lease what is here: of each stripe in the request the leading run of its requested blocks. Comes back: AnswerAcquire, at once."""

    request_id: RequestId
    key_space: KeySpace
    blocks: tuple[BlockRef, ...]
    """In chain order."""
    ttl: Nanos | None = None
    """None: the node's default. The node may grant less."""
    counts: bool = True
    """False: no use of the blocks, as far as eviction and admission are concerned; a copy for a peer."""
    as_sealed: bool = False
    """A block that is here re-coded alone counts as missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerAcquire:
    request_id: RequestId
    lease_id: LeaseId
    """0: nothing found, nothing leased."""
    ttl: Nanos
    blocks: tuple[AcquiredBlock | None, ...]
    """One per block asked, in order; None: not leased."""
    recoded: Mapping[int, RungCode] = field(default_factory=dict)
    """At which rungs a read under this lease gives the blocks that are not here as sealed, by their numbers in `blocks`."""


class ReadStatus(IntEnum):
    OK = 1
    NOT_LEASED = 2
    CORRUPT = 3
    IO_ERROR = 4


class ReadItem(NamedTuple):
    status: ReadStatus
    """OK: read it. NOT_LEASED: lease gone, or never covered this block. IO_ERROR: leased, but its copies were lost since."""
    extent: Extent | None
    checksum: int
    """The shell compares what it read with this before (or while) it passes the bytes on; a mismatch is outcome CORRUPT."""


class ReadOutcome(StrEnum):
    OK = "ok"
    CORRUPT = "corrupt"
    IO_ERROR = "io_error"
    UNREAD = "unread"
    """Not OK in the plan, or the reader went away, or the read was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequested:
    """A reader wants payloads of its lease. Comes back: AnswerRead, at once."""

    request_id: RequestId
    lease_id: LeaseId
    key_space: KeySpace
    hashes: tuple[BlockHash, ...]
    counts: bool = True
    """False: moves nothing to a faster tier; a copy for a peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRead:
    """Read the items that are OK. Their extents stay put until the outcome, even if the lease ends before. Outcome: one ReadFinished for
    the whole operation, unless `operation` is 0 (no item is OK)."""

    request_id: RequestId
    operation: OperationId
    items: tuple[ReadItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFinished:
    operation: OperationId
    outcomes: tuple[ReadOutcome, ...]
    """One per item of the AnswerRead, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRead:
    """The read outlived its bound: stop touching its extents and hand in its ReadFinished (still exactly one) now."""

    operation: OperationId


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewRequested:
    """Comes back: AnswerRenew, at once."""

    request_id: RequestId
    lease_id: LeaseId
    ttl: Nanos | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRenew:
    request_id: RequestId
    ttl: Nanos
    """From now; 0: the lease is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRequested:
    """Give back a lease or a part of it. Releasing twice, or what was never leased, is harmless. Comes back: AnswerRelease, at once.

    `corrupt_hashes` are blocks whose bytes failed the reader's own check: each copy of those is verified (VerifyExtents) and quarantined
    if bad. A claim is not believed unverified, or any reader could empty the store.
    """

    request_id: RequestId
    lease_id: LeaseId
    key_space: KeySpace
    hashes: tuple[BlockHash, ...] = ()
    """Empty: the whole lease."""
    corrupt_hashes: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRelease:
    request_id: RequestId


# --- delete, evict ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteRequested:
    """Unlist these blocks now, in every tier, and make that last over a restart; wins against a running put, demotion or promotion.
    Leased copies serve their readers to the end of the lease. Comes back: AnswerDelete, when the last EraseRecord it needs has its
    outcome."""

    request_id: RequestId
    key_space: KeySpace
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDelete:
    request_id: RequestId
    deleted: tuple[bool, ...]
    """False: was not here, or its record on the medium could not be erased (it is unlisted, but a restart may find it again)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictRequested:
    """Forget copies in every tier: all, or those of one namespace, or the named ones. Leased copies stay. Comes back: AnswerEvict, at
    once."""

    request_id: RequestId
    everything: bool = False
    namespace: Namespace | None = None
    key_space: KeySpace | None = None
    hashes: tuple[BlockHash, ...] = ()
    """With key_space; empty: the whole key space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEvict:
    request_id: RequestId
    evicted_copies: int
    evicted_bytes: Bytes
    leased_copies_kept: int
    """And those of hard pinned blocks."""


# --- pins and quotas ----------------------------------------------------------------------------------------------------------------------


class PinKind(IntEnum):
    SOFT = 1
    """Goes only when nothing else can."""
    HARD = 2
    """Is not evicted. Deletes, the block's own end and bad bytes still end it."""


class PinStatus(IntEnum):
    PINNED = 1
    ABSENT = 2
    """Not here: nothing was pinned."""
    NO_SHARE = 3
    """Hard pins have all of the room that they may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRequested:
    """Pins blocks that are here, or gives the pins that they have another kind and end. Comes back: AnswerPin, at once."""

    request_id: RequestId
    key_space: KeySpace
    hashes: tuple[BlockHash, ...]
    kind: PinKind
    ttl: Nanos
    """Above 0; MAX_PIN_TTL at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPin:
    request_id: RequestId
    statuses: tuple[PinStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpinRequested:
    """Comes back: AnswerUnpin, at once."""

    request_id: RequestId
    key_space: KeySpace
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerUnpin:
    request_id: RequestId
    unpinned: tuple[bool, ...]
    """False: it had none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRequested:
    """What a namespace has and may have; with `change` it may have `limit` from now on, and gives back what is above it, some with each
    tick. Comes back: AnswerQuota, at once."""

    request_id: RequestId
    namespace: Namespace
    change: bool = False
    limit: Bytes | None = None
    """None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerQuota:
    request_id: RequestId
    used: Bytes
    limit: Bytes | None


# --- questions of operators and peers ---------------------------------------------------------------------------------------------------


class PlacedCopy(NamedTuple):
    tier: Tier
    payload_bytes: int
    rung: RungCode


class BlockPlace(NamedTuple):
    copies: tuple[PlacedCopy, ...]
    """The readable ones, fastest tier first; empty: not here."""
    leases: int

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return tuple(copy.tier for copy in self.copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateRequested:
    """Comes back: AnswerLocate, at once."""

    request_id: RequestId
    key_space: KeySpace
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLocate:
    request_id: RequestId
    places: tuple[BlockPlace, ...]


class OwnedBlock(NamedTuple):
    block: BlockRef
    payload_bytes: int
    checksum: int
    tiers: tuple[Tier, ...]
    ttl: Nanos
    """What is left of its life; 0: no end."""
    rung: RungCode = AS_SEALED
    """Of the copy that a lease taken now would read; length and checksum are that one's too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeRequested:
    """All that a peer must know of these blocks to take a copy. Comes back: AnswerDescribe, at once."""

    request_id: RequestId
    key_space: KeySpace
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDescribe:
    request_id: RequestId
    blocks: tuple[OwnedBlock | None, ...]
    """None: not here."""


class ListCursor:
    """Where a walk through all blocks stands. The caller hands it back unchanged; who drops it, ends the walk."""

    __slots__ = ("hashes", "key_space", "key_spaces")

    def __init__(self, key_spaces: list[KeySpace]) -> None:
        self.key_spaces = key_spaces
        """Still to be walked."""
        self.key_space: KeySpace | None = None
        """Being walked."""
        self.hashes: list[BlockHash] = []
        """What is left of it, the next one last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListRequested:
    """Every readable block, step by step, for repair (what should a peer have?) and scrub (which copies to verify?). Comes back:
    AnswerList, at once."""

    request_id: RequestId
    cursor: ListCursor | None = None
    """Of the answer before; None: from the start."""
    at_most: int = 1024
    """Blocks of one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerList:
    request_id: RequestId
    key_space: KeySpace | None
    """Of all blocks of this answer; None: nothing is here."""
    blocks: tuple[OwnedBlock, ...]
    cursor: ListCursor | None
    """None: that was all."""


# --- tiers: copies between them, regions of the SSD -------------------------------------------------------------------------------------


class CopyReason(StrEnum):
    PLACE = "place"
    """Out of staging, to where the block will be listed."""
    DEMOTE = "demote"
    PROMOTE = "promote"
    RELOCATE = "relocate"
    """Out of an SSD region that is to be reclaimed."""


class CopyOutcome(StrEnum):
    OK = "ok"
    SOURCE_CORRUPT = "source_corrupt"
    SOURCE_FAILED = "source_failed"
    TARGET_FAILED = "target_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyExtent:
    """Copy a payload from one extent to another of the same length. Outcome: ExtentCopied.

    The payload is checked against `checksum` on its way (SOURCE_CORRUPT if it differs: nothing needs to be written then). When `header`
    is not empty, it goes to target.offset - len(header), in the same write: its length is a multiple of ALIGNMENT.

    With `recoded` the payload is not that of `source`, but what the RecodeExtent of that operation made of it: of the target's length,
    and right by itself. It is given up with the outcome.
    """

    operation: OperationId
    reason: CopyReason
    source: Extent
    target: Extent
    checksum: int
    header: bytes
    recoded: OperationId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentCopied:
    operation: OperationId
    outcome: CopyOutcome


class RecodeOutcome(StrEnum):
    OK = "ok"
    SOURCE_CORRUPT = "source_corrupt"
    SOURCE_FAILED = "source_failed"
    REFUSED = "refused"
    """This payload cannot be re-coded so, or not by this node, or it would not be shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecodeExtent:
    """Step the payload of `source` down to `rung`, in the coded domain, and keep what comes out until CopyExtent or DropRecoded names the
    operation. The payload is checked against `checksum` first. Outcome: ExtentRecoded."""

    operation: OperationId
    source: Extent
    checksum: int
    rung: RungCode


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentRecoded:
    operation: OperationId
    outcome: RecodeOutcome
    length: int = 0
    """With OK, above 0 and less than the source's."""
    checksum: int = 0
    reason: str = ""
    """With REFUSED: short and from a fixed set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRecoded:
    """What the operation, whose outcome was OK, made is not needed. No outcome."""

    recoded: OperationId


class RegionWriteReason(StrEnum):
    OPEN = "open"
    """Region header: from now on everything older in this region is void."""
    SEAL = "seal"
    """Region footer: lists the records, so that a restart need not scan them."""
    ERASE = "erase"
    """Over a record header: the record is void, for ever."""
    DROP = "drop"
    """Over the region header: nothing in this region counts any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRegion:
    """Write `data` at `offset` of the region, durably (sync before the outcome). Offset and length are multiples of ALIGNMENT. Outcome:
    RegionWritten."""

    operation: OperationId
    reason: RegionWriteReason
    region: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionWritten:
    operation: OperationId
    ok: bool


class RecoveredRecord(NamedTuple):
    """One live record that a restart found in a region."""

    key_space: KeySpace
    block: BlockRef
    offset: int
    """Of the payload, from the start of the region."""
    length: int
    checksum: int
    generation: int
    expires_at: int = 0
    """By the time of day, in nanoseconds since 1970; 0: never."""
    rung: RungCode = AS_SEALED


class RecoveredRegion(NamedTuple):
    region: int
    sequence: int
    """From its region header."""
    nonce: bytes
    sealed: bool
    """Had a valid footer. If not, the shell scanned record headers and verified each payload before it reports the record."""
    records: tuple[RecoveredRecord, ...]
    unreadable: bool = False
    """Its header could not be read, which does not mean that nothing is there: it is voided before it counts as free. Or blocks that are
    deleted meanwhile would be back when a later restart can read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionsRecovered:
    """What is on the SSD. The first event of a node with an SSD tier, handed in once, with an empty tuple on a new disk; before it the
    SSD tier is not used. Regions not named are free. No answer."""

    regions: tuple[RecoveredRegion, ...]


# --- time, stop, notes ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Hand in at least every second, whether or not anything else happens: expiries and background work hang on it. No answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Graceful stop: no reservation is granted from now on; host copies are demoted, those of the hottest chains first and heads before
    tails, and the open region is sealed. Comes back: AnswerStop when nothing is left to do or the time is over."""

    request_id: RequestId
    within: Nanos | None = None
    """Of which an eighth is kept for the sealing. None: no bound. A hung disk can outlast it: the shell has a timer of its own."""


class StopReport(NamedTuple):
    """Of blocks that were in the host tier alone when the stop began."""

    kept_blocks: int
    """On the SSD now."""
    kept_bytes: Bytes
    left_blocks: int
    """Still in the host tier alone: lost with it."""
    left_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStop:
    request_id: RequestId
    report: StopReport


class NoteKind(StrEnum):
    STORED = "stored"
    DEMOTED = "demoted"
    PROMOTED = "promoted"
    RELOCATED = "relocated"
    EVICTED = "evicted"
    EXPIRED = "expired"
    DELETED = "deleted"
    QUARANTINED = "quarantined"
    STEPPED_DOWN = "stepped_down"
    """A re-coded copy is on the SSD; `reason` is that of the move, `payload_bytes` what it saved."""
    NOT_STEPPED_DOWN = "not_stepped_down"
    """It was written as it is instead; `reason` says why."""
    RECOVERED = "recovered"
    COPY_FAILED = "copy_failed"
    REGION_FAILED = "region_failed"
    RESERVATION_EXPIRED = "reservation_expired"
    LEASE_EXPIRED = "lease_expired"


class Note(NamedTuple):
    """Something happened that metrics, events or the repair layer want to know. No outcome."""

    kind: NoteKind
    reason: str
    """Short and from a fixed set ("room", "delete", "operator", "checksum", ...): a metric label."""
    tier: Tier | None = None
    payload_bytes: int = 0
    key_space: KeySpace | None = None
    block: BlockRef | None = None
    """With key_space for QUARANTINED: what repair should fetch again."""


Event = (
    ReserveRequested
    | ReservationsAbandoned
    | CommitRequested
    | ExtentsVerified
    | VerifyRequested
    | ProbeRequested
    | AcquireRequested
    | ReadRequested
    | ReadFinished
    | RenewRequested
    | ReleaseRequested
    | DeleteRequested
    | EvictRequested
    | PinRequested
    | UnpinRequested
    | QuotaRequested
    | LocateRequested
    | DescribeRequested
    | ListRequested
    | ExtentCopied
    | ExtentRecoded
    | RegionWritten
    | RegionsRecovered
    | Tick
    | StopRequested
)

Answer = (
    AnswerReserve
    | AnswerCommit
    | AnswerVerify
    | AnswerProbe
    | AnswerAcquire
    | AnswerRead
    | AnswerRenew
    | AnswerRelease
    | AnswerDelete
    | AnswerEvict
    | AnswerPin
    | AnswerUnpin
    | AnswerQuota
    | AnswerLocate
    | AnswerDescribe
    | AnswerList
    | AnswerStop
)

Instruction = Answer | DiscardReservation | VerifyExtents | CancelRead | CopyExtent | RecodeExtent | DropRecoded | WriteRegion | Note
