"""A prefill node from its model on."""

from __future__ import annotations

import prefill_node.model.offline  # noqa: F401  # sets the environment that torch reads when it is imported

# isort: split

import asyncio

from kvpb.v1 import prefill_pb2_grpc

from kvstore.core.view import Role
from prefill_node.compute_node import ComputeNode
from prefill_node.config import PrefillConfig
from prefill_node.member import serve_member
from prefill_node.model.load import load_model
from prefill_node.servicer import PrefillServicer
from prefill_node.start import Start


async def serve_prefill(config: PrefillConfig, start: Start) -> None:
    """Serve until cancelled."""
    model = await asyncio.to_thread(
        load_model, start.model_folder, device=config.device, dtype=config.dtype, block_tokens=config.block_tokens
    )
    async with ComputeNode.opened(config, model, start.registry, role=Role.PREFILL, publish_wait=config.publish_wait) as node:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(node), start.server)
        await serve_member(node, start)
