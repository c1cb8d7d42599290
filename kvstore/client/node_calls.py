"""Calls on store nodes: one place where an address is trusted, where a failure moves a circuit, and where open circuits are probed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from kvstore.client import metrics
from kvstore.client.config import ClientConfig
from kvstore.client.routing import Router
from kvstore.clock import Clock
from kvstore.errors import InvalidRequest, LarderError, LeaseExpired, Overloaded, StaleView, Unavailable
from kvstore.ids import KeySpace, LeaseId, NodeId, WriteToken
from kvstore.registry.view_source import ViewSource
from kvstore.rpc.channel import ChannelPool
from kvstore.rpc.store_stub import DeadlinePassed, StoreStub
from kvstore.transport import Arrived, AutoTransport, Ended, MappedArena, PayloadRead, PayloadSlot, PayloadWrite, Peer, Ticket
from kvstore.units import Nanos, to_seconds

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class CircuitOpen(Unavailable):
    """The node was given up for a while, or is no longer in the view: nothing was sent."""


def reason_of(error: LarderError) -> str:
    """The label under which a failure is counted."""
    match error:
        case CircuitOpen():
            return "circuit_open"
        case DeadlinePassed():
            return "timeout"
        case Unavailable():
            return "unreachable"
        case Overloaded():
            return "overloaded"
        case LeaseExpired():
            return "lease_expired"
        case StaleView():
            return "stale_view"
        case InvalidRequest():
            return "invalid_request"
        case _:
            return "internal"


class NodeCalls:
    """Owns the channels and the probes. Belongs to one event loop."""

    def __init__(
        self, views: ViewSource, router: Router, channels: ChannelPool, transport: AutoTransport, *, config: ClientConfig, clock: Clock
    ) -> None:
        self._views = views
        self.router = router
        self._channels = channels
        self._transport = transport
        self._config = config
        self._clock = clock
        self._rng = random.Random()  # spreads probes in time, decides nothing
        self._trusted: dict[NodeId, Peer] = {}
        """Only peers of the present view: see `refresh`."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._probes: dict[NodeId, asyncio.Task[None]] = {}

    def refresh(self) -> Router:
        """The router with the last view known. Call it at the start of each operation."""
        if self.router.see(self._views.view, self._clock.now()):
            self._trusted = {node_id: peer for node_id, peer in self._trusted.items() if peer == self._peer(node_id)}
            self.spawn(self._let_go_of_others())
        return self.router

    async def _let_go_of_others(self) -> None:
        await self._channels.retain(self.router.addresses())
        await self._transport.retain(self.router.node_ids())

    def spawn(self, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        """Run something short behind the scenes; it is awaited, then cancelled, by `close`. Every piece of work has its own bound."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._settled)
        return task

    async def call(self, node_id: NodeId, ask: Callable[[StoreStub], Awaitable[Answer]]) -> Answer:
        """`ask` the node. Raises LarderError; CircuitOpen without having sent anything."""
        peer = await self._trusted_peer(node_id)
        return await self._counted(node_id, ask(await self._transport.stub(peer)))

    async def write(self, node_id: NodeId, writes: Sequence[PayloadWrite]) -> frozenset[WriteToken]:
        peer = await self._trusted_peer(node_id)
        return await self._counted(node_id, self._transport.write(peer, writes, timeout=self._config.write_timeout))

    def stub_now(self, node_id: NodeId) -> StoreStub | None:
        """A stub that asks without waiting, of a node that is asked now; None: `call` it. Who uses it says `note` what came of it."""
        peer = self._trusted.get(node_id)
        return self._transport.stub_now(peer) if peer is not None and self.router.usable(node_id) else None

    def note(self, node_id: NodeId, error: LarderError | None) -> None:
        """A call by `stub_now` was answered, or failed with this."""
        if error is None:
            self._answered(node_id)
        else:
            self._failed(node_id, error)

    def arena(self, node_id: NodeId) -> MappedArena | None:
        """The node's host arena, if it is mapped here."""
        peer = self._trusted.get(node_id)
        return None if peer is None else self._transport.arena(peer)

    async def read(
        self, node_id: NodeId, lease_id: LeaseId, ticket: Ticket, key_space: KeySpace, slots: Sequence[PayloadSlot]
    ) -> AsyncGenerator[PayloadRead, None]:
        peer = await self._trusted_peer(node_id)
        payloads = self._transport.read(
            peer,
            lease_id,
            key_space,
            slots,
            ticket=ticket,
            timeout=self._config.read_timeout,
            idle_timeout=self._config.read_idle_timeout,
        )
        async with aclosing(payloads):
            try:
                async for payload in payloads:
                    yield payload
            except LarderError as error:
                self._failed(node_id, error)
                raise
        self._answered(node_id)

    def read_now(
        self,
        node_id: NodeId,
        lease_id: LeaseId,
        ticket: Ticket,
        key_space: KeySpace,
        slots: Sequence[PayloadSlot],
        *,
        arrived: Arrived,
        ended: Ended,
    ) -> Callable[[], None] | None:
        """The same without a task, if the node can be asked so now: see PayloadTransport.read_now. None: `read` it."""
        peer = self._trusted.get(node_id)
        if peer is None or not self.router.usable(node_id):
            return None

        def over(error: Exception | None) -> None:
            if error is None or isinstance(error, LarderError):
                self.note(node_id, error)
            ended(error)

        return self._transport.read_now(
            peer,
            lease_id,
            key_space,
            slots,
            ticket=ticket,
            timeout=self._config.read_timeout,
            idle_timeout=self._config.read_idle_timeout,
            arrived=arrived,
            ended=over,
        )

    async def close(self) -> None:
        """Wait for what is behind the scenes, up to `close_timeout`; then end it and close the channels."""
        for probe in self._probes.values():
            probe.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=to_seconds(self._config.close_timeout))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._transport.close()
        await self._channels.close()

    # -- trust

    def _peer(self, node_id: NodeId) -> Peer | None:
        member = self.router.member(node_id)
        return None if member is None else Peer(member.node_id, member.boot_id, member.address)

    async def _trusted_peer(self, node_id: NodeId) -> Peer:
        """The node at its address, which has said once that it is that node: ports are reused, and a view may be behind."""
        if not self.router.usable(node_id):
            raise CircuitOpen(f"{node_id} is not asked now")
        peer = self._trusted.get(node_id)
        if peer is None:
            peer = self._peer(node_id)
            assert peer is not None, "a node that is usable is a member"
            await self._counted(node_id, self._introduce(peer))
        return peer

    async def _introduce(self, peer: Peer) -> None:
        greeting = await StoreStub(self._channels.get(peer.address)).hello(timeout=self._config.rpc_timeout)
        if greeting.node_id != peer.node_id:
            raise Unavailable(f"{greeting.node_id} answers at {peer.address}, where {peer.node_id} should be")
        if self._peer(peer.node_id) == peer:  # the view may have changed meanwhile
            self._trusted[peer.node_id] = peer

    # -- circuits

    async def _counted(self, node_id: NodeId, call: Awaitable[Answer]) -> Answer:
        try:
            answer = await call
        except LarderError as error:
            self._failed(node_id, error)
            raise
        self._answered(node_id)
        return answer

    def _answered(self, node_id: NodeId) -> None:
        if self.router.member(node_id) is not None:
            self.router.circuit(node_id).succeeded()

    def _failed(self, node_id: NodeId, error: LarderError) -> None:
        if not isinstance(error, Unavailable):
            self._answered(node_id)
            return
        if self.router.member(node_id) is None:
            return
        opened = self.router.circuit(node_id).failed(
            self._clock.now(), deadline_passed=isinstance(error, DeadlinePassed), jitter=self._rng.random()
        )
        if opened:
            log.warning("store node %s is not asked for a while: %s", node_id, error)
            metrics.circuits_opened.labels(node_id).inc()
            if node_id not in self._probes:
                self._probes[node_id] = self.spawn(self._probe_until_usable(node_id))

    async def _probe_until_usable(self, node_id: NodeId) -> None:
        try:
            while (peer := self._peer(node_id)) is not None and not self.router.usable(node_id):
                circuit = self.router.circuit(node_id)
                pause = circuit.probe_at - self._clock.now()
                if pause > 0:
                    await asyncio.sleep(to_seconds(Nanos(pause)))
                    self.refresh()
                    continue
                circuit.start_probe()
                try:
                    await self._introduce(peer)
                except LarderError:
                    circuit.probe_failed(self._clock.now(), jitter=self._rng.random())
                else:
                    circuit.probe_succeeded()
                    log.info("store node %s is asked again", node_id)
        finally:
            del self._probes[node_id]

    def _settled(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a bug behind the scenes: this must not happen", exc_info=task.exception())
