"""Keeps what the client holds leased: renews each node's part at a third of its time, tells the nodes when it is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvstore.client.config import ClientConfig
from kvstore.client.node_calls import NodeCalls
from kvstore.client.prefix_lease import HeldLease, HeldState
from kvstore.clock import Clock
from kvstore.errors import LarderError, LeaseExpired
from kvstore.ids import BlockHash, KeySpace, LeaseId, NodeId
from kvstore.transport import Ticket
from kvstore.units import Nanos, to_seconds


class LeaseKeeper:
    """Belongs to one event loop. One timer stands for all leases: most are given back long before they are to be renewed."""

    def __init__(self, nodes: NodeCalls, *, config: ClientConfig, clock: Clock) -> None:
        self._nodes = nodes
        self._config = config
        self._clock = clock
        self._held: set[HeldLease] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = Nanos(0)
        """When the timer goes off; says nothing without one."""
        self._closed = False

    @property
    def held_leases(self) -> int:
        return len(self._held)

    def hold(self, node_id: NodeId, lease_id: LeaseId, key_space: KeySpace, *, ttl: Nanos, asked_at: Nanos, ticket: bytes) -> HeldLease:
        """Keep a lease that a node granted to a call sent at `asked_at`: its time may have begun then."""
        held = HeldLease(
            node_id,
            lease_id,
            key_space,
            ttl,
            renew_at=Nanos(asked_at + ttl // 3),
            expires_at=Nanos(asked_at + ttl),
            renew_until=Nanos(asked_at + self._config.lease_longest_hold),
            ticket=Ticket.from_bytes(ticket),
        )
        self._held.add(held)
        self._see_to(held.renew_at)
        return held

    def give_back(self, held: HeldLease) -> None:
        """All of it. Harmless the second time."""
        self._held.discard(held)
        if held.state is HeldState.HELD:
            self._tell(held, (), ())
        held.state = HeldState.RELEASED

    def give_back_some(self, held: HeldLease, hashes: Sequence[BlockHash]) -> None:
        """The lease on these blocks; that on the others stays."""
        if hashes and held.state is HeldState.HELD:
            self._tell(held, hashes, ())

    def report_corrupt(self, held: HeldLease, block: BlockHash) -> None:
        """The copy failed the reader's check: the node shall verify and quarantine it."""
        if held.state is HeldState.HELD:
            self._tell(held, (block,), (block,))

    async def close(self) -> None:
        """Give everything back and stop. The nodes are told by the time NodeCalls is closed."""
        for held in list(self._held):
            self.give_back(held)
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _tell(self, held: HeldLease, hashes: Sequence[BlockHash], corrupt: Sequence[BlockHash]) -> None:
        if self._closed:
            return
        if not corrupt:
            stub = self._nodes.stub_now(held.node_id)
            if stub is not None and stub.release_now(held.lease_id, held.key_space, hashes):
                return
        self._nodes.spawn(self._release(held, hashes, corrupt))

    async def _release(self, held: HeldLease, hashes: Sequence[BlockHash], corrupt: Sequence[BlockHash]) -> None:
        try:
            await self._nodes.call(
                held.node_id,
                lambda stub: stub.release(
                    held.lease_id, held.key_space, hashes=hashes, corrupt_hashes=corrupt, timeout=self._config.rpc_timeout
                ),
            )
        except LarderError:
            pass  # the lease runs out by itself

    def _see_to(self, renew_at: Nanos) -> None:
        """The timer goes off by then."""
        if self._closed or (self._timer is not None and self._due <= renew_at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = renew_at
        left = to_seconds(Nanos(max(0, renew_at - self._clock.now())))
        self._timer = asyncio.get_running_loop().call_later(left, self._renew_due)

    def _renew_due(self) -> None:
        self._timer = None
        now = self._clock.now()
        for held in [held for held in self._held if held.renew_at <= now]:
            # Next time, if this renewal brings no answer: a third of the lease later, and then a last time.
            held.renew_at = Nanos(now + held.ttl // 3)
            self._nodes.spawn(self._renew(held))
        if self._held:
            self._see_to(min(held.renew_at for held in self._held))

    async def _renew(self, held: HeldLease) -> None:
        asked_at = self._clock.now()
        if asked_at >= min(held.expires_at, held.renew_until):
            self._lose(held)
            return
        try:
            held.ttl, ticket = await self._nodes.call(
                held.node_id, lambda stub: stub.renew(held.lease_id, ttl=held.ttl, timeout=self._config.rpc_timeout)
            )
        except LeaseExpired:
            self._lose(held)
        except LarderError:
            pass  # tried again until the lease has run out
        else:
            held.ticket = Ticket.from_bytes(ticket)
            held.expires_at = Nanos(asked_at + held.ttl)
            held.renew_at = Nanos(asked_at + held.ttl // 3)
            self._see_to(held.renew_at)

    def _lose(self, held: HeldLease) -> None:
        self._held.discard(held)
        if held.state is HeldState.HELD:
            held.state = HeldState.LOST
