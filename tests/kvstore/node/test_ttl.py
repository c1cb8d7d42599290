import asyncio

import pytest

from kvstore.core.events.gets import ReadStatus
from kvstore.core.events.puts import CommitStatus
from kvstore.errors import InvalidRequest
from kvstore.units import milliseconds, seconds

SOON = seconds(20)


def test_a_time_to_live_ends_a_block_without_anybody_asking_and_over_a_restart(serving, chain, eventually):
    async def scenario():
        short, long, plain = chain("short", 2), chain("long", 2), chain("plain", 2)
        async with serving(ssd=True, ttls={"kitchen": seconds(3600)}) as (server, client):
            assert await client.put(short, ttl=milliseconds(700)) == [CommitStatus.STORED] * 2
            await client.store(long, ttl=seconds(3600))
            await client.store(plain)
            acquired = await client.acquire(short)
            await eventually(lambda: server.status().blocks == 4)
            assert await client.stub.probe_prefix(client.key_space, short, timeout=SOON) == [False, False]
            assert await client.read(acquired.lease_id, short) == [ReadStatus.OK] * 2, "the lease came first"
            await client.store(short, ttl=milliseconds(1))
        async with serving(ssd=True) as (server, client):
            assert await client.get(short) == 0
            assert await client.get(long) == await client.get(plain) == 2
            ends = [entry.expires_at for entry in server._state._stock.index]
            assert len(ends) == 4
            assert min(ends) > 0, "the end came back from the disk"

    asyncio.run(scenario())


def test_an_absurd_time_to_live_is_refused(serving, chain):
    async def scenario():
        async with serving() as (_, client):
            with pytest.raises(InvalidRequest, match="ten years"):
                await client.reserve(chain("a", 1), ttl=seconds(3600 * 24 * 365 * 100))

    asyncio.run(scenario())
