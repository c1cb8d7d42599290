"""The peer service: what other store nodes call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvpb.v1 import peer_pb2, peer_pb2_grpc, store_pb2

from kvstore.core.events import (
    AnswerList,
    ListRequested,
    OwnedBlock,
)
from kvstore.core.placement import place
from kvstore.errors import InvalidRequest, StaleView
from kvstore.ids import NodeId, StripeId
from kvstore.node.config import NodeConfig
from kvstore.node.node import Node
from kvstore.registry.view_source import ViewSource
from kvstore.rpc.convert import block_ref_to_proto, key_space_to_proto
from kvstore.rpc.server import guarded
from kvstore.units import milliseconds

_BLOCKS_PER_MESSAGE = 1024


class PeerServicer(peer_pb2_grpc.PeerServiceServicer):  # type: ignore[misc]  # generated code has no types
    def __init__(self, node: Node, *, config: NodeConfig, views: ViewSource, hello: Callable[[], store_pb2.HelloResponse]) -> None:
        self._node = node
        self._config = config
        self._views = views
        self._hello = hello

    @guarded
    async def Hello(self, request: store_pb2.HelloRequest, context: Any) -> store_pb2.HelloResponse:
        return self._hello()

    @guarded
    async def ListOwned(self, request: peer_pb2.ListOwnedRequest, context: Any) -> None:
        view = self._views.view
        if request.epoch > view.epoch:
            raise StaleView(f"this node knows epoch {view.epoch}, the question is about {request.epoch}; ask again in a moment")
        if view.member(NodeId(request.node_id)) is None:
            raise InvalidRequest(f"node {request.node_id!r} is not a member at epoch {view.epoch}")
        answer = await self._node.ask(ListRequested(request_id=self._node.next_request_id()), AnswerList)
        owners: dict[StripeId, bool] = {}

        def is_owned(stripe: StripeId) -> bool:
            if stripe not in owners:
                owners[stripe] = request.node_id in place(stripe, view, replicas=self._config.replicas)
            return owners[stripe]

        for key_space, blocks in answer.blocks:
            owned = [block for block in blocks if is_owned(block.block.stripe)]
            for part in _parts(owned):
                await context.write(
                    peer_pb2.OwnedBlocks(key_space=key_space_to_proto(key_space), blocks=[_owned_to_proto(block) for block in part])
                )


def _owned_to_proto(owned: OwnedBlock) -> peer_pb2.OwnedBlock:
    return peer_pb2.OwnedBlock(
        block=block_ref_to_proto(owned.block),
        payload_bytes=owned.payload_bytes,
        checksum_xxh3=owned.checksum,
        ttl_ms=-(-owned.ttl // milliseconds(1)),
    )


def _parts(blocks: Sequence[OwnedBlock]) -> Iterator[Sequence[OwnedBlock]]:
    for start in range(0, len(blocks), _BLOCKS_PER_MESSAGE):
        yield blocks[start : start + _BLOCKS_PER_MESSAGE]
