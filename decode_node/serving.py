"""A decode node from its model on."""

from __future__ import annotations

import prefill_node.model.offline  # noqa: F401  # sets the environment that torch reads when it is imported

# isort: split

import asyncio

from kvpb.v1 import decode_pb2_grpc, prefill_pb2_grpc

from decode_node.config import DecodeConfig
from decode_node.fetch_plan import FetchPolicy
from decode_node.loader import PrefixLoader
from decode_node.servicer import DecodeServicer
from kvstore.core.view import Role
from prefill_node.compute_node import ComputeNode
from prefill_node.member import serve_member
from prefill_node.model.load import load_model
from prefill_node.servicer import PrefillServicer
from prefill_node.start import Start


async def serve_decode(config: DecodeConfig, start: Start) -> None:
    """Serve until cancelled."""
    model = await asyncio.to_thread(
        load_model, start.model_folder, device=config.device, dtype=config.dtype, block_tokens=config.block_tokens
    )
    async with ComputeNode.opened(config, model, start.registry, role=Role(config.roles), publish_wait=None) as node:
        loader = PrefixLoader(node, policy=FetchPolicy(max_wait=config.load_max_wait, patience=config.load_patience))
        servicer = DecodeServicer(node, loader, heartbeat_every=config.heartbeat_every)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, start.server)
        if node.role is Role.BOTH:
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(node), start.server)
        await serve_member(node, start)
