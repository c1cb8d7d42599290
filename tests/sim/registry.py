"""Membership of a simulated cluster, as Redis keeps it: heartbeats come in by the network, views go out by it, late and out of order.

A store that misses its lease is SUSPECT and still owns its stripes; one that starts again is ACTIVE with its new boot id.
"""

from __future__ import annotations

import dataclasses

from sim.client import SimulatedClient
from sim.network import Network
from sim.timeline import Timeline

from kvstore.core.view import Member, MemberState, Role, View
from kvstore.ids import BootId, Epoch, NodeId
from kvstore.units import Nanos, seconds

NAME = "registry"
_LEASE = seconds(6)
_SWEEP_EVERY = seconds(2)


class SimulatedRegistry:
    def __init__(self, timeline: Timeline, network: Network, *, zones: dict[NodeId, str]) -> None:
        self.view = View(Epoch(0))
        self.clients: dict[str, SimulatedClient] = {}
        self._timeline = timeline
        self._network = network
        self._zones = zones
        self._renewed: dict[NodeId, Nanos] = {}
        self._seen: dict[NodeId, list[BootId]] = {}
        timeline.after(_SWEEP_EVERY, self._sweep)

    def renew(self, node_id: NodeId, boot_id: BootId) -> None:
        """A heartbeat arrives: joins, or renews. One of an earlier start of the node, that was under way, is refused."""
        boots = self._seen.setdefault(node_id, [])
        if boot_id in boots[:-1]:
            return
        if boot_id not in boots:
            boots.append(boot_id)
        self._renewed[node_id] = self._timeline.now
        known = self.view.member(node_id)
        if known is None or known.boot_id != boot_id or known.state is not MemberState.ACTIVE:
            self.change(Member(node_id=node_id, boot_id=boot_id, role=Role.STORE, address=node_id, zone=self._zones[node_id]))

    def change(self, member: Member) -> None:
        """A new epoch with this member in place of the one of its name."""
        others = tuple(known for known in self.view.members if known.node_id != member.node_id)
        self.view = View(Epoch(self.view.epoch + 1), (*others, member))
        self._publish()

    def _sweep(self) -> None:
        for member in self.view.members:
            if member.state is MemberState.ACTIVE and self._timeline.now - self._renewed[member.node_id] > _LEASE:
                self.change(dataclasses.replace(member, state=MemberState.SUSPECT))
        self._publish()
        self._timeline.after(_SWEEP_EVERY, self._sweep)

    def _publish(self) -> None:
        view = self.view
        for client in self.clients.values():
            self._network.send(NAME, client.name, lambda client=client: client.see(view))  # type: ignore[misc]
