"""Payloads that come in over a stream, in whatever pieces: each slot is told of once, in order, and the end once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from kvstore.core.events.gets import ReadStatus
from kvstore.errors import Unavailable
from kvstore.ids import BlockHash
from kvstore.rpc.store_stub import DeadlinePassed
from kvstore.transport.frames import FrameKind, Header
from kvstore.transport.payload_reading import PayloadReading
from kvstore.transport.payload_transport import PayloadSlot, ReadOutcome
from kvstore.transport.stream import Stream
from kvstore.transport.stream_pool import Connection
from kvstore.units import Nanos, milliseconds, seconds

LONG = seconds(60)
PAYLOADS = [bytes([number]) * size for number, size in enumerate((1, 5000, 300, 70_000), start=1)]


class Reading:
    """One that is under way, and the socket of the node."""

    def __init__(self, there: socket.socket, here: socket.socket, *, timeout: Nanos, idle: Nanos) -> None:
        self.there = there
        self.slots = [PayloadSlot(BlockHash(bytes(32)), memoryview(bytearray(len(payload)))) for payload in PAYLOADS]
        self.told: asyncio.Queue[tuple[int, ReadOutcome] | Exception | None] = asyncio.Queue()
        connection = Connection(Stream(here), b"n" * 16)
        number = connection.next_number()
        self.reading = PayloadReading(
            connection,
            self.slots,
            [b"the request"],
            node_name="n1",
            timeout=timeout,
            idle_timeout=idle,
            arrived=lambda item, outcome: self.told.put_nowait((item, outcome)),
            ended=self.told.put_nowait,
        )
        self.frames = [
            Header(FrameKind.PAYLOAD, number, len(payload), ReadStatus.OK, item).pack() + payload for item, payload in enumerate(PAYLOADS)
        ]

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.there, data)

    async def next(self) -> tuple[int, ReadOutcome] | Exception | None:
        return await asyncio.wait_for(self.told.get(), 30)


def while_reading(test: Callable[[Reading], Awaitable[None]], *, timeout: Nanos = LONG, idle: Nanos = LONG) -> None:
    async def run() -> None:
        here, there = socket.socketpair()
        there.setblocking(False)
        with here, there:
            reading = Reading(there, here, timeout=timeout, idle=idle)
            assert await asyncio.get_running_loop().sock_recv(there, 100) == b"the request"
            try:
                await test(reading)
            finally:
                reading.reading.stop()

    asyncio.run(run())


@pytest.mark.parametrize("piece", [7, 32, 5031, 1 << 20])
def test_payloads_come_whole_however_the_bytes_do(piece: int) -> None:
    async def test(reading: Reading) -> None:
        data = b"".join(reading.frames)
        for start in range(0, 20 * piece, piece):
            await reading.say(data[start : start + piece])
            await asyncio.sleep(0)
        await reading.say(data[20 * piece :])
        assert [await reading.next() for _ in PAYLOADS] == [(item, ReadOutcome.OK) for item in range(len(PAYLOADS))]
        assert await reading.next() is None
        assert [bytes(slot.into) for slot in reading.slots] == PAYLOADS

    while_reading(test)


def test_a_payload_that_is_refused_costs_the_others_nothing() -> None:
    async def test(reading: Reading) -> None:
        reading.frames[1] = Header(FrameKind.PAYLOAD, 0, 0, ReadStatus.CORRUPT, 1).pack()
        reading.frames[3] = Header(FrameKind.PAYLOAD, 0, 0, ReadStatus.NOT_LEASED, 3).pack()
        await reading.say(b"".join(reading.frames))
        outcomes = (ReadOutcome.OK, ReadOutcome.CORRUPT, ReadOutcome.OK, ReadOutcome.NOT_LEASED)
        assert [await reading.next() for _ in PAYLOADS] == list(enumerate(outcomes))
        assert await reading.next() is None
        assert bytes(reading.slots[2].into) == PAYLOADS[2]

    while_reading(test)


@pytest.mark.parametrize(
    "second",
    [
        Header(FrameKind.PAYLOAD, 0, 4999, ReadStatus.OK, 1).pack(),
        Header(FrameKind.PAYLOAD, 0, 5000, ReadStatus.OK, 2).pack(),
        Header(FrameKind.PAYLOAD, 1, 5000, ReadStatus.OK, 1).pack(),
        Header(FrameKind.ANSWER, 0, 5000, ReadStatus.OK, 1).pack(),
        b"not a frame of this data plane..",
        b"",
    ],
    ids=["length", "item", "number", "kind", "garbage", "end"],
)
def test_what_is_not_the_next_payload_ends_the_reading_with_what_came_before(second: bytes) -> None:
    async def test(reading: Reading) -> None:
        await reading.say(reading.frames[0] + second)
        if not second:
            reading.there.close()
        assert await reading.next() == (0, ReadOutcome.OK)
        assert isinstance(await reading.next(), Unavailable)
        assert not any(reading.slots[1].into)

    while_reading(test)


@pytest.mark.parametrize(("timeout", "idle"), [(milliseconds(20), LONG), (LONG, milliseconds(20))])
def test_a_node_that_stands_still_or_takes_too_long_is_given_up(timeout: Nanos, idle: Nanos) -> None:
    async def test(reading: Reading) -> None:
        assert isinstance(await reading.next(), DeadlinePassed)

    while_reading(test, timeout=timeout, idle=idle)


def test_after_a_stop_nothing_is_told_and_no_slot_is_touched() -> None:
    async def test(reading: Reading) -> None:
        await reading.say(reading.frames[0] + reading.frames[1][:100])
        assert await reading.next() == (0, ReadOutcome.OK)
        assert reading.reading.stop()
        assert not reading.reading.stop(), "it is over already"
        await reading.say(reading.frames[1][100:] + b"".join(reading.frames[2:]))
        await asyncio.sleep(0.02)
        assert reading.told.empty()
        assert bytes(reading.slots[1].into) != PAYLOADS[1]

    while_reading(test)


def test_a_paused_reading_takes_nothing_and_does_not_count_the_time_as_the_nodes() -> None:
    async def test(reading: Reading) -> None:
        reading.reading.pause()
        await reading.say(b"".join(reading.frames))
        await asyncio.sleep(0.1)
        assert reading.told.empty()
        assert not any(reading.slots[0].into)
        reading.reading.resume()
        assert [await reading.next() for _ in PAYLOADS] == [(item, ReadOutcome.OK) for item in range(len(PAYLOADS))]
        assert await reading.next() is None

    while_reading(test, idle=milliseconds(30))
