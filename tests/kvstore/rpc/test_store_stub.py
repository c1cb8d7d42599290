"""Answers that no node of this version gives are an absent peer, not an exception of another kind, and nothing is made room for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kvpb.v1 import store_pb2, store_pb2_grpc

from kvstore.errors import Unavailable
from kvstore.ids import BlockHash, BlockRef, KeySpace, LayoutFingerprint, Namespace, StripeId
from kvstore.rpc.channel import open_channel
from kvstore.rpc.server import bind, make_server
from kvstore.rpc.store_stub import StoreStub
from kvstore.units import Bytes, seconds

KEY_SPACE = KeySpace(Namespace("acme"), LayoutFingerprint(b"L" * 32))
REF = BlockRef(BlockHash(b"h" * 32), BlockHash(b"p" * 32), StripeId(b"h" * 32), 0)
SOON = seconds(20)


class Liar(store_pb2_grpc.StoreServiceServicer):  # type: ignore[misc]  # generated code has no types
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def _say(self, request: Any, context: Any) -> Any:
        return self._answer

    Hello = Reserve = Commit = AcquirePrefix = ProbePrefix = _say


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda stub: stub.hello(timeout=SOON), store_pb2.HelloResponse(data_port=65536)),
        (lambda stub: stub.hello(timeout=SOON), store_pb2.HelloResponse(data_port=(1 << 32) - 1)),
        *[
            (
                lambda stub: stub.acquire_prefix(KEY_SPACE, [REF], ttl=None, timeout=SOON),
                store_pb2.AcquirePrefixResponse(lease_id=1, blocks=[block]),
            )
            for block in (
                store_pb2.AcquiredBlock(found=True, tier="TIER_HOST", payload_bytes=1 << 32),
                store_pb2.AcquiredBlock(found=True, tier="TIER_HOST", payload_bytes=(1 << 64) - 1),
                store_pb2.AcquiredBlock(found=True, tier=99, payload_bytes=1),
            )
        ],
        (lambda stub: stub.acquire_prefix(KEY_SPACE, [REF], ttl=None, timeout=SOON), store_pb2.AcquirePrefixResponse(lease_id=1)),
        (
            lambda stub: stub.reserve(KEY_SPACE, [(REF, Bytes(1))], timeout=SOON),
            store_pb2.ReserveResponse(grants=[store_pb2.ReserveGrant(status=99)]),
        ),
        (lambda stub: stub.reserve(KEY_SPACE, [(REF, Bytes(1))], timeout=SOON), store_pb2.ReserveResponse()),
        (lambda stub: stub.commit([(1, 2)], timeout=SOON), store_pb2.CommitResponse(statuses=[99])),
        (lambda stub: stub.commit([(1, 2)], timeout=SOON), store_pb2.CommitResponse(statuses=[1, 1])),
        (lambda stub: stub.probe_prefix(KEY_SPACE, [REF], timeout=SOON), store_pb2.ProbePrefixResponse(present=[True] * 3)),
    ],
)
def test_an_answer_that_cannot_be_is_an_absent_peer(ask: Any, answer: Any) -> None:
    async def test() -> None:
        server = make_server()
        store_pb2_grpc.add_StoreServiceServicer_to_server(Liar(answer), server)
        port = bind(server, host="127.0.0.1", port=0)
        await server.start()
        channel = open_channel(f"127.0.0.1:{port}")
        try:
            with pytest.raises(Unavailable, match="not a peer of this version"):
                await ask(StoreStub(channel))
        finally:
            await channel.close()
            await server.stop(None)

    asyncio.run(test())
