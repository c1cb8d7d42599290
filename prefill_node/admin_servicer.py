"""ComputeAdminService on the wire: what an operator may ask of a prefill or decode node."""

from __future__ import annotations

from typing import Any

from kvpb.v1 import compute_pb2, compute_pb2_grpc

from kvstore.registry import RedisRegistry
from kvstore.rpc.server import guarded
from prefill_node.live_sessions import LiveSessions


class ComputeAdminServicer(compute_pb2_grpc.ComputeAdminServiceServicer):  # type: ignore[misc]  # generated code has no types
    def __init__(self, sessions: LiveSessions, registry: RedisRegistry) -> None:
        self._sessions = sessions
        self._registry = registry

    @guarded
    async def DrainCalls(self, request: compute_pb2.DrainCallsRequest, context: Any) -> None:
        """Calls that still come are served: who sends them has not seen the new view yet."""
        await self._registry.drain()
        while live := len(self._sessions):
            await context.write(compute_pb2.DrainCallsProgress(live_calls=live))
            await self._sessions.changed(live)
        await context.write(compute_pb2.DrainCallsProgress(live_calls=0))
