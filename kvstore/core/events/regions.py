"""Regions of the SSD: what is written around the payloads, and what a restart finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvstore.ids import AS_SEALED, BlockRef, KeySpace, OperationId, RungCode


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
