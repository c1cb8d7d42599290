"""`python -m decode_node`: one decode node."""

from __future__ import annotations

import prefill_node.model.offline  # noqa: F401  # sets the environment that torch reads when it is imported

# isort: split

import asyncio
from typing import Any

from kvpb.v1 import decode_pb2_grpc

from decode_node.config import DecodeConfig
from decode_node.fetch_plan import FetchPolicy
from decode_node.loader import PrefixLoader
from decode_node.servicer import DecodeServicer
from kvstore.core.view import Role
from kvstore.process import run_process
from kvstore.registry import RedisRegistry, RegistryConfig
from prefill_node.compute_node import ComputeNode
from prefill_node.member import serve_member
from prefill_node.model.load import load_model
from prefill_node.model.resolve import resolve_model


async def serve(config: DecodeConfig) -> None:
    async with RedisRegistry(config.redis_url, config=RegistryConfig(lease_ttl=config.member_ttl)) as registry:
        path = await asyncio.to_thread(resolve_model, config.model, cache_dir=config.cache_dir)
        model = await asyncio.to_thread(load_model, path, device=config.device, dtype=config.dtype, block_tokens=config.block_tokens)
        async with ComputeNode.opened(config, model, registry, role=Role.DECODE, publish_wait=None) as node:
            loader = PrefixLoader(node, policy=FetchPolicy(max_wait=config.load_max_wait, patience=config.load_patience))

            def add_services(server: Any) -> None:
                servicer = DecodeServicer(node, loader, heartbeat_every=config.heartbeat_every)
                decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)

            await serve_member(node, registry, add_services=add_services)


if __name__ == "__main__":
    run_process(serve, DecodeConfig, "decode_node")
