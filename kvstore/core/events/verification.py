"""Whether bytes are what they were announced to be: of a commit, a reader's complaint, a scrub."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvstore.core.extent import Extent, Tier
from kvstore.ids import BlockHash, KeySpace, OperationId, RequestId
from kvstore.units import Bytes


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
