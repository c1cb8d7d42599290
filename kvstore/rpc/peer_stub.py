"""The peer service of one node as another node sees it: types of ours in, types of ours out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from kvpb.v1 import peer_pb2, peer_pb2_grpc

from kvstore.ids import BlockRef, Epoch, KeySpace, NodeId
from kvstore.rpc.convert import block_ref_from_proto, key_space_from_proto
from kvstore.rpc.errors import error_of
from kvstore.units import Bytes, Nanos, milliseconds, to_seconds


@dataclass(frozen=True, slots=True)
class PeerBlock:
    block: BlockRef
    payload_bytes: Bytes
    checksum: int
    ttl: Nanos
    """What is left of its life; 0: no end."""


class PeerStub:
    """Calls on one channel. Every method raises a LarderError; a peer that does not answer is Unavailable."""

    def __init__(self, channel: Any) -> None:
        self._stub = peer_pb2_grpc.PeerServiceStub(channel)

    async def list_owned(self, node_id: NodeId, epoch: Epoch, *, timeout: Nanos) -> AsyncGenerator[tuple[KeySpace, list[PeerBlock]], None]:
        """What the peer holds and `node_id` should hold too."""
        call = self._stub.ListOwned(peer_pb2.ListOwnedRequest(node_id=node_id, epoch=epoch), timeout=to_seconds(timeout))
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                blocks = [
                    PeerBlock(
                        block_ref_from_proto(owned.block), Bytes(owned.payload_bytes), owned.checksum_xxh3, milliseconds(owned.ttl_ms)
                    )
                    for owned in message.blocks
                ]
                yield key_space_from_proto(message.key_space), blocks
        except grpc.RpcError as error:
            raise error_of(error) from None
        finally:
            call.cancel()
