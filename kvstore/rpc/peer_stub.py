"""The peer service of one node as another node sees it: types of ours in, types of ours out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from kvpb.v1 import peer_pb2, peer_pb2_grpc

from kvstore.core.upkeep.surroundings import PeerProgress
from kvstore.errors import Unavailable
from kvstore.ids import HASH_BYTES, BlockHash, BlockRef, Epoch, KeySpace, NodeId, RungCode, StripeId
from kvstore.rpc.calls import answer_of, messages_of
from kvstore.rpc.convert import block_ref_from_proto, key_space_from_proto, key_space_to_proto
from kvstore.units import Bytes, Nanos, milliseconds, to_seconds


@dataclass(frozen=True, slots=True)
class PeerBlock:
    block: BlockRef
    payload_bytes: Bytes
    checksum: int
    ttl: Nanos
    """What is left of its life; 0: no end."""
    rung: RungCode


class PeerStub:
    """Calls on one channel. Every method raises a LarderError; a peer that does not answer is Unavailable."""

    def __init__(self, channel: Any) -> None:
        self._stub = peer_pb2_grpc.PeerServiceStub(channel)

    async def list_owned(self, node_id: NodeId, epoch: Epoch, *, timeout: Nanos) -> AsyncGenerator[tuple[KeySpace, list[PeerBlock]], None]:
        """What the peer holds and `node_id` should hold too."""
        call = self._stub.ListOwned(peer_pb2.ListOwnedRequest(node_id=node_id, epoch=epoch), timeout=to_seconds(timeout))
        async for message in messages_of(call):
            blocks = [
                PeerBlock(
                    block_ref_from_proto(owned.block),
                    Bytes(owned.payload_bytes),
                    owned.checksum_xxh3,
                    milliseconds(owned.ttl_ms),
                    RungCode(owned.rung),
                )
                for owned in message.blocks
            ]
            yield key_space_from_proto(message.key_space), blocks

    async def progress(self, *, timeout: Nanos) -> PeerProgress:
        answer = await answer_of(self._stub.Progress(peer_pb2.ProgressRequest(), timeout=to_seconds(timeout)))
        return PeerProgress(Epoch(answer.settled_epoch), answer.blocks)

    async def holds(self, key_space: KeySpace, hashes: Sequence[BlockHash], *, verify: bool, epoch: Epoch, timeout: Nanos) -> list[bool]:
        """One answer per hash, in order. `verify`: a copy that does not read back as stored does not count. Raises StaleView when the peer
        does not know that epoch yet."""
        request = peer_pb2.HoldsRequest(key_space=key_space_to_proto(key_space), hashes=b"".join(hashes), verify=verify, epoch=epoch)
        answer = await answer_of(self._stub.Holds(request, timeout=to_seconds(timeout)))
        if len(answer.held) != len(hashes):
            raise Unavailable(f"the node answered {len(answer.held)} items to {len(hashes)} asked: not a peer of this version")
        return [byte == 1 for byte in answer.held]

    async def compare_buckets(
        self, node_id: NodeId, epoch: Epoch, first_bucket: int, digests: Sequence[int], *, timeout: Nanos
    ) -> dict[int, int]:
        """Buckets that differ -> the peer's digest. Raises StaleView when the peer has another view."""
        request = peer_pb2.CompareRequest(node_id=node_id, epoch=epoch, first_bucket=first_bucket, digests=digests)
        answer = await answer_of(self._stub.CompareBuckets(request, timeout=to_seconds(timeout)))
        return dict(zip(answer.buckets, answer.digests, strict=False))

    async def list_stripes(self, node_id: NodeId, epoch: Epoch, bucket: int, *, timeout: Nanos) -> dict[StripeId, int]:
        """The peer's stripes of a bucket that both own -> which of their blocks it has, as a digest."""
        found: dict[StripeId, int] = {}
        request = peer_pb2.StripesRequest(node_id=node_id, epoch=epoch, bucket=bucket)
        async for message in messages_of(self._stub.ListStripes(request, timeout=to_seconds(timeout))):
            for number, digest in enumerate(message.digests):
                found[StripeId(message.stripes[number * HASH_BYTES : (number + 1) * HASH_BYTES])] = digest
        return found
