"""Which transport is used with a node, chosen by itself: the fastest that both sides allow and that answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum

from kvstore.errors import ConfigError, LarderError, Unavailable
from kvstore.ids import KeySpace, LeaseId, NodeId, WriteToken
from kvstore.rpc.channel import ChannelPool
from kvstore.rpc.store_stub import Greeting, StoreStub
from kvstore.transport.grpc_transport import GrpcTransport
from kvstore.transport.payload_transport import Arrived, Ended, MappedArena, PayloadRead, PayloadSlot, PayloadTransport, PayloadWrite, Peer
from kvstore.transport.shared_arena import machine_identity
from kvstore.transport.shm_transport import ShmTransport, map_arena
from kvstore.transport.stream_pool import Door, DoorClosed, StreamPool
from kvstore.transport.stream_transport import StreamTransport
from kvstore.transport.ticket import Ticket
from kvstore.transport.ucx_transport import UcxTransport, ask_for_worker
from kvstore.transport.ucx_worker import open_worker, ucx_obstacle
from kvstore.units import Nanos, milliseconds, seconds, to_seconds


class TransportKind(StrEnum):
    """Fastest first: the order in which they are tried."""

    SHM = "shm"
    UCX = "ucx"
    TCP = "tcp"
    GRPC = "grpc"


ALL_KINDS = tuple(kind.value for kind in TransportKind)

DIAL_TIMEOUT: Nanos = milliseconds(500)
"""A door that does not greet by then (a firewall that drops) is passed over."""
UCX_OPEN_TIMEOUT: Nanos = seconds(10)
"""The first to ask waits until both sides have loaded UCX, a second of CPU each."""
HELLO_TIMEOUT: Nanos = milliseconds(1500)
TRY_AGAIN_AFTER: Nanos = seconds(30)
"""A node whose better door did not answer is looked at again."""


@dataclass(frozen=True, slots=True)
class Choice:
    kind: TransportKind
    reason: str
    """Why this one, and why not those before it."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    choice: Choice
    transport: PayloadTransport
    peer: Peer
    until: float
    """Loop time; infinity when nothing better can come."""

    def fits(self, peer: Peer) -> bool:
        transport = self.transport
        ended = transport.ended if isinstance(transport, ShmTransport) else isinstance(transport, UcxTransport) and transport.out_of_step
        return self.peer == peer and time.monotonic() < self.until and not ended


