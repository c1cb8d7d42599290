"""The administration of prefill and decode nodes, as kvctl calls it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from kvpb.v1 import compute_pb2, compute_pb2_grpc

from kvstore.rpc.calls import messages_of
from kvstore.units import Nanos, to_seconds


async def drain_calls(channel: Any, *, timeout: Nanos) -> AsyncGenerator[int, None]:
    """Have a node leave the cluster's work; yields how many calls are left, the last time 0. Raises a LarderError, also when `timeout`
    has passed: then the node is draining all the same."""
    stub: Any = compute_pb2_grpc.ComputeAdminServiceStub(channel)
    async for progress in messages_of(stub.DrainCalls(compute_pb2.DrainCallsRequest(), timeout=to_seconds(timeout))):
        yield progress.live_calls
