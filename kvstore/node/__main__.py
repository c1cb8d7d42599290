"""A store node as a process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import prometheus_client

from kvstore.errors import LarderError
from kvstore.node.config import NodeConfig
from kvstore.node.garbage import collect_garbage
from kvstore.node.server import NodeServer
from kvstore.process import announce_ready, run_process
from kvstore.registry.redis_registry import RedisRegistry
from kvstore.telemetry import start_metrics_server


async def main(config: NodeConfig) -> None:
    async with RedisRegistry(config.redis_url, config=config.registry) as registry:
        server = NodeServer(config, views=registry, own=registry, metrics_registry=prometheus_client.REGISTRY)
        await server.start()
        try:
            metrics_port = start_metrics_server(config.host, config.metrics_port)
            await registry.join(dataclasses.replace(server.member(), takeover=await server.first_takeover()))
            await registry.serve()
            server.serves()
            announce_ready(config.node_id, "store", rpc=server.address, metrics=f"{config.host}:{metrics_port}")
            async with asyncio.TaskGroup() as group:  # whichever raises first ends the others
                group.create_task(server.node.until_crash())
                group.create_task(registry.until_superseded())
                group.create_task(collect_garbage())
        finally:
            await _stop(server, registry)


async def _stop(server: NodeServer, registry: RedisRegistry) -> None:
    """Others are told first, so that they ask elsewhere while this node saves what is hot. A Redis that is away does not hold it up."""
    joined = registry.member is not None
    if joined:
        with contextlib.suppress(LarderError):
            await registry.drain()
    await server.stop()
    if joined:
        with contextlib.suppress(LarderError):
            await registry.leave()


if __name__ == "__main__":
    run_process(main, NodeConfig, "kvstore.node")
