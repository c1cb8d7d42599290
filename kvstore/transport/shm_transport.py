"""Same machine: payloads are read from, and put into, the node's own arena. What is not in it (SSD) goes over the Unix socket."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncGenerator, Sequence

from kvstore.errors import Unavailable
from kvstore.ids import KeySpace, LeaseId, WriteToken
from kvstore.transport.frames import HEADER_BYTES, BadFrame, FrameKind, Header
from kvstore.transport.payload_transport import MappedArena, PayloadRead, PayloadSlot, PayloadWrite, Peer
from kvstore.transport.shared_arena import SharedArena
from kvstore.transport.stream import StreamCut
from kvstore.transport.stream_pool import StreamPool
from kvstore.transport.stream_transport import StreamTransport
from kvstore.transport.ticket import Ticket
from kvstore.units import MIB, Bytes, Nanos

logger = logging.getLogger(__name__)

INLINE_COPY_BYTES = 4 * MIB
"""Up to here (half a millisecond) a copy is made on the event loop; a longer one in a thread."""
_MOST_FDS = 2


class ShmTransport:
    """A PayloadTransport to one node on this machine."""

    def __init__(self, streams: StreamTransport, arena: SharedArena) -> None:
        self._streams = streams
        self._arena = arena

    async def arena(self, peer: Peer) -> MappedArena | None:
        return self._arena

    async def write(self, peer: Peer, writes: Sequence[PayloadWrite], *, timeout: Nanos) -> frozenset[WriteToken]:
        """In place if the node allows it: one copy, then a word to the node that it is there."""
        if not self._arena.writable:
            return await self._streams.write(peer, writes, timeout=timeout)
        placed: list[PayloadWrite] = []
        for write in writes:
            # A late writer would write into what is another block's by then: the clock is looked at before every payload.
            if time.monotonic_ns() >= write.end_by:
                continue
            if len(write.payload) <= INLINE_COPY_BYTES:
                done = self._arena.put(write.arena_offset, write.payload)
            else:
                done = await asyncio.to_thread(self._arena.put, write.arena_offset, write.payload)
            if done:
                placed.append(write)
        late = frozenset(write.write_token for write in writes) - {write.write_token for write in placed}
        if not placed:
            return late
        return late | await self._streams.request_write(peer, FrameKind.PLACED, placed, timeout=timeout)

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
        return self._streams.read(peer, lease_id, key_space, slots, ticket=ticket, timeout=timeout, idle_timeout=idle_timeout)

    async def close(self) -> None:
        await self._streams.close()


async def map_arena(pool: StreamPool, *, timeout: Nanos) -> SharedArena:
    """Ask the node for its arena. Raises Unavailable when it does not hand it over."""
    async with pool.connection(timeout=timeout) as connection:
        stream = connection.stream
        try:
            await stream.send([Header(FrameKind.ARENA, connection.next_number(), 0).pack()], idle=timeout)
            await stream.wait_readable(idle=timeout)
            data, fds, _, _ = socket.recv_fds(stream.sock, HEADER_BYTES, _MOST_FDS)
            if len(data) != HEADER_BYTES:
                raise StreamCut("the node closed the connection instead of handing over its arena")
            header = Header.unpack(data)
            if header.kind is not FrameKind.ARENA or not fds:
                raise BadFrame("garbage", f"{header.kind.name} without descriptors in answer to ARENA")
        except (StreamCut, BadFrame, OSError) as error:
            raise Unavailable(f"the arena was not handed over: {error}") from None
        return SharedArena(list(fds), Bytes(header.length))
