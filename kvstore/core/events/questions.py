"""What operators and peers want to know: where blocks are, what a copy is, all that is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvstore.core.extent import Tier
from kvstore.ids import AS_SEALED, BlockHash, BlockRef, KeySpace, RequestId, RungCode
from kvstore.units import Nanos


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
