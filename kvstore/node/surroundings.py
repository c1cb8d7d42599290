"""What the processes of core/upkeep see of a real node: its core and media, asyncio's time, other stores by gRPC and the data plane."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.core.events.puts import CommitStatus, ReserveItem
from kvstore.core.extent import Extent
from kvstore.core.upkeep.open_read import OpenRead
from kvstore.core.upkeep.surroundings import AnswerT, PeerGrant, PeerWrite, Request
from kvstore.core.view import Member, View
from kvstore.ids import BlockHash, KeySpace, LeaseId, RequestId, WriteToken
from kvstore.node.node import Node
from kvstore.registry.view_source import ViewSource
from kvstore.rpc.channel import ChannelPool
from kvstore.rpc.peer_stub import PeerStub
from kvstore.transport import AutoTransport, PayloadTransport, PayloadWrite, Peer, Ticket
from kvstore.units import Nanos, seconds, to_seconds

_LOOK_EVERY: Nanos = seconds(1)
"""For another view."""


class NodeSurroundings:
    """Belongs to the event loop of its node."""

    def __init__(self, node: Node, *, views: ViewSource, channels: ChannelPool, transport: AutoTransport) -> None:
        self._node = node
        self._views = views
        self._channels = channels
        self._transport = transport

    @property
    def view(self) -> View:
        return self._views.view

    def now(self) -> Nanos:
        return self._node.now()

    async def pause(self, duration: Nanos) -> None:
        await asyncio.sleep(to_seconds(duration))

    def next_request_id(self) -> RequestId:
        return self._node.next_request_id()

    async def ask(self, request: Request, answer: type[AnswerT]) -> AnswerT:
        return await self._node.ask(request, answer)

    async def open_read(self, lease_id: LeaseId, key_space: KeySpace, hashes: Sequence[BlockHash], *, counts: bool) -> OpenRead:
        return self._node.open_read_now(lease_id, key_space, hashes, counts=counts)

    async def read_payload(self, extent: Extent, checksum: int) -> memoryview:
        return await self._node.source.read(extent, checksum)

    async def let_go_of_the_gone(self) -> None:
        """Connections to nodes that no view names any more. Without end."""
        let_go_at = None
        while True:
            view = self.view
            if view.epoch != let_go_at:
                let_go_at = view.epoch
                await self._channels.retain({member.address for member in view.members})
                await self._transport.retain({member.node_id for member in view.members})
            await self.pause(_LOOK_EVERY)

    def peer(self, member: Member) -> OtherNode:
        return OtherNode(member, channel_of=self._channels, transport=self._transport)


class _Way(NamedTuple):
    """Behind a PeerGrant: where and until when its bytes may go."""

    ticket: Ticket
    arena_offset: int
    end_by: Nanos


class OtherNode(PeerStub):
    """Asked as a peer, written to as any writer does. Cheap to make."""

    def __init__(self, member: Member, *, channel_of: ChannelPool, transport: PayloadTransport) -> None:
        super().__init__(channel_of.get(member.address))
        self._peer = Peer(member.node_id, member.boot_id, member.address)
        self._transport = transport

    async def reserve(self, key_space: KeySpace, items: Sequence[ReserveItem], *, spare_room_only: bool, timeout: Nanos) -> list[PeerGrant]:
        store = await self._transport.stub(self._peer)
        asked_at = time.monotonic_ns()
        grants = await store.reserve(key_space, items, timeout=timeout, spare_room_only=spare_room_only)
        return [
            PeerGrant(
                grant.status,
                grant.write_token,
                _Way(Ticket.from_bytes(grant.ticket), grant.arena_offset, Nanos(asked_at + grant.ttl * 9 // 10)),
            )
            for grant in grants
        ]

    async def write(self, writes: Sequence[PeerWrite], *, timeout: Nanos) -> frozenset[WriteToken]:
        sent = []
        for grant, payload in writes:
            assert isinstance(grant.way, _Way)
            sent.append(PayloadWrite(grant.write_token, payload, *grant.way))
        return await self._transport.write(self._peer, sent, timeout=timeout)

    async def commit(self, items: Sequence[tuple[WriteToken, int]], *, timeout: Nanos) -> list[CommitStatus]:
        return await (await self._transport.stub(self._peer)).commit(list(items), timeout=timeout)
