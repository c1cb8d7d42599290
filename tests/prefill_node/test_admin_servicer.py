"""An operator drains a node over real gRPC: the registry is told first, then the calls are counted out."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, aclosing

import grpc.aio
import pytest
from kvpb.v1 import compute_pb2_grpc

from kvstore.errors import LarderError, Unavailable
from kvstore.rpc.compute_stub import drain_calls
from kvstore.rpc.server import bind, make_server
from kvstore.units import seconds
from prefill_node.admin_servicer import ComputeAdminServicer
from prefill_node.live_sessions import LiveSessions


class Registry:
    """Stands where the Redis registry stands."""

    def __init__(self) -> None:
        self.drains = 0
        self.failure: LarderError | None = None

    async def drain(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.drains += 1


class Call:
    def halt(self) -> None:
        raise AssertionError("a drain by an operator cuts nothing")

    def end(self, error: LarderError) -> None:
        raise AssertionError("a drain by an operator cuts nothing")


def test_a_drain_tells_the_registry_and_counts_the_calls_out_without_cutting_one() -> None:
    async def main() -> None:
        sessions, registry, server = LiveSessions(), Registry(), make_server()
        servicer = ComputeAdminServicer(sessions, registry)  # type: ignore[arg-type]
        compute_pb2_grpc.add_ComputeAdminServiceServicer_to_server(servicer, server)
        port = bind(server, host="127.0.0.1", port=0)
        await server.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        try:
            calls = [ExitStack() for _ in range(2)]
            for call in calls:
                call.enter_context(sessions.entered(Call()))
            left = []
            async with aclosing(drain_calls(channel, timeout=seconds(60))) as progress:
                async for count in progress:
                    assert registry.drains == 1
                    left.append(count)
                    if calls:
                        calls.pop().close()
            assert left == [2, 1, 0]
            registry.failure = Unavailable("Redis is away")
            with pytest.raises(Unavailable, match="Redis is away"):
                await anext(drain_calls(channel, timeout=seconds(60)))
        finally:
            await channel.close()
            await server.stop(0)

    asyncio.run(main())
