from __future__ import annotations

import asyncio
import socket

import pytest

from kvstore.transport import stream
from kvstore.transport.stream import Stream
from kvstore.units import MIB, Nanos, seconds


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was done, the time for it is over."""
    monkeypatch.setattr(stream, "_TURN", Nanos(0))


def test_payloads_that_lie_ready_are_not_received_in_one_go(no_time: None) -> None:
    """Others on the loop have their turn between two of them: a shipment of repair is eight."""

    async def main() -> None:
        here, there = (Stream(sock) for sock in socket.socketpair())
        there.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MIB)
        await there.send([bytes(8_192)] * 8, idle=seconds(30))
        turns = [0]
        asyncio.get_running_loop().call_soon(_tick, turns)
        seen = []
        for _ in range(8):
            await here.receive([memoryview(bytearray(8_192))], idle=seconds(30))
            seen.append(turns[0])
        assert seen == sorted(set(seen)), "one turn at least between two payloads"
        turns[0] = -(10**9)
        here.close()
        there.close()

    asyncio.run(main())


def test_a_large_payload_is_moved_in_calls_of_bounded_size(no_time: None) -> None:
    async def main() -> None:
        here, there = (Stream(sock) for sock in socket.socketpair())
        for stream_of in (here, there):
            stream_of.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * MIB)
        parts = [bytes([number]) * (MIB + 7) for number in range(5)]
        into = memoryview(bytearray(sum(map(len, parts))))
        async with asyncio.TaskGroup() as group:
            group.create_task(there.send(parts, idle=seconds(30)))
            group.create_task(here.receive([into], idle=seconds(30)))
        assert bytes(into) == b"".join(parts)
        here.close()
        there.close()

    asyncio.run(main())


def _tick(turns: list[int]) -> None:
    turns[0] += 1
    if turns[0] > 0:
        asyncio.get_running_loop().call_soon(_tick, turns)
