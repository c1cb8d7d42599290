"""The load answers of prefill and decode nodes, for those who only look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpb.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

from kvstore.rpc.calls import answer_of
from kvstore.units import Nanos, to_seconds


@dataclass(frozen=True, slots=True)
class EngineReport:
    node_id: str
    model: str
    running: int
    queued: int
    tokens_per_s: float
    """Measured; 0 before the first request."""
    free_pool_blocks: int | None
    """None: a prefill node does not say."""
    total_pool_blocks: int | None


async def decode_load(channel: Any, *, timeout: Nanos) -> EngineReport:
    """Raises a LarderError when the node does not answer."""
    stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
    answer = await answer_of(stub.Load(decode_pb2.DecodeLoadRequest(), timeout=to_seconds(timeout)))
    return EngineReport(
        node_id=answer.node_id,
        model=answer.model,
        running=answer.running,
        queued=answer.queued,
        tokens_per_s=answer.tokens_per_s,
        free_pool_blocks=answer.free_pool_blocks,
        total_pool_blocks=answer.total_pool_blocks,
    )


async def prefill_load(channel: Any, *, timeout: Nanos) -> EngineReport:
    """Raises a LarderError when the node does not answer."""
    stub: Any = prefill_pb2_grpc.PrefillServiceStub(channel)
    answer = await answer_of(stub.Load(prefill_pb2.PrefillLoadRequest(), timeout=to_seconds(timeout)))
    return EngineReport(
        node_id=answer.node_id,
        model=answer.model,
        running=answer.running,
        queued=answer.queued,
        tokens_per_s=answer.tokens_per_s,
        free_pool_blocks=None,
        total_pool_blocks=None,
    )
