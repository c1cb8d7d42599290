"""Payloads over UCX; what is said about them goes over a stream beside it, with the same tickets and the same framing.

A connection has an endpoint of its own at each side, which ends with it: so a transfer that is given up takes its messages along, and no
other's. UCX joins the endpoints of two workers by the order in which they were made, so both sides must make them in one order.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvstore.errors import Unavailable
from kvstore.ids import KeySpace, LeaseId, WriteToken
from kvstore.rpc.channel import ChannelPool
from kvstore.rpc.store_stub import DeadlinePassed
from kvstore.transport.frames import (
    HEADER_BYTES,
    MAX_UCX_ADDRESS_BYTES,
    BadFrame,
    FrameKind,
    Header,
    ReadBody,
    UcxPart,
    WriteItem,
    pack_write_body,
    pieces_of,
)
from kvstore.transport.grpc_transport import OUTCOME_OF
from kvstore.transport.payload_transport import PayloadRead, PayloadSlot, PayloadWrite, Peer, ReadOutcome
from kvstore.transport.stream import GivenUp, StoodStill, Stream, StreamCut
from kvstore.transport.stream_pool import Connection, StreamPool
from kvstore.transport.stream_transport import StreamTransport, receive_refused, request_frames
from kvstore.transport.ticket import Ticket
from kvstore.transport.ucx_worker import UcxEndpoint, UcxFailed, UcxWorker, moved
from kvstore.units import Nanos, milliseconds, seconds, to_milliseconds, to_seconds

_SHORTEST_WAIT: Nanos = milliseconds(1)


class UcxTransport(StreamTransport):
    """A PayloadTransport to one node."""

    def __init__(self, pool: StreamPool, channels: ChannelPool, address: str, worker: UcxWorker, node_worker: bytes) -> None:
        """`node_worker`: the address of the node's UCX worker, by its own word."""
        super().__init__(pool, channels, address)
        self._worker = worker
        self._node_worker = node_worker
        self._first_uses = asyncio.Lock()
        self.broken = False
        """UCX did not do what the stream beside it promised: a wall between the two, or a node that stopped. Use another way."""
        self.out_of_step = False
        """The two sides may have made their endpoints in different orders. Use another transport, with a new worker."""

    async def close(self) -> None:
        await super().close()
        self._worker.close()

    async def write(self, peer: Peer, writes: Sequence[PayloadWrite], *, timeout: Nanos) -> frozenset[WriteToken]:
        part = UcxPart(secrets.randbits(64), self._worker.address)
        items = pack_write_body([WriteItem(write.write_token, len(write.payload), write.ticket.expires_at) for write in writes])
        try:
            async with asyncio.timeout(to_seconds(timeout)):
                async with self._pool.connection(timeout=timeout) as connection:
                    async with self._endpoint_of(connection) as endpoint:
                        request = request_frames(connection, FrameKind.PUSH, part.pack() + items, [write.ticket for write in writes])
                        await connection.stream.send(request, idle=timeout)
                        pieces = [piece for write in writes for piece in pieces_of(memoryview(write.payload))]
                        sent = [endpoint.send(piece, tag) for piece, tag in zip(pieces, part.tags(), strict=False)]
                        await self._moved(sent, connection.stream, timeout)
                        return await receive_refused(connection.stream, idle=timeout)
        except (TimeoutError, StoodStill):
            self.broken = True
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

        def left() -> Nanos:
            return min(idle_timeout, max(_SHORTEST_WAIT, seconds(deadline - loop.time())))

        part = UcxPart(secrets.randbits(64), self._worker.address)
        body = ReadBody(lease_id, ticket.expires_at, key_space, tuple([slot.hash for slot in slots])).pack()
        try:
            async with self._pool.connection(timeout=idle_timeout) as connection:
                stream, number, tags, item = connection.stream, connection.number, part.tags(), 0
                async with self._endpoint_of(connection) as endpoint:
                    await stream.send(request_frames(connection, FrameKind.FETCH, part.pack() + body, [ticket]), idle=idle_timeout)
                    group = await _receive_group(stream, number=number, first=0, most=len(slots), idle=left())
                while True:
                    arriving: list[tuple[ReadOutcome, list[asyncio.Future[None]]]] = []
                    for status in group:
                        outcome = OUTCOME_OF.get(status, ReadOutcome.MALFORMED)
                        into = pieces_of(slots[item + len(arriving)].into) if outcome is ReadOutcome.OK else []
                        arriving.append((outcome, [endpoint.receive(piece, next(tags)) for piece in into]))
                    for outcome, pieces in arriving:
                        await self._moved(pieces, stream, left())
                        yield PayloadRead(item, outcome)
                        item += 1
                    if item == len(slots):
                        break
                    group = await _receive_group(stream, number=number, first=item, most=len(slots) - item, idle=left())
        except (StoodStill, GivenUp) as error:
            raise DeadlinePassed(f"{peer.node_id}: {error}") from None
        except (StreamCut, BadFrame) as error:
            raise Unavailable(f"{peer.node_id}: {error}") from None

    def read_now(self, *_: Any, **__: Any) -> None:
        """What comes over UCX is waited for."""
        return

    @asynccontextmanager
    async def _endpoint_of(self, connection: Connection) -> AsyncIterator[UcxEndpoint]:
        """In the block: until the node has answered. The first use of a connection waits for that of any other."""
        if isinstance(connection.companion, UcxEndpoint):
            yield connection.companion
            return
        async with self._first_uses:
            try:
                connection.companion = endpoint = self._worker.connect(self._node_worker)
            except UcxFailed:
                self.broken = True
                raise
            try:
                yield endpoint
            except BaseException:
                self.out_of_step = True
                raise

    async def _moved(self, transfers: Sequence[asyncio.Future[None]], stream: Stream, idle: Nanos) -> None:
        try:
            await moved(transfers, stream=stream, idle=idle)
        except (UcxFailed, StoodStill):
            self.broken = True
            raise


