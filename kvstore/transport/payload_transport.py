"""The data plane as the client sees it: payload bytes to a node for write tokens, payload bytes from a node under a lease.

A transport moves bytes and checks their order and number; it takes no decision. Which node, how often and what a failure means is
the client's; whether the bytes are the right ones is the client's too (checksum). Implementations:
mapped memory (shm_transport), streams of our own framing (stream_transport), gRPC; choice.py picks one for each node.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from kvstore.ids import BlockHash, BootId, KeySpace, LeaseId, NodeId, WriteToken
from kvstore.rpc.store_stub import StoreStub
from kvstore.transport.ticket import NO_TICKET, Ticket
from kvstore.units import Nanos


@dataclass(frozen=True, slots=True)
class Peer:
    """A node as a transport must know it: who, which start of it, where."""

    node_id: NodeId
    boot_id: BootId
    address: str
    """"host:port" of its control plane; a transport learns its own door from there."""


class PayloadWrite(NamedTuple):
    write_token: WriteToken
    payload: bytes | memoryview
    """Must not change until `write` returns."""
    ticket: Ticket = NO_TICKET
    arena_offset: int = 0
    """Where it goes in the node's host arena, for a transport that has mapped it."""
    end_by: Nanos = Nanos(0)
    """By time.monotonic_ns: nothing may be put into the arena after this, the reservation is over then."""
    in_place: bool = False
    """`payload` is the span of the mapped arena itself, and made."""


@dataclass(frozen=True, slots=True)
class PayloadSlot:
    hash: BlockHash
    into: memoryview
    """Writable, contiguous, exactly as long as the payload. Its bytes are undefined until the payload's read is OK."""


class ReadOutcome(StrEnum):
    OK = "ok"
    NOT_LEASED = "not_leased"
    CORRUPT = "corrupt"
    """The node found its own copy bad."""
    IO_ERROR = "io_error"
    MALFORMED = "malformed"
    """What came is not in order, too long or too short."""


@dataclass(frozen=True, slots=True)
class PayloadRead:
    item: int
    """Index into the slots asked for."""
    outcome: ReadOutcome


Arrived = Callable[[int, ReadOutcome], None]
"""Of a slot, by its number: it is filled, or why it is not."""
Ended = Callable[[Exception | None], None]
"""Called once, unless the read is stopped: all slots were told of, or a LarderError says why not, or the exception is one that `Arrived`
raised."""


class MappedArena(Protocol):
    """A node's host arena in this process's memory."""

    def view(self, offset: int, size: int) -> memoryview | None:
        """The bytes themselves, read-only; the caller's for as long as its lease lasts. None: no such span."""
        ...

    def room(self, offset: int, size: int) -> memoryview | None:
        """The same to be written; the caller's until its reservation ends. None: no such span, or none may write."""
        ...


class PayloadTransport(Protocol):
    async def stub(self, peer: Peer) -> StoreStub:
        """The node's control plane by the shortest way that goes with this transport. Never raises for a peer."""
        ...

    def stub_now(self, peer: Peer) -> StoreStub | None:
        """The same, if it is there already and can ask without waiting; else None."""
        ...

    def arena(self, peer: Peer) -> MappedArena | None:
        """The node's host arena, if it is mapped here."""
        ...

    async def write(self, peer: Peer, writes: Sequence[PayloadWrite], *, timeout: Nanos) -> frozenset[WriteToken]:
        """Send every payload, each to its reservation; return the write tokens that the node refused.

        Returns when the node has taken the bytes; they are durable only after the commit, which is for this transport's stub. Raises a
        LarderError when the node could not be reached or did not finish within `timeout`: then nothing is known about any of them.
        """
        ...

    def read(
        self,
        peer: Peer,
        lease_id: LeaseId,
        key_space: KeySpace,
        slots: Sequence[PayloadSlot],
        *,
        ticket: Ticket,
        timeout: Nanos,
        idle_timeout: Nanos,
    ) -> AsyncGenerator[PayloadRead, None]:
        """Fill the slots; yield once per slot as it is done, in any order.

        Raises a LarderError when the node could not be reached, stood still for `idle_timeout`, or did not finish within `timeout`;
        slots not yielded by then were not read. Closing the iterator stops the transfer; no slot is written to after that.
        """
        ...

    def read_now(
        self,
        peer: Peer,
        lease_id: LeaseId,
        key_space: KeySpace,
        slots: Sequence[PayloadSlot],
        *,
        ticket: Ticket,
        timeout: Nanos,
        idle_timeout: Nanos,
        arrived: Arrived,
        ended: Ended,
    ) -> Callable[[], None] | None:
        """The same without a task, where a connection is at hand: then what stops it, and neither `arrived` nor `ended` is called before
        this returns, nor after the stop. None: `read` it."""
        ...

    async def close(self) -> None:
        """End every connection of this transport's own."""
        ...
