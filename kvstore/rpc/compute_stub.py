"""The administration of prefill and decode nodes, as kvctl calls it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio
from kvpb.v1 import compute_pb2, compute_pb2_grpc

from kvstore.rpc.errors import error_of
from kvstore.units import Nanos, to_seconds


async def drain_calls(channel: Any, *, timeout: Nanos) -> AsyncGenerator[int, None]:
    """Have a node leave the cluster's work; yields how many calls are left, the last time 0. Raises a LarderError, also when `timeout`
    has passed: then the node is draining all the same."""
    stub: Any = compute_pb2_grpc.ComputeAdminServiceStub(channel)
    try:
        async for progress in stub.DrainCalls(compute_pb2.DrainCallsRequest(), timeout=to_seconds(timeout)):
            yield progress.live_calls
    except grpc.RpcError as error:
        raise error_of(error) from None
