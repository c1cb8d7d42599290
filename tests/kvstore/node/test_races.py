"""Two things at once, in the order that hurts."""

import asyncio
import threading

from kvstore.core.events.gets import AcquireRequested, AnswerAcquire, ReadStatus
from kvstore.core.events.puts import ReserveStatus
from kvstore.tiers.faulty import Faults, FaultyTier
from kvstore.units import MIB, Bytes, seconds

SOON = seconds(20)


def test_a_block_deleted_while_its_demotion_is_blocked_in_a_slow_disk_stays_deleted(serving, chain, eventually):
    async def scenario():
        faults = Faults()
        entered, released = threading.Event(), threading.Event()
        refs = chain("a", 4)

        def block():
            entered.set()
            released.wait()

        async with serving(ssd=True, demote_above=0.0, wrap_ssd=lambda regions: FaultyTier(regions, faults)) as (server, client):
            await client.store(chain("first", 1))  # opens a region
            await eventually(lambda: server.status().counters.get("demoted:done", 0) == 1)
            faults.before_write = block
            await client.store(refs)
            await eventually(entered.is_set)
            deleting = asyncio.create_task(client.stub.delete(client.key_space, refs, timeout=SOON))
            while any(await client.stub.probe_prefix(client.key_space, refs, timeout=SOON)):  # noqa: ASYNC110
                await asyncio.sleep(0)
            released.set()
            assert await deleting == [True] * 4
            assert await client.get(refs) == 0
        async with serving(ssd=True) as (_, client):
            assert await client.stub.probe_prefix(client.key_space, refs, timeout=SOON) == [False] * 4
            assert await client.get(chain("first", 1)) == 1

    asyncio.run(scenario())


def test_ten_thousand_lookups_that_are_never_read_pin_nothing_for_longer_than_their_lease(serving, chain, eventually):
    async def scenario():
        async with serving(lease_ttl=seconds(0.3)) as (server, client):
            refs = chain("a", 16)
            await client.store(refs)
            for _ in range(10_000):
                acquire = AcquireRequested(request_id=server.node.next_request_id(), key_space=client.key_space, blocks=tuple(refs))
                await server.node.ask(acquire, AnswerAcquire)
            await eventually(lambda: server.status().leases == 0)
            for number in range(30):  # nothing is pinned: the arena turns over
                await client.store(chain(f"b{number}", 8))
            assert await client.get(chain("b29", 8)) == 8

    asyncio.run(scenario())


def test_a_leased_block_survives_any_pressure_until_its_lease_ends(serving, chain):
    async def scenario():
        async with serving() as (_, client):
            refs = chain("a", 8)
            await client.store(refs)
            acquired = await client.acquire(refs, ttl=seconds(60))
            for number in range(60):
                await client.put(chain(f"b{number}", 8))
            assert await client.read(acquired.lease_id, refs) == [ReadStatus.OK] * 8

    asyncio.run(scenario())


def test_when_everything_is_leased_a_put_is_refused_and_nothing_is_overwritten(serving, chain):
    async def scenario():
        async with serving(host_capacity=Bytes(MIB)) as (_, client):
            refs = chain("a", 48)  # 48 * 20,480 bytes: the arena is all but full
            await client.store(refs)
            acquired = await client.acquire(refs, ttl=seconds(60))
            grants = await client.reserve(chain("b", 8))
            assert {grant.status for grant in grants[4:]} == {ReserveStatus.NO_ROOM}
            assert await client.read(acquired.lease_id, refs) == [ReadStatus.OK] * 48

    asyncio.run(scenario())


def test_two_writers_of_one_block_make_one_copy(serving, chain):
    async def scenario():
        async with serving() as (server, client):
            [first], [second] = await asyncio.gather(client.reserve(chain("a", 1)), client.reserve(chain("a", 1)))
            assert {first.status, second.status} == {ReserveStatus.GRANTED, ReserveStatus.PENDING}
            assert server.status().reservations == 1

    asyncio.run(scenario())


def test_a_herd_of_clients_that_connect_at_once_is_served(serving, chain, connect):
    async def scenario():
        async with serving() as (server, client):
            refs = chain("a", 2)
            await client.store(refs)
            herd = [connect(server.address) for _ in range(64)]
            assert await asyncio.gather(*(one.get(refs) for one in herd)) == [2] * 64
            await asyncio.gather(*(one.close() for one in herd))

    asyncio.run(scenario())


def test_garbage_and_half_requests_on_the_port_disturb_nobody(serving, chain):
    async def scenario():
        async with serving() as (server, client):
            for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00"):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(garbage)
                await writer.drain()
                writer.close()
            await client.store(chain("a", 1))
            assert await client.get(chain("a", 1)) == 1

    asyncio.run(scenario())
