"""The peer service: what other store nodes call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from kvpb.v1 import peer_pb2, peer_pb2_grpc, store_pb2

from kvstore.core.events.questions import OwnedBlock
from kvstore.core.placement import place
from kvstore.core.upkeep.peer_answers import PeerAnswers
from kvstore.errors import InvalidRequest, StaleView
from kvstore.ids import HASH_BYTES, BlockHash, Epoch, KeySpace, NodeId, StripeId
from kvstore.node.config import NodeConfig
from kvstore.node.node import Node
from kvstore.node.walk import walk
from kvstore.registry.view_source import ViewSource
from kvstore.rpc.convert import block_ref_to_proto, check_batch, key_space_from_proto, key_space_to_proto
from kvstore.rpc.server import guarded
from kvstore.units import milliseconds

_BLOCKS_PER_MESSAGE = 1024
_STRIPES_PER_MESSAGE = 1024


class PeerServicer(peer_pb2_grpc.PeerServiceServicer):  # type: ignore[misc]  # generated code has no types
    def __init__(
        self, node: Node, answers: PeerAnswers, *, config: NodeConfig, views: ViewSource, hello: Callable[[], store_pb2.HelloResponse]
    ) -> None:
        self._node = node
        self._answers = answers
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
        owners: dict[StripeId, bool] = {}

        def is_owned(stripe: StripeId) -> bool:
            if stripe not in owners:
                owners[stripe] = request.node_id in place(stripe, view, replicas=self._config.replicas)
            return owners[stripe]

        part: list[peer_pb2.OwnedBlock] = []
        of: KeySpace | None = None
        async with aclosing(walk(self._node)) as blocks:
            async for key_space, owned in blocks:
                if part and (key_space != of or len(part) == _BLOCKS_PER_MESSAGE):
                    assert of is not None
                    await context.write(peer_pb2.OwnedBlocks(key_space=key_space_to_proto(of), blocks=part))
                    part = []
                of = key_space
                if is_owned(owned.block.stripe):
                    part.append(_owned_to_proto(owned))
        if part and of is not None:
            await context.write(peer_pb2.OwnedBlocks(key_space=key_space_to_proto(of), blocks=part))

    @guarded
    async def Progress(self, request: peer_pb2.ProgressRequest, context: Any) -> peer_pb2.ProgressResponse:
        progress = self._answers.progress()
        return peer_pb2.ProgressResponse(settled_epoch=progress.settled_epoch, blocks=progress.blocks)

    @guarded
    async def Holds(self, request: peer_pb2.HoldsRequest, context: Any) -> peer_pb2.HoldsResponse:
        key_space = key_space_from_proto(request.key_space)
        if len(request.hashes) % HASH_BYTES:
            raise InvalidRequest(f"hashes must have {HASH_BYTES} bytes each: {len(request.hashes)}")
        hashes = tuple(BlockHash(request.hashes[at : at + HASH_BYTES]) for at in range(0, len(request.hashes), HASH_BYTES))
        check_batch(hashes, "hashes")
        return peer_pb2.HoldsResponse(
            held=bytes(await self._answers.holds(key_space, hashes, verify=request.verify, epoch=Epoch(request.epoch)))
        )

    @guarded
    async def CompareBuckets(self, request: peer_pb2.CompareRequest, context: Any) -> peer_pb2.CompareResponse:
        differing = await self._answers.compare_buckets(
            NodeId(request.node_id), Epoch(request.epoch), request.first_bucket, request.digests
        )
        return peer_pb2.CompareResponse(buckets=list(differing), digests=list(differing.values()))

    @guarded
    async def ListStripes(self, request: peer_pb2.StripesRequest, context: Any) -> None:
        shared = list((await self._answers.list_stripes(NodeId(request.node_id), Epoch(request.epoch), request.bucket)).items())
        for start in range(0, len(shared), _STRIPES_PER_MESSAGE):
            part = shared[start : start + _STRIPES_PER_MESSAGE]
            await context.write(
                peer_pb2.StripeDigests(stripes=b"".join(stripe for stripe, _ in part), digests=[digest for _, digest in part])
            )


def _owned_to_proto(owned: OwnedBlock) -> peer_pb2.OwnedBlock:
    return peer_pb2.OwnedBlock(
        block=block_ref_to_proto(owned.block),
        payload_bytes=owned.payload_bytes,
        checksum_xxh3=owned.checksum,
        ttl_ms=-(-owned.ttl // milliseconds(1)),
        rung=owned.rung,
    )
