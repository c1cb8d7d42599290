"""Payloads over streams of our own framing: TCP to any host, a Unix socket on the same one.

Bytes go by scatter and gather between the socket and the memory given; nothing is copied or looked at in Python. One batch
goes over one connection; several batches at once take several.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from kvstore.errors import Unavailable
from kvstore.ids import KeySpace, LeaseId, WriteToken
from kvstore.rpc.channel import ChannelPool
from kvstore.rpc.store_stub import DeadlinePassed, StoreStub
from kvstore.transport.frames import (
    HEADER_BYTES,
    MAX_WRITTEN_BYTES,
    BadFrame,
    FrameKind,
    Header,
    ReadBody,
    WriteItem,
    pack_write_body,
    unpack_tokens,
)
from kvstore.transport.grpc_transport import OUTCOME_OF
from kvstore.transport.payload_transport import MappedArena, PayloadRead, PayloadSlot, PayloadWrite, Peer, ReadOutcome
from kvstore.transport.stream import GivenUp, StoodStill, Stream, StreamCut
from kvstore.transport.stream_pool import Connection, StreamPool
from kvstore.transport.stream_stub import StreamStub
from kvstore.transport.ticket import PROOF_BYTES, Ticket, proof_of
from kvstore.units import Nanos, to_milliseconds, to_seconds


class StreamTransport:
    """A PayloadTransport to one node, through one door of it."""

    def __init__(self, pool: StreamPool, channels: ChannelPool, address: str, *, places: bool = False) -> None:
        """`places`: see StreamStub."""
        self._pool = pool
        self._stub = StreamStub(channels.get(address), pool, places=places)

    async def stub(self, peer: Peer) -> StoreStub:
        return self._stub

    def stub_now(self, peer: Peer) -> StoreStub | None:
        return self._stub

    def arena(self, peer: Peer) -> MappedArena | None:
        return None

    async def write(self, peer: Peer, writes: Sequence[PayloadWrite], *, timeout: Nanos) -> frozenset[WriteToken]:
        body = pack_write_body([WriteItem(write.write_token, len(write.payload), write.ticket.expires_at) for write in writes])
        try:
            async with asyncio.timeout(to_seconds(timeout)):
                async with self._pool.connection(timeout=timeout) as connection:
                    request = request_frames(connection, FrameKind.WRITE, body, [write.ticket for write in writes])
                    await connection.stream.send([*request, *[write.payload for write in writes]], idle=timeout)
                    return await receive_refused(connection.stream, idle=timeout)
        except (TimeoutError, StoodStill):
            raise DeadlinePassed(f"{peer.node_id} did not take the bytes within {to_milliseconds(timeout):.0f} ms") from None
        except (StreamCut, BadFrame) as error:
            raise Unavailable(f"{peer.node_id}: {error}") from None

    async def read(
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
        loop = asyncio.get_running_loop()
        deadline = loop.time() + to_seconds(timeout)
        try:
            async with self._pool.connection(timeout=idle_timeout) as connection:
                body = ReadBody(lease_id, ticket.expires_at, key_space, tuple([slot.hash for slot in slots])).pack()
                request = request_frames(connection, FrameKind.READ, body, [ticket])
                await connection.stream.send(request, idle=idle_timeout)
                payloads = _receive_payloads(
                    connection.stream,
                    slots,
                    request_number=connection.number - 1,
                    idle=idle_timeout,
                    still=lambda: loop.time() < deadline,
                )
                async with aclosing(payloads):
                    async for payload in payloads:
                        yield payload
        except (StoodStill, GivenUp) as error:
            raise DeadlinePassed(f"{peer.node_id}: {error}") from None
        except (StreamCut, BadFrame) as error:
            raise Unavailable(f"{peer.node_id}: {error}") from None

    async def close(self) -> None:
        self._stub.close()
        self._pool.close()


async def _receive_payloads(
    stream: Stream, slots: Sequence[PayloadSlot], *, request_number: int, idle: Nanos, still: Callable[[], bool]
) -> AsyncGenerator[PayloadRead, None]:
    """In the order asked. A payload of another length than the slot's ends the stream: where the next one begins cannot be known."""
    head = memoryview(bytearray(HEADER_BYTES))
    have = 0
    for item, slot in enumerate(slots):
        if have < HEADER_BYTES:
            await stream.receive([head[have:]], idle=idle, still=still)
        header = Header.unpack(head)
        have = 0
        if header.kind is not FrameKind.PAYLOAD or header.item != item or header.number != request_number:
            raise BadFrame("garbage", f"{header.kind.name} {header.number}:{header.item} where payload {request_number}:{item} should be")
        outcome = OUTCOME_OF.get(header.status, ReadOutcome.MALFORMED)
        if header.length != (len(slot.into) if outcome is ReadOutcome.OK else 0):
            raise BadFrame("bad_length", f"a payload of {header.length} bytes where {len(slot.into)} were expected")
        if outcome is ReadOutcome.OK:
            have = await stream.receive([slot.into], idle=idle, still=still, ahead=head if item + 1 < len(slots) else None)
        yield PayloadRead(item, outcome)


async def receive_refused(stream: Stream, *, idle: Nanos) -> frozenset[WriteToken]:
    """The answer to a write. Raises BadFrame."""
    head = bytearray(HEADER_BYTES)
    await stream.receive([memoryview(head)], idle=idle)
    header = Header.unpack(head)
    if header.kind is not FrameKind.WRITTEN or header.length > MAX_WRITTEN_BYTES:
        raise BadFrame("garbage", f"{header.kind.name} in answer to a write")
    refused = bytearray(header.length)
    await stream.receive([memoryview(refused)], idle=idle)
    return unpack_tokens(bytes(refused))


def request_frames(connection: Connection, kind: FrameKind, body: bytes, tickets: Sequence[Ticket]) -> list[bytes]:
    """A request of the connection, with its proof."""
    header = Header(kind, connection.next_number(), len(body) + PROOF_BYTES).pack()
    return [header, body, proof_of(tickets, nonce=connection.nonce, message=header + body)]
