"""Same machine: payloads are read from, and put into, the node's own arena. What is not in it (SSD) goes over the Unix socket."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from kvstore.errors import Unavailable
from kvstore.ids import KeySpace, LeaseId, WriteToken
from kvstore.rpc.channel import ChannelPool
from kvstore.rpc.store_stub import StoreStub
from kvstore.transport.frames import HEADER_BYTES, BadFrame, FrameKind, Header
from kvstore.transport.payload_transport import Arrived, Ended, MappedArena, PayloadRead, PayloadSlot, PayloadWrite, Peer
from kvstore.transport.shared_arena import SharedArena
from kvstore.transport.stream import Stream, StreamCut
from kvstore.transport.stream_pool import DoorClosed, StreamPool
from kvstore.transport.stream_transport import StreamTransport
from kvstore.transport.ticket import Ticket
from kvstore.units import MIB, Bytes, Nanos

logger = logging.getLogger(__name__)

INLINE_COPY_BYTES = 4 * MIB
"""Up to here (half a millisecond) a copy is made on the event loop; a longer one in a thread."""
_MOST_FDS = 2


class ShmTransport:
    """A PayloadTransport to one node on this machine.

    The connection that brought the arena is its lifeline: when it breaks, the node has ended, and the mapping goes, so that no memory of a
    dead node is kept. Then `write` and `arena` fail or give nothing until another ShmTransport is made.
    """

    def __init__(self, pool: StreamPool, channels: ChannelPool, address: str, arena: SharedArena, lifeline: Stream) -> None:
        self._streams = StreamTransport(pool, channels, address, places=arena.writable)
        self._arena: SharedArena | None = arena
        self._lifeline = lifeline
        asyncio.get_running_loop().add_reader(lifeline.sock, self._lifeline_moved)

    def _lifeline_moved(self) -> None:
        """Nothing ever comes on it but its end."""
        if not self._lifeline.closed and not self._lifeline.quiet():
            asyncio.get_running_loop().remove_reader(self._lifeline.sock)
            self._lifeline.close()
            self._arena = None

    def _mapped(self) -> SharedArena | None:
        self._lifeline_moved()  # the loop may not have come to it yet
        return self._arena

    async def stub(self, peer: Peer) -> StoreStub:
        return await self._streams.stub(peer)

    def stub_now(self, peer: Peer) -> StoreStub | None:
        return self._streams.stub_now(peer)

    def arena(self, peer: Peer) -> MappedArena | None:
        return self._mapped()

    @property
    def ended(self) -> bool:
        """The node has. Use another transport."""
        return self._arena is None

    async def write(self, peer: Peer, writes: Sequence[PayloadWrite], *, timeout: Nanos) -> frozenset[WriteToken]:
        """In place if the node allows it: one copy. That it is there the commit says."""
        arena = self._mapped()
        if arena is None:
            raise DoorClosed(f"{peer.node_id} has ended")
        if not arena.writable:
            return await self._streams.write(peer, writes, timeout=timeout)
        late: set[WriteToken] = set()
        for write in writes:
            # A late writer would write into what is another block's by then: the clock is looked at before every payload.
            if time.monotonic_ns() >= write.end_by:
                done = False
            elif write.in_place:
                done = True
            elif len(write.payload) <= INLINE_COPY_BYTES:
                done = arena.put(write.arena_offset, write.payload)
            else:
                done = await asyncio.to_thread(arena.put, write.arena_offset, write.payload)
            if not done:
                late.add(write.write_token)
        return frozenset(late)

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
        return self._streams.read_now(
            peer, lease_id, key_space, slots, ticket=ticket, timeout=timeout, idle_timeout=idle_timeout, arrived=arrived, ended=ended
        )

    async def close(self) -> None:
        if not self._lifeline.closed:
            asyncio.get_running_loop().remove_reader(self._lifeline.sock)
            self._lifeline.close()
        self._arena = None
        await self._streams.close()


async def map_arena(pool: StreamPool, *, timeout: Nanos) -> tuple[SharedArena, Stream]:
    """Ask the node for its arena: it, and the connection that lives as long as the node. Raises Unavailable when it is not handed over."""
    connection = await pool.dial(timeout=timeout)
    stream = connection.stream
    try:
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
        return SharedArena(list(fds), Bytes(header.length)), stream
    except BaseException:
        stream.close()
        raise