class AutoTransport:
    """A PayloadTransport to any node. Belongs to one event loop."""

    def __init__(self, channels: ChannelPool, *, kinds: Sequence[str] = ALL_KINDS) -> None:
        """`kinds`: those that this side allows, in any order. Raises ConfigError for an unknown one, or none."""
        if not kinds or any(kind not in ALL_KINDS for kind in kinds):
            raise ConfigError(f"transports must be some of {', '.join(ALL_KINDS)}: {', '.join(kinds) or 'none given'}")
        self._channels = channels
        self._kinds = frozenset(TransportKind(kind) for kind in kinds)
        self._grpc = GrpcTransport(channels)
        self._chosen: dict[NodeId, _Chosen] = {}
        self._choosing: dict[NodeId, asyncio.Lock] = {}
        self._machine = machine_identity()
        self._ucx_broke_until: dict[NodeId, float] = {}
        """Until when a node is not reached by UCX, after it did not work."""

    async def choice(self, peer: Peer) -> Choice:
        """What is, or would be, used with this node. Raises Unavailable when nothing that is allowed answers."""
        return (await self._chosen_for(peer)).choice

    async def stub(self, peer: Peer) -> StoreStub:
        try:
            return await (await self._chosen_for(peer)).transport.stub(peer)
        except LarderError:
            return await self._grpc.stub(peer)

    def stub_now(self, peer: Peer) -> StoreStub | None:
        chosen = self._chosen.get(peer.node_id)
        return chosen.transport.stub_now(peer) if chosen is not None and chosen.fits(peer) else None

    def arena(self, peer: Peer) -> MappedArena | None:
        chosen = self._chosen.get(peer.node_id)
        return chosen.transport.arena(peer) if chosen is not None and chosen.fits(peer) else None

    async def write(self, peer: Peer, writes: Sequence[PayloadWrite], *, timeout: Nanos) -> frozenset[WriteToken]:
        chosen = await self._chosen_for(peer)
        try:
            return await chosen.transport.write(peer, writes, timeout=timeout)
        except LarderError as error:
            await self._reconsider(chosen, error)
            raise

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
        chosen = await self._chosen_for(peer)
        payloads = chosen.transport.read(peer, lease_id, key_space, slots, ticket=ticket, timeout=timeout, idle_timeout=idle_timeout)
        async with aclosing(payloads):
            try:
                async for payload in payloads:
                    yield payload
            except LarderError as error:
                await self._reconsider(chosen, error)
                raise

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
        chosen = self._chosen.get(peer.node_id)
        if chosen is None or not chosen.fits(peer):
            return None
        return chosen.transport.read_now(
            peer, lease_id, key_space, slots, ticket=ticket, timeout=timeout, idle_timeout=idle_timeout, arrived=arrived, ended=ended
        )

    async def retain(self, node_ids: Collection[NodeId]) -> None:
        """Lets go of all other nodes: connections, mapped memory, what is known of them."""
        for node_id in (self._chosen.keys() | self._choosing.keys() | self._ucx_broke_until.keys()) - set(node_ids):
            choosing = self._choosing.get(node_id)
            if choosing is not None and choosing.locked():
                continue  # somebody asks it this moment; the next view will do
            self._choosing.pop(node_id, None)
            self._ucx_broke_until.pop(node_id, None)
            chosen = self._chosen.pop(node_id, None)
            if chosen is not None:
                await chosen.transport.close()

    async def close(self) -> None:
        for chosen in self._chosen.values():
            await chosen.transport.close()
        self._chosen.clear()

    async def _reconsider(self, chosen: _Chosen, error: LarderError) -> None:
        """The choice, after this failure of it."""
        if isinstance(chosen.transport, UcxTransport) and chosen.transport.broken:
            self._ucx_broke_until[chosen.peer.node_id] = time.monotonic() + to_seconds(TRY_AGAIN_AFTER)
        elif not isinstance(error, DoorClosed):
            return
        if self._chosen.get(chosen.peer.node_id) is chosen:
            await self._forget(chosen.peer)

    async def _forget(self, peer: Peer) -> None:
        chosen = self._chosen.pop(peer.node_id, None)
        if chosen is not None:
            await chosen.transport.close()

    async def _chosen_for(self, peer: Peer) -> _Chosen:
        found = self._chosen.get(peer.node_id)
        if found is not None and found.fits(peer):
            return found
        async with self._choosing.setdefault(peer.node_id, asyncio.Lock()):
            found = self._chosen.get(peer.node_id)
            if found is not None and found.fits(peer):
                return found
            await self._forget(peer)
            found = self._chosen[peer.node_id] = await self._choose(peer)
            return found

    async def _choose(self, peer: Peer) -> _Chosen:
        if self._kinds == {TransportKind.GRPC}:
            return _Chosen(Choice(TransportKind.GRPC, "nothing else is allowed here"), self._grpc, peer, float("inf"))
        greeting = await StoreStub(self._channels.get(peer.address)).hello(timeout=HELLO_TIMEOUT)
        passed_over: list[str] = []
        failed = time.monotonic() < self._ucx_broke_until.get(peer.node_id, 0.0)
        for kind in TransportKind:
            obstacle = self._obstacle(kind, peer, greeting)
            if obstacle is None:
                try:
                    transport, reason = await self._open(kind, peer, greeting)
                except LarderError as error:
                    obstacle, failed = str(error), True
                else:
                    why = "; ".join([*passed_over, reason])
                    until = time.monotonic() + to_seconds(TRY_AGAIN_AFTER) if failed else float("inf")
                    return _Chosen(Choice(kind, why), transport, peer, until)
            passed_over.append(f"no {kind}: {obstacle}")
        raise Unavailable(f"{peer.node_id}: {'; '.join(passed_over)}")

    def _obstacle(self, kind: TransportKind, peer: Peer, greeting: Greeting) -> str | None:
        if kind not in self._kinds:
            return "not allowed here"
        if kind is TransportKind.SHM:
            if not greeting.machine or greeting.machine != self._machine:
                return "another machine"
            return None if greeting.local_door else "the node does not offer it"
        if kind is TransportKind.UCX:
            if not greeting.ucx:
                return "the node does not offer it"
            if time.monotonic() < self._ucx_broke_until.get(peer.node_id, 0.0):
                return "it did not work a while ago"
            return ucx_obstacle()
        if kind is TransportKind.TCP and not greeting.data_port:
            return "the node does not offer it"
        return None

    async def _open(self, kind: TransportKind, peer: Peer, greeting: Greeting) -> tuple[PayloadTransport, str]:
        match kind:
            case TransportKind.SHM:
                pool = StreamPool(greeting.local_door, peer.boot_id)
                try:
                    arena, lifeline = await map_arena(pool, timeout=DIAL_TIMEOUT)
                except BaseException:
                    pool.close()
                    raise
                transport = ShmTransport(pool, self._channels, peer.address, arena, lifeline)
                return transport, f"same machine, {'writes in place' if arena.writable else 'read-only'}"
            case TransportKind.UCX:
                pool = StreamPool(_tcp_door(peer, greeting), peer.boot_id)
                try:
                    async with pool.connection(timeout=DIAL_TIMEOUT):
                        pass
                    node_worker = await ask_for_worker(pool, timeout=UCX_OPEN_TIMEOUT)
                    worker = await open_worker()
                except BaseException:
                    pool.close()
                    raise
                return UcxTransport(pool, self._channels, peer.address, worker, node_worker), f"port {greeting.data_port} has UCX"
            case TransportKind.TCP:
                pool = StreamPool(_tcp_door(peer, greeting), peer.boot_id)
                async with pool.connection(timeout=DIAL_TIMEOUT):
                    pass
                return StreamTransport(pool, self._channels, peer.address), f"port {greeting.data_port} greets"
            case TransportKind.GRPC:
                return self._grpc, "always there"


def _tcp_door(peer: Peer, greeting: Greeting) -> Door:
    return peer.address.rpartition(":")[0].strip("[]"), greeting.data_port
