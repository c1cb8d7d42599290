"""The memory between a slow medium and its readers: one bound for all of them, and nobody waits for it for ever."""

import asyncio
import socket

from kvstore.core.events.gets import ReadStatus
from kvstore.core.events.puts import CommitStatus
from kvstore.tiers.faulty import Faults, FaultyTier
from kvstore.transport.frames import HEADER_BYTES, FrameKind, Header, ReadBody
from kvstore.transport.ticket import Ticket
from kvstore.units import MIB, Bytes, seconds

SIZE = MIB
BLOCKS = 12
"""Of a read: more than the socket buffers between node and reader take."""
SSD_ALONE = {"host_capacity": Bytes(0), "staging_capacity": Bytes(16 * MIB), "ssd": True, "ssd_capacity": Bytes(32 * MIB)}
SSD_ALONE |= {"region_bytes": Bytes(4 * MIB)}


async def _ask(reader, acquired, refs, key_space):
    ticket = Ticket.from_bytes(acquired.ticket)
    body = ReadBody(acquired.lease_id, ticket.expires_at, key_space, tuple(ref.hash for ref in refs)).pack()
    await reader.send(reader.request(FrameKind.READ, body, [ticket]))


async def _answers(reader, refs):
    for item in range(len(refs)):
        header = Header.unpack(await reader.receive(HEADER_BYTES))
        assert (header.kind, header.item) == (FrameKind.PAYLOAD, item)
        yield ReadStatus(header.status), await reader.receive(header.length) if header.length else b""


def test_readers_that_take_nothing_stage_no_more_than_the_buffer_and_the_others_wait_their_turn(
    serving, chain, payload, key_space, raw, eventually
):
    faults, staged = Faults(), []

    async def test():
        async with serving(
            **SSD_ALONE,
            read_buffer_capacity=Bytes(5 * MIB // 2),
            read_deadline=seconds(60),
            wrap_ssd=lambda regions: FaultyTier(regions, faults),
        ) as (
            server,
            client,
        ):
            refs = chain("a", BLOCKS)
            assert set(await client.put(refs, size=SIZE)) == {CommitStatus.DURABLE}
            acquired = await client.acquire(refs)
            buffer = server.node.source.buffer
            faults.before_read = lambda: staged.append(buffer.taken)
            async with raw(server) as connect:
                readers = [await connect() for _ in range(5)]
                for reader in readers:
                    reader.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
                    await _ask(reader, acquired, refs, key_space)
                await eventually(lambda: server.node.reads == 5 and len(buffer._waiting) == 3, within_s=60)
                assert buffer.taken == 2 * SIZE, "two have one each, and nobody reads ahead while others wait"

                async def take_all(reader):
                    expected = iter(refs)
                    async for status, data in _answers(reader, refs):
                        assert (status, data) == (ReadStatus.OK, payload(next(expected), SIZE))

                await asyncio.gather(*map(take_all, readers))
                await eventually(lambda: server.node.reads == 0)
            assert max(staged) <= 2 * SIZE
            assert buffer.taken == 0

    asyncio.run(test())


def test_a_read_for_which_there_is_no_memory_in_time_is_answered_and_the_next_one_is_whole(serving, chain, key_space, raw):
    async def test():
        async with serving(**SSD_ALONE, read_deadline=seconds(1)) as (server, client), raw(server) as connect:
            refs = chain("a", 2)
            assert set(await client.put(refs, size=SIZE)) == {CommitStatus.DURABLE}
            acquired = await client.acquire(refs)
            buffer = server.node.source.buffer
            buffer.take_now(server.config.read_buffer_capacity)
            reader = await connect()
            await _ask(reader, acquired, refs, key_space)
            by_grpc = asyncio.create_task(client.read(acquired.lease_id, refs, size=SIZE))
            assert [status async for status, _ in _answers(reader, refs)] == [ReadStatus.IO_ERROR] * 2
            assert await by_grpc == [ReadStatus.IO_ERROR] * 2
            buffer.give_back(server.config.read_buffer_capacity)
            assert await client.get(refs, size=SIZE) == 2, "for the copies it meant nothing"
            assert buffer.taken == 0

    asyncio.run(test())


def test_who_goes_away_while_waiting_for_memory_leaves_the_queue_at_once(serving, chain, key_space, raw, eventually):
    async def test():
        async with serving(**SSD_ALONE) as (server, client), raw(server) as connect:
            refs = chain("a", 2)
            assert set(await client.put(refs, size=SIZE)) == {CommitStatus.DURABLE}
            acquired = await client.acquire(refs)
            buffer = server.node.source.buffer
            buffer.take_now(server.config.read_buffer_capacity)
            call = asyncio.create_task(client.read(acquired.lease_id, refs, size=SIZE))
            reader = await connect()
            await _ask(reader, acquired, refs, key_space)
            await eventually(lambda: len(buffer._waiting) == 2)
            call.cancel()
            reader.sock.close()
            await eventually(lambda: not server.node.reads and not server.status().data_connections["tcp"])
            buffer.give_back(server.config.read_buffer_capacity)
            assert buffer.taken == 0
            assert await client.read(acquired.lease_id, refs, size=SIZE) == [ReadStatus.OK] * 2

    asyncio.run(test())
