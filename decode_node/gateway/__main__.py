"""`python -m decode_node.gateway`: the HTTP door of a cluster."""

from __future__ import annotations

import asyncio

from decode_node.gateway.app import create_app
from decode_node.gateway.backends import GrpcBackends
from decode_node.gateway.config import GatewayConfig
from decode_node.gateway.fleet import Fleet
from decode_node.gateway.http_server import HttpServer
from decode_node.gateway.metrics import GatewayMetrics
from decode_node.gateway.service import GatewayService
from kvstore.client import ClientConfig, StoreClient
from kvstore.clock import SystemClock
from kvstore.process import announce_ready, listening_socket, run_process
from kvstore.registry import RedisRegistry
from kvstore.telemetry import start_metrics_server
from prefill_node.model.resolve import model_name, resolve_model
from prefill_node.model.tokenizer import load_tokenizer


async def serve(config: GatewayConfig) -> None:
    """Serve until cancelled. Raises ConfigError when a port is taken, Redis is not there, or the model has no tokenizer."""
    sock = listening_socket(config.host, config.http_port, key="http_port")
    metrics_port = start_metrics_server(config.host, config.metrics_port)
    async with RedisRegistry(config.redis_url) as registry:
        folder = await asyncio.to_thread(resolve_model, config.model, cache_dir=config.cache_dir)
        tokenizer = await asyncio.to_thread(load_tokenizer, folder)
        store = StoreClient(registry, replicas=config.replicas, config=ClientConfig(rpc_timeout=config.timeouts.probe))
        try:
            async with asyncio.TaskGroup() as group:
                fleet = Fleet(
                    registry,
                    GrpcBackends(),
                    clock=SystemClock(),
                    poll_every=config.timeouts.poll_every,
                    poll_timeout=config.timeouts.poll,
                    replicas=config.replicas,
                    registry_answers=lambda: registry.connected,
                )
                following = group.create_task(fleet.run())
                service = GatewayService(
                    config,
                    model_name=config.served_model_name or model_name(folder),
                    tokenizer=tokenizer,
                    fleet=fleet,
                    store=store,
                    metrics=GatewayMetrics(),
                    clock=SystemClock(),
                )
                server = HttpServer(create_app(service), sock, head_timeout=config.timeouts.head, stop_grace=config.timeouts.stop)
                await fleet.first_look()
                announce_ready(
                    config.node_id,
                    "gateway",
                    http=f"{config.host}:{sock.getsockname()[1]}",
                    metrics=f"{config.host}:{metrics_port}",
                )
                try:
                    await server.serve()
                finally:
                    following.cancel()
        finally:
            await store.close()


if __name__ == "__main__":
    run_process(serve, GatewayConfig, "decode_node.gateway")
