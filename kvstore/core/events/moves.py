"""Copies from one tier to another, as they are or stepped down."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvstore.core.extent import Extent
from kvstore.ids import OperationId, RungCode


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
