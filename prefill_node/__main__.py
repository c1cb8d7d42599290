"""`python -m prefill_node`: one prefill node."""

from __future__ import annotations

import prefill_node.model.offline  # noqa: F401  # sets the environment that torch reads when it is imported

# isort: split

import asyncio
from typing import Any

from kvpb.v1 import prefill_pb2_grpc

from kvstore.core.view import Role
from kvstore.process import run_process
from kvstore.registry import RedisRegistry, RegistryConfig
from prefill_node.compute_node import ComputeNode
from prefill_node.config import PrefillConfig
from prefill_node.member import serve_member
from prefill_node.model.load import load_model
from prefill_node.model.resolve import resolve_model
from prefill_node.servicer import PrefillServicer


async def serve(config: PrefillConfig) -> None:
    async with RedisRegistry(config.redis_url, config=RegistryConfig(lease_ttl=config.member_ttl)) as registry:
        path = await asyncio.to_thread(resolve_model, config.model, cache_dir=config.cache_dir)
        model = await asyncio.to_thread(load_model, path, device=config.device, dtype=config.dtype, block_tokens=config.block_tokens)
        async with ComputeNode.opened(config, model, registry, role=Role.PREFILL, publish_wait=config.publish_wait) as node:

            def add_services(server: Any) -> None:
                prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(node), server)

            await serve_member(node, registry, add_services=add_services)


if __name__ == "__main__":
    run_process(serve, PrefillConfig, "prefill_node")
