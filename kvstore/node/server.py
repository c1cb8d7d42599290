"""One store node, assembled: tiers, core, shell, services, port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable

from kvpb.v1 import admin_pb2, admin_pb2_grpc, peer_pb2_grpc, store_pb2, store_pb2_grpc
from prometheus_client import CollectorRegistry

from kvstore.clock import Clock, SystemClock
from kvstore.core.store_state import StoreState
from kvstore.core.view import Member, MemberState, Role
from kvstore.ids import BOOT_ID_BYTES, BootId, NodeId
from kvstore.node.admin_servicer import AdminServicer
from kvstore.node.config import NodeConfig
from kvstore.node.metrics import NodeMetrics
from kvstore.node.node import Node
from kvstore.node.peer_servicer import PeerServicer
from kvstore.node.recovery import RecoveryReport, recover
from kvstore.node.repair import Repair
from kvstore.node.servicer import StoreServicer
from kvstore.registry.view_source import ViewSource
from kvstore.rpc.channel import ChannelPool
from kvstore.rpc.server import bind, make_server
from kvstore.tiers.host import HostArena
from kvstore.tiers.ssd import SsdRegions
from kvstore.tiers.tier import Tier
from kvstore.units import Bytes, to_milliseconds

logger = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
"""Calls under way at a stop get this long to end by themselves."""
METRICS_EVERY_S = 1.0


class NodeServer:
    """Life: `start` -> serving -> `drain` (optional) -> `stop`. Knows the view, but not how it is a member of it."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        views: ViewSource,
        clock: Clock | None = None,
        metrics_registry: CollectorRegistry | None = None,
        wrap_ssd: Callable[[SsdRegions], Tier] = lambda regions: regions,
    ) -> None:
        """Raises ConfigError when a tier cannot be had. `wrap_ssd` puts something between the node and its disk: faults."""
        self.config = config
        self.boot_id = BootId(secrets.token_bytes(BOOT_ID_BYTES))
        self.state = MemberState.JOINING
        self.recovery = RecoveryReport()
        self._views = views
        self._clock = clock or SystemClock()
        self._metrics = NodeMetrics(metrics_registry or CollectorRegistry())
        self._started = self._clock.now()
        self._resources = contextlib.ExitStack()
        try:
            self.host = HostArena(config.host_capacity)
            self._resources.callback(self.host.close)
            self._regions: SsdRegions | None = None
            self._ssd: Tier | None = None
            if config.ssd_path is not None:
                self._regions = SsdRegions(config.ssd_path, capacity=config.ssd_capacity, region_bytes=config.region_bytes)
                self._ssd = wrap_ssd(self._regions)
                self._resources.callback(self._ssd.close)
        except BaseException:
            self._resources.close()
            raise