async def ask_for_worker(pool: StreamPool, *, timeout: Nanos) -> bytes:
    """The address of the node's UCX worker, which the node starts for this if it has to. Raises Unavailable."""
    try:
        async with asyncio.timeout(to_seconds(timeout)):
            async with pool.connection(timeout=timeout) as connection:
                await connection.stream.send([Header(FrameKind.UCX, connection.next_number(), 0).pack()], idle=timeout)
                head = bytearray(HEADER_BYTES)
                await connection.stream.receive([memoryview(head)], idle=timeout)
                header = Header.unpack(head)
                if header.kind is not FrameKind.UCX or not 0 < header.length <= MAX_UCX_ADDRESS_BYTES:
                    raise BadFrame("garbage", f"{header.kind.name} of {header.length} bytes in answer to UCX")
                address = bytearray(header.length)
                await connection.stream.receive([memoryview(address)], idle=timeout)
                return bytes(address)
    except (TimeoutError, StoodStill):
        raise DeadlinePassed(f"no answer to UCX within {to_milliseconds(timeout):.0f} ms") from None
    except (StreamCut, BadFrame) as error:
        raise Unavailable(f"UCX: {error}") from None


async def _receive_group(stream: Stream, *, number: int, first: int, most: int, idle: Nanos) -> bytes:
    """The statuses of the next payloads: 1 to `most`. Raises BadFrame."""
    head = bytearray(HEADER_BYTES)
    await stream.receive([memoryview(head)], idle=idle)
    header = Header.unpack(head)
    if header.kind is not FrameKind.GROUP or header.number != number or header.item != first:
        raise BadFrame("garbage", f"{header.kind.name} {header.number}:{header.item} where group {number}:{first} should be")
    if not 0 < header.length <= most:
        raise BadFrame("bad_length", f"a group of {header.length} payloads where at most {most} were expected")
    statuses = bytearray(header.length)
    await stream.receive([memoryview(statuses)], idle=idle)
    return bytes(statuses)
