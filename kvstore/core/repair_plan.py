"""What a node owes to new owners after a change of the view. Pure: every node comes to the same plan and takes its part of it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.core.placement import place
from kvstore.core.view import Member, MemberState, View
from kvstore.ids import BlockHash, BootId, KeySpace, NodeId, StripeId

LIVING_STATES = frozenset({MemberState.ACTIVE, MemberState.SUSPECT, MemberState.DRAINING})
"""States in which a store has what it had."""


class Duty(NamedTuple):
    """What one node has to do for one stripe."""

    targets: tuple[NodeId, ...]
    """Owners that lack it."""
    living: int
    """Nodes that hold it."""


class Plan:
    """From a view under which everything was in place to the present one.

    A stripe is held by its old owners that still live, in the boot that they had; of these the first in rendezvous order sends, so no two
    do. What a node holds beside its place, or an owner lacks against expectation, is for the anti-entropy to find.
    """

    def __init__(self, *, node_id: NodeId, old: View, new: View, replicas: int) -> None:
        self._node_id = node_id
        self._old = old
        self._new = new
        self._replicas = replicas
        boots = {member.node_id: member.boot_id for member in old.stores}
        self._living = {
            member.node_id for member in new.stores if member.state in LIVING_STATES and boots.get(member.node_id) == member.boot_id
        }

    def duty_of(self, stripe: StripeId) -> Duty | None:
        """What this node sends of the stripe. None: nothing, or another node is the one to send. Cost: two placements."""
        holders = [owner for owner in place(stripe, self._old, replicas=self._replicas) if owner in self._living]
        if not holders or holders[0] != self._node_id:
            return None
        targets = tuple(owner for owner in place(stripe, self._new, replicas=self._replicas) if owner not in holders)
        return Duty(targets, len(holders)) if targets else None


_StoresPart = frozenset[tuple[NodeId, BootId, MemberState, float, str, float]]


def same_stores(one: View, other: View) -> bool:
    """Whether no plan is needed between two views: all that decides who owns and holds what is the same. A missed lease moves nothing.
    Cost: O(stores), or nothing for a view and itself."""
    return one is other or _stores_part(one) == _stores_part(other)


def _stores_part(view: View) -> _StoresPart:

    def key(member: Member) -> tuple[NodeId, BootId, MemberState, float, str, float]:
        state = MemberState.ACTIVE if member.state is MemberState.SUSPECT else member.state
        return member.node_id, member.boot_id, state, member.weight, member.zone, member.takeover

    return frozenset(key(member) for member in view.stores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """Blocks of one stripe for one node."""

    key_space: KeySpace
    stripe: StripeId
    target: NodeId
    blocks: tuple[BlockHash, ...]
    bytes: int
    living: int
    """Copies that are left of it."""
    spare_room_only: bool = False
    """Must not cost the target a block."""
    attempts: int = 0


class ShipmentQueue:
    """Most endangered first, then as they came. One shipment per stripe and target."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, StripeId, NodeId]] = []
        self._waiting: dict[tuple[StripeId, NodeId], Shipment] = {}
        self._count = 0
        self.blocks = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Shipment]:
        return iter(self._waiting.values())

    def put(self, shipment: Shipment) -> bool:
        """False when the stripe waits for that node already."""
        key = (shipment.stripe, shipment.target)
        if key in self._waiting:
            return False
        self._waiting[key] = shipment
        self._count += 1
        heapq.heappush(self._heap, (shipment.living, self._count, *key))
        self.blocks += len(shipment.blocks)
        self.bytes += shipment.bytes
        return True

    def take(self) -> Shipment | None:
        if not self._heap:
            return None
        _, _, stripe, target = heapq.heappop(self._heap)
        shipment = self._waiting.pop((stripe, target))
        self.blocks -= len(shipment.blocks)
        self.bytes -= shipment.bytes
        return shipment

    def clear(self) -> None:
        self._heap.clear()
        self._waiting.clear()
        self.blocks = self.bytes = 0
