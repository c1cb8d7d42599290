"""The start of a compute node, up to where torch is imported: what an operator can get wrong is said within a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.registry import RedisRegistry, RegistryConfig
from kvstore.rpc.server import bind, make_server
from kvstore.telemetry import start_metrics_server
from prefill_node.config import ComputeConfig
from prefill_node.model.resolve import resolve_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    registry: RedisRegistry
    server: Any
    """A grpc.aio.Server that has its port, and neither services nor calls."""
    address: str
    metrics_address: str
    model_folder: Path


@asynccontextmanager
async def started(config: ComputeConfig) -> AsyncIterator[Start]:
    """Raises ConfigError when a port is taken, Redis is not there, or there is no such model."""
    async with RedisRegistry(config.redis_url, config=RegistryConfig(lease_ttl=config.member_ttl)) as registry:
        server = make_server()
        port = bind(server, host=config.host, port=config.port)
        metrics_port = start_metrics_server(config.host, config.metrics_port)
        yield Start(
            registry=registry,
            server=server,
            address=f"{config.host}:{port}",
            metrics_address=f"{config.host}:{metrics_port}",
            model_folder=await asyncio.to_thread(resolve_model, config.model, cache_dir=config.cache_dir),
        )
