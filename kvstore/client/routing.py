"""Which node to ask for a stripe, and which next. Pure: no clock, no randomness, no I/O of its own.

Writers go to the owners of the present view. Readers go to the owners too, suspects last, then to nodes that hold it because it is
hot, then to nodes that owned the stripe before the last changes of the view and still live: what was not yet copied to a new owner is
found there. The replicas of a hot stripe take turns.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Sequence

from kvstore.client.circuit import Circuit
from kvstore.client.config import ClientConfig
from kvstore.client.hedging import Hedges
from kvstore.core.placement import mixed, place, reading_places
from kvstore.core.view import PLACED_STATES, Member, MemberState, View
from kvstore.ids import Epoch, NodeId, StripeId
from kvstore.units import Nanos

READABLE_STATES = frozenset({MemberState.ACTIVE, MemberState.DRAINING, MemberState.SUSPECT})
"""States in which a store answers readers."""

_MOST_ORDERS = 1 << 16
_MOST_PREVIOUS_VIEWS = 4


class Router:
    """The view, the circuits, and the order in which they put the replicas of a stripe."""

    def __init__(self, *, replicas: int, config: ClientConfig) -> None:
        assert replicas >= 1, replicas
        self.replicas = replicas
        self.hedges = Hedges(config.hedge)
        self._config = config
        self._view = View(Epoch(-1))
        self._stores: dict[NodeId, Member] = {}
        self._circuits: dict[NodeId, Circuit] = {}
        self._previous: deque[tuple[Nanos, View]] = deque(maxlen=_MOST_PREVIOUS_VIEWS)
        """Views with other owners, newest last, each with the time until which it is asked."""
        self._vanished: dict[NodeId, Nanos] = {}
        """Stores that a view no longer names at all, each with the time until which it is asked. One that died or left is named as
        such: these a registry forgot, and they register again, one after another when a newcomer was faster than the first of them."""
        self._turn = 0
        """Of readers of hot stripes."""
        self._orders: dict[StripeId, tuple[NodeId, ...]] = {}
        """What `readers` begins with, found once a stripe: a third of the CPU of an acquire of 1,000 blocks otherwise."""

    @property
    def view(self) -> View:
        return self._view

    def see(self, view: View, now: Nanos) -> bool:
        """Take over a view; False when it is the one known or older. A restarted node gets a fresh circuit."""
        while self._previous and self._previous[0][0] <= now:
            self._previous.popleft()
            self._orders.clear()
        if view.epoch <= self._view.epoch:
            return False
        self._orders.clear()
        if _owners_part(view) != _owners_part(self._view) and self._view.epoch >= 0:
            self._previous.append((Nanos(now + self._config.previous_views), self._view))
        self._view = view
        named = {member.node_id for member in view.members}
        until = Nanos(now + self._config.previous_views)
        self._vanished = {node_id: self._vanished.get(node_id, until) for node_id in self._stores if node_id not in named}
        for node_id in self._stores.keys() & named - {member.node_id for member in view.stores if member.state in READABLE_STATES}:
            self.hedges.forget(node_id)
        forgotten = [self._stores[node_id] for node_id, until in self._vanished.items() if now < until]
        readable = [member for member in view.stores if member.state in READABLE_STATES]
        self._stores = {member.node_id: member for member in (*forgotten, *readable)}
        self._circuits = {node_id: self._circuits[node_id] for node_id in self._stores.keys() & self._circuits.keys()}
        for node_id, member in self._stores.items():
            if self.circuit(node_id).boot_id != member.boot_id:
                self.hedges.forget(node_id)
            self.circuit(node_id).seen(member.boot_id)
        return True

    def member(self, node_id: NodeId) -> Member | None:
        """The store, if it lives in the present view or was only forgotten by it."""
        return self._stores.get(node_id)

    def circuit(self, node_id: NodeId) -> Circuit:
        """Of a node that `member` knows."""
        circuit = self._circuits.get(node_id)
        if circuit is None:
            circuit = self._circuits[node_id] = Circuit(self._config.circuit, self._stores[node_id].boot_id)
        return circuit

    def usable(self, node_id: NodeId) -> bool:
        return node_id in self._stores and self.circuit(node_id).usable

    def stores(self) -> tuple[NodeId, ...]:
        """Every store that answers readers, asked or not."""
        return tuple(self._stores)

    def addresses(self) -> set[str]:
        """Of everybody who may be asked something."""
        return {member.address for member in (*self._view.members, *self._stores.values())}

    def node_ids(self) -> set[NodeId]:
        """Likewise."""
        return {member.node_id for member in (*self._view.members, *self._stores.values())}

    def owners(self, stripe: StripeId) -> tuple[NodeId, ...]:
        """Where the stripe's blocks should be, whether or not those nodes can be asked now: at most `replicas`."""
        return place(stripe, self._view, replicas=self.replicas)

    def readers(self, stripe: StripeId) -> tuple[NodeId, ...]:
        """Whom to ask for the stripe's blocks, in this order: usable owners, suspects behind the others, then owners of before."""
        order = self._orders.get(stripe)
        if order is None:
            if len(self._orders) >= _MOST_ORDERS:
                self._orders.clear()
            order = self._orders[stripe] = self._order(stripe)
        usable = tuple([node_id for node_id in order if self.usable(node_id)])
        return self._in_turn(stripe, usable) if stripe in self._view.hot else usable

    def _in_turn(self, stripe: StripeId, readers: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
        """Of a hot stripe: its holders are asked first as chance has it; the others keep their order behind."""
        places = reading_places(stripe, self._view, replicas=self.replicas)
        holders = [node_id for node_id in places if node_id in readers and self._state(node_id) is not MemberState.SUSPECT]
        if not holders:
            return readers
        self._turn += 1  # mixed: a plain turn would always fall on the same replica of a stripe when a run has an even number of them
        first = holders[mixed(self._turn) % len(holders)]
        return (first, *(node_id for node_id in readers if node_id != first))

    def _order(self, stripe: StripeId) -> tuple[NodeId, ...]:
        """As `readers`, whether or not they can be asked now."""
        owners = self.owners(stripe)
        order = [node_id for node_id in owners if self._state(node_id) is not MemberState.SUSPECT]
        order += [node_id for node_id in owners if self._state(node_id) is MemberState.SUSPECT]
        order += [node_id for node_id in reading_places(stripe, self._view, replicas=self.replicas) if node_id not in order]
        for view in (_with_leavers(self._view), *(view for _, view in reversed(self._previous))):
            order += [node_id for node_id in place(stripe, view, replicas=self.replicas) if node_id not in order]
        return tuple(order)

    def next_reader(self, stripe: StripeId, *, asked: Collection[NodeId]) -> NodeId | None:
        """The first reader not asked yet; None: give up, the block is a miss."""
        return next((node_id for node_id in self.readers(stripe) if node_id not in asked), None)

    def _state(self, node_id: NodeId) -> MemberState:
        return self._stores[node_id].state


def _owners_part(view: View) -> frozenset[tuple[NodeId, float, str, float]]:
    """What of a view decides who owns what."""
    placed = (member for member in view.stores if member.state in PLACED_STATES)
    return frozenset((member.node_id, member.weight, member.zone, member.takeover) for member in placed)


def _with_leavers(view: View) -> View:
    """The view as if draining stores still owned their stripes: they do hold them."""
    if all(member.state is not MemberState.DRAINING for member in view.stores):
        return view
    members: Sequence[Member] = [
        dataclasses.replace(member, state=MemberState.ACTIVE) if member.state is MemberState.DRAINING else member for member in view.stores
    ]
    return View(view.epoch, tuple(members))
