"""Getting blocks: probe, acquire, read, renew, release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

from kvstore.core.extent import Extent, Tier
from kvstore.ids import BlockHash, BlockRef, KeySpace, LeaseId, OperationId, RequestId, RungCode
from kvstore.units import Nanos


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
