"""A compute node as a member of the cluster: serves gRPC, is in the registry, and goes when it is told to."""

from __future__ import annotations

import logging
import os

from kvpb.v1 import compute_pb2_grpc

from kvstore.core.view import Member
from kvstore.errors import LarderError
from kvstore.ids import BOOT_ID_BYTES, BootId, NodeId
from kvstore.process import announce_ready
from kvstore.registry import RedisRegistry
from kvstore.units import Bytes
from prefill_node.admin_servicer import ComputeAdminServicer
from prefill_node.compute_node import ComputeNode
from prefill_node.start import Start

log = logging.getLogger(__name__)

CALLS_END_S = 1.0
"""What calls get to end by themselves after the drain; whatever is left is cut."""


async def serve_member(node: ComputeNode, start: Start) -> None:
    """Serve until cancelled; then drain, leave and close. The server has its services. Raises ConfigError when Redis is not there, or
    another process takes the node id over."""
    config, registry = node.config, start.registry
    compute_pb2_grpc.add_ComputeAdminServiceServicer_to_server(ComputeAdminServicer(node.sessions, registry), start.server)
    await start.server.start()
    try:
        await registry.join(
            Member(
                node_id=NodeId(config.node_id),
                boot_id=BootId(os.urandom(BOOT_ID_BYTES)),
                role=node.role,
                address=start.address,
                zone=config.zone,
                capacity_bytes=Bytes(config.pool_blocks * node.model.layout.block_bytes),
            )
        )
        announce_ready(config.node_id, node.role, rpc=start.address, metrics=start.metrics_address)
        try:
            await registry.until_superseded()
        finally:
            await _go(node, registry)
    finally:
        await start.server.stop(CALLS_END_S)


async def _go(node: ComputeNode, registry: RedisRegistry) -> None:
    """First tell the registry, so that the sessions let go do not come back here."""
    try:
        await registry.drain()
    except LarderError as error:
        log.warning("the registry was not told of the drain: %s", error)
    await node.sessions.all_left(timeout=node.config.drain_leave)
    await node.drain()
    try:
        await registry.leave()
    except LarderError as error:
        log.warning("the registry was not told of the leave: %s", error)
