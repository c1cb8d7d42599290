"""Payloads over streams of our own framing: TCP to any host, a Unix socket on the same one.

Bytes go by scatter and gather between the socket and the memory given; nothing is copied or looked at in Python. One batch
goes over one connection; several batches at once take several.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

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
from kvstore.transport.payload_reading import PayloadReading
from kvstore.transport.payload_transport import Arrived, Ended, MappedArena, PayloadRead, PayloadSlot, PayloadWrite, Peer, ReadOutcome
from kvstore.transport.stream import StoodStill, Stream, StreamCut
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
        come: asyncio.Queue[PayloadRead | Exception | None] = asyncio.Queue()

        def arrived(item: int, outcome: ReadOutcome) -> None:
            come.put_nowait(PayloadRead(item, outcome))
            reading.pause()  # nothing is taken for a reader that has not taken this one

        async with self._pool.connection(timeout=idle_timeout) as connection:
            reading = self._start(
                connection,
                peer,
                lease_id,
                key_space,
                slots,
                ticket=ticket,
                timeout=timeout,
                idle_timeout=idle_timeout,
                arrived=arrived,
                ended=come.put_nowait,
            )
            try:
                while (payload := await come.get()) is not None:
                    if isinstance(payload, Exception):
                        raise payload
                    yield payload
                    if come.empty():
                        reading.resume()
            finally:
                reading.stop()

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
        connection = self._pool.take_now()
        if connection is None:
            return None

        def over(error: Exception | None) -> None:
            if error is None:
                self._pool.give_back(connection)
            else:
                connection.close()
            ended(error)

        reading = self._start(
            connection,
            peer,
            lease_id,
            key_space,
            slots,
            ticket=ticket,
            timeout=timeout,
            idle_timeout=idle_timeout,
            arrived=arrived,
            ended=over,
        )

        def stop() -> None:
            if reading.stop():
                connection.close()

        return stop

    def _start(
        self,
        connection: Connection,
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
    ) -> PayloadReading:
        body = ReadBody(lease_id, ticket.expires_at, key_space, tuple([slot.hash for slot in slots])).pack()
        request = request_frames(connection, FrameKind.READ, body, [ticket])
        return PayloadReading(
            connection,
            slots,
            request,
            node_name=peer.node_id,
            timeout=timeout,
            idle_timeout=idle_timeout,
            arrived=arrived,
            ended=ended,
        )

    async def close(self) -> None:
        self._stub.close()
        self._pool.close()


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
