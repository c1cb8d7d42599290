"""One store node, assembled: tiers, core, shell, services, port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvpb.v1 import admin_pb2, admin_pb2_grpc, peer_pb2_grpc, store_pb2, store_pb2_grpc
from prometheus_client import CollectorRegistry

from kvstore.clock import Clock, SystemClock
from kvstore.core.events.notes import Note
from kvstore.core.events.regions import RegionsRecovered
from kvstore.core.extent import Tier as CoreTier
from kvstore.core.store_state import StoreState
from kvstore.core.upkeep.anti_entropy import AntiEntropy
from kvstore.core.upkeep.handover import Handover
from kvstore.core.upkeep.hot_stripes import HotStripes
from kvstore.core.upkeep.inventory import Inventory
from kvstore.core.upkeep.peer_answers import PeerAnswers
from kvstore.core.upkeep.repairer import Repairer
from kvstore.core.upkeep.surroundings import OwnMember
from kvstore.core.upkeep.takeover import first_takeover, take_over_by_and_by
from kvstore.core.view import Member, MemberState, Role
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.ids import BOOT_ID_BYTES, BootId, NodeId
from kvstore.node.admin_servicer import AdminServicer
from kvstore.node.config import NodeConfig, ShmAccess
from kvstore.node.data_doors import DataDoors
from kvstore.node.event_feed import EventFeed
from kvstore.node.metrics import NodeMetrics
from kvstore.node.node import Node
from kvstore.node.peer_servicer import PeerServicer
from kvstore.node.recovery import RecoveryReport, recover
from kvstore.node.repair import Repair
from kvstore.node.repair_status import drain_status, repair_status
from kvstore.node.saved_wishes import SavedWishes
from kvstore.node.servicer import StoreServicer
from kvstore.node.surroundings import NodeSurroundings
from kvstore.node.walk import walk
from kvstore.registry.view_source import ViewSource
from kvstore.rpc.channel import ChannelPool
from kvstore.rpc.server import bind, make_server
from kvstore.tiers.host import HostArena
from kvstore.tiers.ssd import SsdRegions
from kvstore.tiers.tier import Tier
from kvstore.transport import AutoTransport
from kvstore.transport.shared_arena import machine_identity
from kvstore.transport.ticket import TicketOffice
from kvstore.units import Bytes, Nanos, to_milliseconds

if TYPE_CHECKING:
    from kvstore.codec.step_down import PayloadSteps

logger = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
"""Calls under way at a stop get this long to end by themselves."""


class NodeServer:
    """Life: `start` -> serving -> `stop`. Knows the view, but not how it became a member of it."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        views: ViewSource,
        own: OwnMember | None = None,
        clock: Clock | None = None,
        metrics_registry: CollectorRegistry | None = None,
        wrap_ssd: Callable[[SsdRegions], Tier] = lambda regions: regions,
        wrap_gpu: Callable[[Tier], Tier] = lambda arena: arena,
    ) -> None:
        """Raises ConfigError when a tier cannot be had. `own`: this node's standing in the registry that `views` follows; without one it
        cannot be drained, and takes over all its stripes at once. `wrap_ssd` and `wrap_gpu` put something between the node and its
        medium: faults."""
        self.config = config
        self.boot_id = BootId(secrets.token_bytes(BOOT_ID_BYTES))
        self.member_state = MemberState.JOINING
        self.recovery = RecoveryReport()
        self.port = 0
        self._views = views
        self._own = own
        self._clock = clock or SystemClock()
        self._metrics = NodeMetrics(metrics_registry or CollectorRegistry())
        self._tickets = TicketOffice()
        self._started_at = self._clock.now()
        with contextlib.ExitStack() as opening:
            key = "host_capacity" if config.host_capacity else "staging_capacity"
            self.host = HostArena(config.arena_capacity, sealed=config.shm is not ShmAccess.READ_WRITE, key=key)
            opening.callback(self.host.close)
            self._gpu: Tier | None = None
            if config.gpu_device is not None:
                from kvstore.tiers.gpu import GpuArena  # torch: seconds, and a GB that a node without a device can do without

                self._gpu = wrap_gpu(GpuArena(config.gpu_device, config.gpu_capacity))
                opening.callback(self._gpu.close)
            self._regions: SsdRegions | None = None
            self._ssd: Tier | None = None
            if config.ssd_path is not None:
                self._regions = SsdRegions(
                    config.ssd_path,
                    capacity=config.ssd_capacity,
                    region_bytes=config.region_bytes,
                    discard_other_formats=config.ssd_discard_other_formats,
                )
                self._ssd = wrap_ssd(self._regions)
                opening.callback(self._ssd.close)
            day_offset = Nanos(time.time_ns() - self._clock.now())
            self._wishes = SavedWishes(config.ssd_path)
            store_config = config.store_config()
            store_config = dataclasses.replace(store_config, quotas=self._wishes.over(store_config.quotas))
            self._state = StoreState(store_config, boot_id=self.boot_id, day_offset=day_offset)
            self._inventory = Inventory(self._state)
            self._feed = EventFeed(
                self._state, node_id=config.node_id, boot_id=self.boot_id, epoch=lambda: self._views.view.epoch, clock=self._clock
            )
            self._tiers = opening.pop_all()
        for usage in self._state.status().tiers:
            self._metrics.show_tier(usage.tier, partial(self._used_bytes, usage.tier))
        if not config.host_capacity:
            self._metrics.show_staging(self._staging_bytes)

    @property
    def address(self) -> str:
        return f"{self.config.host}:{self.port}"

    @property
    def node(self) -> Node:
        return self._node

    def member(self) -> Member:
        """How this node presents itself to the registry."""
        return Member(
            node_id=NodeId(self.config.node_id),
            boot_id=self.boot_id,
            role=Role.STORE,
            address=f"{self.config.advertise_host or self.config.host}:{self.port}",
            zone=self.config.zone,
            weight=self.config.weight,
            capacity_bytes=Bytes(sum(usage.capacity for usage in self._state.status().tiers)),
            state=MemberState.JOINING,
        )

    async def start(self) -> None:
        """Recovers the SSD, then listens. Raises ConfigError (port), UnsupportedFormat (disk)."""
        try:
            recovered: RegionsRecovered | None = None
            if self._regions is not None:
                assert self._ssd is not None
                recovered, self.recovery = await asyncio.to_thread(recover, self._regions, self._ssd)
            self._node = Node(
                self._state,
                host=self.host,
                ssd=self._ssd,
                gpu=self._gpu,
                config=self.config,
                clock=self._clock,
                steps=await asyncio.to_thread(_steps, self.config) if self.config.step_down else None,
                on_notes=self._note,
            )
            self._metrics.show_read_buffer(lambda: self._node.source.buffer.taken)
            self._server = make_server()
            self._channels = ChannelPool()
            self._transport = AutoTransport(self._channels)
            self._surroundings = NodeSurroundings(self._node, views=self._views, channels=self._channels, transport=self._transport)
            self._repairer = Repairer(
                self._surroundings,
                self._inventory.catalog,
                node_id=NodeId(self.config.node_id),
                replicas=self.config.replicas,
                config=self.config.repair,
            )
            self._handover = Handover(self._repairer)
            self.port = bind(self._server, host=self.config.host, port=self.config.port)
            self._doors = DataDoors(
                self._node,
                config=self.config,
                boot_id=self.boot_id,
                arena=self.host,
                tickets=self._tickets,
                metrics=self._metrics,
            )
            self._doors.start()
        except BaseException:
            self._tiers.close()
            raise
        self._node.start(recovered)
        self._state.restore_pins(self._wishes.pins, self._clock.now())
        if recovered is not None:
            async with contextlib.aclosing(walk(self._node)) as blocks:
                await self._inventory.fill(blocks)
        store = StoreServicer(self._node, config=self.config, metrics=self._metrics, tickets=self._tickets, hello=self._hello)
        store_pb2_grpc.add_StoreServiceServicer_to_server(store, self._server)
        peer = PeerServicer(self._node, PeerAnswers(self._repairer), config=self.config, views=self._views, hello=self._hello)
        peer_pb2_grpc.add_PeerServiceServicer_to_server(peer, self._server)
        admin = AdminServicer(
            self._node,
            self._repairer,
            self._handover,
            status=self.status,
            make_repair=self._make_repair,
            drain=self._drain,
            wishes=self._wishes,
            feed=self._feed,
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server)
        await self._server.start()
        self._node.spawn(self._surroundings.let_go_of_the_gone())
        if self.config.repair.rate:
            self._repairer.begin()
            self._node.spawn(self._repairer.follow_views())
            self._node.spawn(self._repairer.work())
            self._node.spawn(self._handover.run())
            if self._own is not None:
                self._node.spawn(HotStripes(self._repairer, self._own, take_heat=self._state.heat.take).run())
            if self.config.repair.anti_entropy_every:
                self._node.spawn(AntiEntropy(self._repairer).run(self.config.repair.anti_entropy_every))

    async def first_takeover(self) -> float:
        """With which share of its stripes this node should join: ask before it does."""
        return await first_takeover(self._views.view.stores, self._surroundings, config=self.config.repair)

    def serves(self) -> None:
        """The node is ACTIVE now."""
        self.member_state = MemberState.ACTIVE
        if self._own is not None:
            self._node.spawn(take_over_by_and_by(self._repairer, self._own))

    async def stop(self) -> None:
        """Graceful: calls under way get STOP_GRACE_S, hot host copies go to SSD within `drain_deadline`. Afterwards nothing is left but the
        SSD folder."""
        self.member_state = MemberState.DRAINING
        await self._server.stop(STOP_GRACE_S)
        await self._doors.stop()
        await self._node.stop()
        self.member_state = MemberState.LEFT
        await self._transport.close()
        await self._channels.close()
        self._tiers.close()

    def status(self) -> admin_pb2.StatusResponse:
        status = self._state.status()
        return admin_pb2.StatusResponse(
            node_id=self.config.node_id,
            boot_id=self.boot_id,
            epoch=self._views.view.epoch,
            state=self.member_state.value,
            uptime_ms=int(to_milliseconds(Nanos(self._clock.now() - self._started_at))),
            tiers=[
                admin_pb2.TierStatus(tier=int(usage.tier), capacity_bytes=usage.capacity, used_bytes=usage.used, copies=usage.copies)
                for usage in status.tiers
            ],
            staging=None
            if status.staging is None
            else admin_pb2.StagingStatus(capacity_bytes=status.staging.capacity, used_bytes=status.staging.used),
            blocks=status.blocks,
            leases=status.leases,
            reservations=status.reservations,
            operations=status.operations,
            counters=dict(status.counters),
            cpu_ns=time.process_time_ns(),
            data_connections=dict(self._doors.connections),
            repair=repair_status(self._repairer),
            drain=drain_status(self._handover),
        )

    def _note(self, notes: Sequence[Note]) -> None:
        self._metrics.note(notes)
        self._inventory.note(notes)
        self._feed.note(notes)

    async def _drain(self) -> None:
        if self._own is None:
            raise Unavailable("this node is in no registry: there is nobody to take its stripes")
        if not self.config.repair.rate:
            raise InvalidRequest("repair.rate is 0 on this node: it would hand nothing over")
        if not any(member.state is MemberState.ACTIVE and member.node_id != self.config.node_id for member in self._views.view.stores):
            raise InvalidRequest("no other store is active: there is nobody to take its stripes")
        if self.member_state is not MemberState.DRAINING:
            await self._own.drain()
            self.member_state = MemberState.DRAINING

    def _used_bytes(self, tier: CoreTier) -> int:
        return next(usage.used for usage in self._state.status().tiers if usage.tier is tier)

    def _staging_bytes(self) -> int:
        staging = self._state.status().staging
        return 0 if staging is None else staging.used

    def _hello(self) -> store_pb2.HelloResponse:
        return store_pb2.HelloResponse(
            node_id=self.config.node_id,
            boot_id=self.boot_id,
            epoch=self._views.view.epoch,
            state=self.member_state.value,
            data_port=self._doors.port,
            local_door=self._doors.local_door,
            machine=machine_identity(),
            ucx=self._doors.offers_ucx,
        )

    def _make_repair(self) -> Repair:
        return Repair(
            self._node, node_id=NodeId(self.config.node_id), views=self._views, channels=self._channels, transport=self._transport
        )


def _steps(config: NodeConfig) -> PayloadSteps:
    """Ready for the first block. Imported by a node that steps down alone, for it takes numpy and numba. Raises ConfigError. Cost: that of
    `warm_up`."""
    from kvstore.codec.compilation import warm_up
    from kvstore.codec.klt_tables import load_tables
    from kvstore.codec.step_down import PayloadSteps

    warm_up(step_down=True)
    return PayloadSteps(None if config.step_down_tables is None else load_tables(config.step_down_tables))
