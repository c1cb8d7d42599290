"""A lease on a run of blocks, spread over the nodes that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import NamedTuple

from kvstore.core.extent import Tier
from kvstore.ids import AS_SEALED, BlockRef, KeySpace, LeaseId, NodeId, RungCode
from kvstore.transport import NO_TICKET, Ticket
from kvstore.units import Bytes, Nanos


class HeldState(StrEnum):
    """Of one node's part of a lease. HELD -> LOST (not renewed in time, or the node forgot it) | RELEASED."""

    HELD = "held"
    LOST = "lost"
    RELEASED = "released"


@dataclass(slots=True, eq=False)
class HeldLease:
    """One node's part."""

    node_id: NodeId
    lease_id: LeaseId
    key_space: KeySpace
    ttl: Nanos
    renew_at: Nanos
    expires_at: Nanos
    renew_until: Nanos
    ticket: Ticket = NO_TICKET
    """For reads through the data plane; each renewal brings a new one."""
    state: HeldState = HeldState.HELD

    def lasts(self, now: Nanos) -> bool:
        """The node still keeps what it covers. Counted from when the lease was asked for, so never longer than the node does."""
        return self.state is HeldState.HELD and now < self.expires_at


class LeasedCopy(NamedTuple):
    """Where one block of the run can be read."""

    held: HeldLease
    payload_bytes: Bytes
    checksum: int
    tier: Tier
    arena_offset: int | None = None
    """In the host arena of its node while the lease lasts; None: not there."""
    rung: RungCode = AS_SEALED


class PrefixLease:
    """The right to read the blocks of `chain` until released. An async context manager: leaving it releases.

    The client renews it meanwhile. Blocks can still be lost with their nodes; `read` then asks other replicas.
    """

    def __init__(
        self,
        key_space: KeySpace,
        chain: tuple[BlockRef, ...],
        copies: tuple[LeasedCopy, ...],
        held: Iterable[HeldLease],
        *,
        give_back: Callable[[HeldLease], None],
        as_sealed: bool = False,
    ) -> None:
        assert len(chain) == len(copies)
        self.key_space = key_space
        self.chain = chain
        """The run: the leading blocks of the chain asked for that the store holds. Empty when it holds none."""
        self.copies = copies
        """One per block of the run."""
        self.as_sealed = as_sealed
        """A block that a replica has re-coded alone is read from another, or is missing."""
        self._held = list(held)
        self._give_back = give_back
        self._released = False

    def __len__(self) -> int:
        return len(self.chain)

    def __bool__(self) -> bool:
        return bool(self.chain)

    @property
    def payload_bytes(self) -> Bytes:
        """Of the whole run."""
        return Bytes(sum(copy.payload_bytes for copy in self.copies))

    @property
    def released(self) -> bool:
        return self._released

    def add(self, held: HeldLease) -> None:
        """One more node's part, taken while reading."""
        self._held.append(held)
        if self._released:
            self._give_back(held)

    async def release(self) -> None:
        """Give the lease back. Returns at once; the nodes are told behind the scenes. Harmless the second time."""
        self._released = True
        for held in self._held:
            self._give_back(held)

    async def __aenter__(self) -> PrefixLease:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.release()
