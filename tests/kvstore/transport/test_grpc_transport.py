"""The gRPC data plane against a small servicer over a real socket, and the order check alone."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from kvpb.v1 import store_pb2, store_pb2_grpc

from kvstore.core.events.gets import ReadStatus
from kvstore.errors import Unavailable
from kvstore.ids import BlockHash, BootId, KeySpace, LayoutFingerprint, LeaseId, Namespace, NodeId, WriteToken
from kvstore.rpc.channel import ChannelPool
from kvstore.rpc.server import bind, make_server
from kvstore.rpc.store_stub import DeadlinePassed, ReceivedChunk
from kvstore.transport import GrpcTransport, PayloadRead, PayloadSlot, PayloadTransport, PayloadWrite, Peer, ReadOutcome
from kvstore.transport.grpc_transport import SlotFilling
from kvstore.units import KIB, MIB, Bytes, Nanos, milliseconds, seconds

KEY_SPACE = KeySpace(Namespace("acme"), LayoutFingerprint(b"L" * 32))


def block_hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


def slots_of(sizes: list[int]) -> list[PayloadSlot]:
    return [PayloadSlot(block_hash(number), memoryview(bytearray(size))) for number, size in enumerate(sizes)]


class Payloads(store_pb2_grpc.StoreServiceServicer):
    """Sends what `script` yields for a read; keeps what is written."""

    def __init__(self, script: Callable[[Any], AsyncIterator[Any]] | None = None) -> None:
        self.script = script
        self.written: dict[int, bytearray] = {}
        self.largest_chunk = 0
        self.refuse: set[int] = set()
        self.cancelled = asyncio.Event()

    async def ReadPayloads(self, request: Any, context: Any) -> AsyncIterator[Any]:
        assert self.script is not None
        try:
            async for chunk in self.script(request):
                yield chunk
        finally:
            self.cancelled.set()

    async def WritePayloads(self, request_iterator: Any, context: Any) -> Any:
        async for chunk in request_iterator:
            self.largest_chunk = max(self.largest_chunk, len(chunk.data))
            payload = self.written.setdefault(chunk.write_token, bytearray())
            assert chunk.offset_bytes == len(payload)
            payload += chunk.data
        return store_pb2.WriteResponse(refused_write_tokens=self.refuse)


@asynccontextmanager
async def serving(servicer: Payloads) -> AsyncIterator[tuple[PayloadTransport, Peer]]:
    server = make_server()
    store_pb2_grpc.add_StoreServiceServicer_to_server(servicer, server)
    port = bind(server, host="127.0.0.1", port=0)
    await server.start()
    channels = ChannelPool()
    try:
        yield GrpcTransport(channels), Peer(NodeId("s1"), BootId(b"B" * 16), f"127.0.0.1:{port}")
    finally:
        await channels.close()
        await server.stop(None)


def whole(item: int, data: bytes) -> Any:
    return store_pb2.ReadChunk(item=item, status=store_pb2.READ_STATUS_OK, offset_bytes=0, data=data, last=True)


async def read(
    transport: PayloadTransport, peer: Peer, slots: list[PayloadSlot], *, timeout: Nanos = seconds(5), idle: Nanos = seconds(5)
) -> dict[int, ReadOutcome]:
    outcomes: dict[int, ReadOutcome] = {}
    async with aclosing(transport.read(peer, LeaseId(1), KEY_SPACE, slots, timeout=timeout, idle_timeout=idle)) as payloads:
        async for payload in payloads:
            assert payload.item not in outcomes
            outcomes[payload.item] = payload.outcome
    return outcomes


def test_payloads_arrive_in_their_slots_in_whatever_order_they_are_sent(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    data = [rng.randbytes(size) for size in (1, 4096, MIB, 3 * MIB + 5)]

    async def script(request: Any) -> AsyncIterator[Any]:
        chunks = {
            item: [(start, payload[start : start + MIB]) for start in range(0, len(payload), MIB)] for item, payload in enumerate(data)
        }
        while chunks:
            item = rng.choice(sorted(chunks))
            start, part = chunks[item].pop(0)
            last = not chunks[item]
            if last:
                del chunks[item]
            yield store_pb2.ReadChunk(item=item, status=store_pb2.READ_STATUS_OK, offset_bytes=start, data=part, last=last)

    async def test() -> None:
        async with serving(Payloads(script)) as (transport, peer):
            slots = slots_of([len(payload) for payload in data])
            assert await read(transport, peer, slots) == dict.fromkeys(range(4), ReadOutcome.OK)
            assert [bytes(slot.into) for slot in slots] == data

    asyncio.run(test())


def test_a_stream_that_ends_early_leaves_the_rest_malformed() -> None:
    async def script(request: Any) -> AsyncIterator[Any]:
        yield whole(0, b"abc")
        yield store_pb2.ReadChunk(item=1, status=store_pb2.READ_STATUS_OK, offset_bytes=0, data=b"a", last=False)

    async def test() -> None:
        async with serving(Payloads(script)) as (transport, peer):
            outcomes = await read(transport, peer, slots_of([3, 3, 3]))
            assert outcomes == {0: ReadOutcome.OK, 1: ReadOutcome.MALFORMED, 2: ReadOutcome.MALFORMED}

    asyncio.run(test())


def test_a_stream_that_stands_still_costs_the_idle_timeout_and_is_cancelled() -> None:
    async def script(request: Any) -> AsyncIterator[Any]:
        yield whole(0, b"abc")
        await asyncio.Event().wait()

    async def test() -> None:
        servicer = Payloads(script)
        async with serving(servicer) as (transport, peer):
            started = time.perf_counter()
            with pytest.raises(DeadlinePassed, match="sent nothing for 100 ms"):
                await read(transport, peer, slots_of([3, 3]), idle=milliseconds(100))
            assert time.perf_counter() - started < 2
            async with asyncio.timeout(2):
                await servicer.cancelled.wait()

    asyncio.run(test())


def test_a_trickling_stream_ends_at_the_timeout_of_the_whole() -> None:
    async def script(request: Any) -> AsyncIterator[Any]:
        for item in range(1000):
            yield whole(item, b"abc")
            await asyncio.sleep(0.02)

    async def test() -> None:
        async with serving(Payloads(script)) as (transport, peer):
            with pytest.raises(DeadlinePassed):
                await read(transport, peer, slots_of([3] * 1000), timeout=milliseconds(200))

    asyncio.run(test())


def test_closing_the_iterator_stops_the_transfer() -> None:
    async def script(request: Any) -> AsyncIterator[Any]:
        for item in range(600):
            yield whole(item, bytes(64 * KIB))

    async def test() -> None:
        servicer = Payloads(script)
        async with serving(servicer) as (transport, peer):
            slots = slots_of([64 * KIB] * 600)
            payloads = transport.read(peer, LeaseId(1), KEY_SPACE, slots, timeout=seconds(5), idle_timeout=seconds(5))
            assert (await anext(payloads)).outcome is ReadOutcome.OK
            await payloads.aclose()
            async with asyncio.timeout(2):
                await servicer.cancelled.wait()

    asyncio.run(test())


def test_an_absent_peer_is_unavailable() -> None:
    async def test() -> None:
        channels = ChannelPool()
        transport = GrpcTransport(channels)
        peer = Peer(NodeId("gone"), BootId(b"B" * 16), "127.0.0.1:1")
        with pytest.raises(Unavailable):
            await read(transport, peer, slots_of([3]))
        with pytest.raises(Unavailable):
            await transport.write(peer, [PayloadWrite(WriteToken(1), b"abc")], timeout=seconds(5))
        await channels.close()

    asyncio.run(test())


def test_written_payloads_arrive_whole_in_chunks_of_at_most_1_mib(seed: int) -> None:
    data = {WriteToken(token): random.Random(seed + token).randbytes(size) for token, size in ((1, 0), (2, 7), (3, MIB), (4, 2 * MIB + 1))}

    async def test() -> None:
        servicer = Payloads()
        servicer.refuse = {3}
        async with serving(servicer) as (transport, peer):
            writes = [PayloadWrite(token, memoryview(payload)) for token, payload in data.items()]
            assert await transport.write(peer, writes, timeout=seconds(5)) == {WriteToken(3)}
            assert {token: bytes(payload) for token, payload in servicer.written.items()} == data
            assert servicer.largest_chunk == MIB

    asyncio.run(test())


def test_a_channel_closed_under_a_call_is_unavailable_and_no_cancellation() -> None:
    async def script(request: Any) -> AsyncIterator[Any]:
        yield whole(0, b"abc")
        await asyncio.Event().wait()

    async def test() -> None:
        servicer = Payloads(script)
        server = make_server()
        store_pb2_grpc.add_StoreServiceServicer_to_server(servicer, server)
        port = bind(server, host="127.0.0.1", port=0)
        await server.start()
        channels = ChannelPool()
        transport, peer = GrpcTransport(channels), Peer(NodeId("s1"), BootId(b"B" * 16), f"127.0.0.1:{port}")
        payloads = transport.read(peer, LeaseId(1), KEY_SPACE, slots_of([3, 3]), timeout=seconds(5), idle_timeout=seconds(5))
        assert (await anext(payloads)).item == 0
        waiting = asyncio.create_task(anext(payloads))
        await asyncio.sleep(0)
        await channels.retain(())
        with pytest.raises(Unavailable):
            await waiting
        # And a unary call on a pool that forgot the address opens a fresh channel.
        assert await transport.write(peer, [PayloadWrite(WriteToken(1), b"abc")], timeout=seconds(5)) == frozenset()
        await channels.close()
        await server.stop(None)

    asyncio.run(test())


def chunk(item: int, offset: int, data: bytes, *, last: bool = False, status: ReadStatus = ReadStatus.OK) -> ReceivedChunk:
    return ReceivedChunk(item, status, Bytes(offset), data, last)


@pytest.mark.parametrize(
    "wrong",
    [
        [chunk(0, 1, b"a")],  # a hole
        [chunk(0, 0, b"ab"), chunk(0, 0, b"ab")],  # a chunk twice
        [chunk(0, 0, b"abcde")],  # too long
        [chunk(0, 0, b"abc", last=True)],  # too short
        [chunk(0, 0, b"abcd"), chunk(0, 4, b"e", last=True)],  # one byte more
    ],
)
def test_bytes_out_of_order_or_number_end_their_slot(wrong: list[ReceivedChunk]) -> None:
    filling = SlotFilling(slots_of([4]))
    outcomes = [filling.take(each) for each in wrong]
    assert outcomes[-1] == PayloadRead(0, ReadOutcome.MALFORMED)
    assert not filling.open_items
    # A late chunk of a slot that has ended is dropped.
    assert filling.take(chunk(0, 0, b"abcd", last=True)) is None


def test_a_status_ends_its_slot_and_no_other() -> None:
    filling = SlotFilling(slots_of([4, 4]))
    assert filling.take(chunk(0, 0, b"", status=ReadStatus.CORRUPT)) == PayloadRead(0, ReadOutcome.CORRUPT)
    assert filling.take(chunk(7, 0, b"x")) is None
    assert filling.take(chunk(1, 0, b"abcd", last=True)) == PayloadRead(1, ReadOutcome.OK)
