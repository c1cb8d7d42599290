"""A compute node as a member of the cluster: serves gRPC, is in the registry, and goes when it is told to."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from kvstore.core.view import Member
from kvstore.errors import LarderError
from kvstore.ids import BOOT_ID_BYTES, BootId, NodeId
from kvstore.process import announce_ready
from kvstore.registry import RedisRegistry
from kvstore.rpc.server import bind, make_server
from kvstore.telemetry import start_metrics_server
from kvstore.units import Bytes
from prefill_node.compute_node import ComputeNode

log = logging.getLogger(__name__)

CALLS_END_S = 1.0
"""What calls get to end by themselves after the drain; whatever is left is cut."""


async def serve_member(node: ComputeNode, registry: RedisRegistry, *, add_services: Callable[[Any], None]) -> None:
    """Serve until cancelled; then drain, leave and close. Raises ConfigError when a port is taken, Redis is not there, or another process
    takes the node id over."""
    config = node.config
    server = make_server()
    add_services(server)
    port = bind(server, host=config.host, port=config.port)
    metrics_port = start_metrics_server(config.host, config.metrics_port)
    address = f"{config.host}:{port}"
    await server.start()
    try:
        await registry.join(
            Member(
                node_id=NodeId(config.node_id),
                boot_id=BootId(os.urandom(BOOT_ID_BYTES)),
                role=node.role,
                address=address,
                zone=config.zone,
                capacity_bytes=Bytes(config.pool_blocks * node.model.layout.block_bytes),
            )
        )
        announce_ready(config.node_id, node.role, rpc=address, metrics=f"{config.host}:{metrics_port}")
        try:
            await registry.until_superseded()
        finally:
            await _go(node, registry)
    finally:
        await server.stop(CALLS_END_S)


async def _go(node: ComputeNode, registry: RedisRegistry) -> None:
    """First tell the registry, so that the sessions let go do not come back here."""
    try:
        await registry.drain()
    except LarderError as error:
        log.warning("the registry was not told of the drain: %s", error)
    await node.drain()
    try:
        await registry.leave()
    except LarderError as error:
        log.warning("the registry was not told of the leave: %s", error)
