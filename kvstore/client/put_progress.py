"""What is known of a put while its replicas answer. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvstore.client.answers import PayloadMaker, PutOutcome
from kvstore.ids import AS_SEALED, BlockRef, RungCode
from kvstore.units import Nanos


@dataclass(slots=True, eq=False)
class BlockProgress:
    """One block: replicas that hold it, that failed, that have not answered yet."""

    ref: BlockRef
    payload: bytes | memoryview
    """Empty while there is a `maker`."""
    checksum: int
    ttl: Nanos | None = None
    rung: RungCode = AS_SEALED
    outstanding: int = 0
    stored: int = 0
    existed: int = 0
    durable: int = 0
    """Of the stored ones: those whose node has the block on its SSD already."""
    reasons: list[str] = field(default_factory=list)
    """One per replica that should hold it and does not."""
    maker: PayloadMaker | None = None
    """Of a payload that is to be made in its place."""

    @property
    def size(self) -> int:
        return len(self.payload) if self.maker is None else self.maker.payload_bytes

    def settled(self, *, replicas_needed: int) -> bool:
        """Nothing that matters to the asked acknowledgement is open."""
        return self.outstanding == 0 or self.stored + self.existed >= replicas_needed

    def outcome(self, *, replicas_needed: int) -> PutOutcome:
        """Only what is true now: an answer still outstanding counts for nothing."""
        holding = self.stored + self.existed
        if holding == 0:
            return PutOutcome.FAILED
        if holding < replicas_needed or self.reasons:
            return PutOutcome.DEGRADED
        return PutOutcome.STORED if self.stored else PutOutcome.EXISTS


@dataclass(slots=True)
class PutProgress:
    """All blocks of one put, in the order asked. A block asked twice is there twice and sent once."""

    blocks: list[BlockProgress]
    replicas_needed: int

    @property
    def settled(self) -> bool:
        return all(block.settled(replicas_needed=self.replicas_needed) for block in self.blocks)

    @property
    def outstanding_bytes(self) -> int:
        return sum(block.outstanding * block.size for block in {id(block): block for block in self.blocks}.values())

    def outcomes(self) -> tuple[PutOutcome, ...]:
        return tuple(block.outcome(replicas_needed=self.replicas_needed) for block in self.blocks)

    def durable(self) -> tuple[int, ...]:
        return tuple(block.durable for block in self.blocks)

    def reasons(self) -> Counter[str]:
        return Counter(reason for block in self.blocks for reason in block.reasons)
