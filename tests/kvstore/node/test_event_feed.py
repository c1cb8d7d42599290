"""What a follower of a node's events knows is what the node has, whenever it began and whatever it missed."""

import asyncio
from contextlib import aclosing

from kvpb.v1 import admin_pb2, admin_pb2_grpc

from kvstore.admin import upkeep, upkeep_tables
from kvstore.admin.cluster_access import ClusterAccess
from kvstore.core.picture import BlockEventKind, Picture
from kvstore.node import event_feed
from kvstore.registry import EmbeddedRedis
from kvstore.rpc.admin_stub import AdminStub
from kvstore.units import seconds

TIMEOUT = seconds(20)


async def see_until(events, picture, condition):
    async with asyncio.timeout(30):
        while not condition():
            picture.see(await anext(events))
    return picture


def test_a_picture_is_what_the_node_holds_through_puts_deletes_and_a_broken_stream(serving, chain, key_space):
    async def scenario():
        async with serving() as (_, client):
            early, late = chain("early", 20), chain("late", 12)
            await client.store(early)
            stub, picture = AdminStub(client.channel), Picture()
            async with aclosing(stub.events()) as events:
                await see_until(events, picture, lambda: picture.exact)
                assert picture.blocks == {(key_space, ref.hash) for ref in early}
                await client.store(late)
                await client.stub.delete(key_space, early[8:], timeout=TIMEOUT)
                expected = {(key_space, ref.hash) for ref in early[:8] + late}
                await see_until(events, picture, lambda: picture.blocks == expected)
                assert picture.exact
            await client.stub.delete(key_space, late, timeout=TIMEOUT)
            async with aclosing(stub.events(boot_id=picture.boot_id, after=picture.sequence)) as events:
                first = await anext(events)
                assert (first.kind, first.sequence) == (BlockEventKind.EVICTED, picture.sequence + 1)
                picture.see(first)
                await see_until(events, picture, lambda: picture.blocks == {(key_space, ref.hash) for ref in early[:8]})
                assert picture.exact
            async with aclosing(stub.events(boot_id=bytes(16), after=picture.sequence)) as events:
                picture.see(await anext(events))
                assert (picture.exact, picture.blocks) == (False, set())
                await see_until(events, picture, lambda: picture.exact)
                assert picture.blocks == {(key_space, ref.hash) for ref in early[:8]}

    asyncio.run(scenario())


def test_a_follower_that_is_too_far_behind_is_told_so_and_gets_a_snapshot(serving, chain, key_space, monkeypatch):
    monkeypatch.setattr(event_feed.EventFeed.__init__, "__kwdefaults__", {"most": 8})

    async def scenario():
        async with serving() as (_, client):
            await client.store(chain("a", 8))
            stub, picture = AdminStub(client.channel), Picture()
            async with aclosing(stub.events()) as events:
                await see_until(events, picture, lambda: picture.exact)
            await client.store(chain("b", 16))
            async with aclosing(stub.events(boot_id=picture.boot_id, after=picture.sequence)) as events:
                assert (await anext(events)).kind is BlockEventKind.GAP
                await see_until(events, picture, lambda: len(picture.blocks) == 24 and picture.exact)
            await admin_pb2_grpc.AdminServiceStub(client.channel).Evict(admin_pb2.EvictRequest(all=True))

    asyncio.run(scenario())


def test_a_node_recalls_what_went_and_why_and_no_longer_when_it_is_back(serving, chain, key_space):
    async def scenario():
        async with serving() as (_, client):
            refs = chain("a", 4)
            await client.store(refs)
            stub = AdminStub(client.channel)

            async def reasons():
                recalled = await stub.recall(key_space, refs, timeout=TIMEOUT)
                assert recalled.forgotten == 0
                return [gone and gone.reason for gone in recalled.departures], recalled.key_spaces

            assert await reasons() == ([None] * 4, (key_space,))
            await stub.evict_blocks(key_space, refs[3:], timeout=TIMEOUT)
            await client.stub.delete(key_space, refs[2:3], timeout=TIMEOUT)
            assert await reasons() == ([None, None, "deleted", "operator"], (key_space,))
            await client.store(refs)
            assert await reasons() == ([None] * 4, (key_space,))

    asyncio.run(scenario())


def test_kvctl_shows_what_comes_and_goes_that_a_stream_broke_and_who_joins_meanwhile(node_process, connect, chain):
    async def scenario(popen, address, redis, node_process):
        client = connect(address)
        refs = chain("a", 3)
        async with aclosing(upkeep.events(ClusterAccess(redis_url=redis.url, gateway_url=None))) as records, asyncio.timeout(60):
            first = await anext(records)
            assert (first["event"], first["blocks"], first["exact"]) == ("snapshot", 0, True)
            await client.store(refs)
            stored = [await anext(records) for _ in refs]
            assert [(record["event"], record["sequence"], record["blocks"]) for record in stored] == [("stored", n, n) for n in (1, 2, 3)]
            assert {record["hash"] for record in stored} == {ref.hash.hex() for ref in refs}
            assert upkeep_tables.event_line(stored[0]).startswith(f"node-p  #1  stored  {stored[0]['hash'][:12]}  kitchen")
            await client.close()
            popen.kill()
            last = await anext(records)
            assert (last["event"], last["exact"]) == ("broken", False)
            assert "(not exact)" in upkeep_tables.event_line(last)
            with node_process(redis):  # another boot
                joined = await anext(records)
                assert (joined["event"], joined["exact"]) == ("snapshot", True)
                assert joined["boot_id"] != first["boot_id"]

    with EmbeddedRedis() as redis, node_process(redis) as (popen, address):
        asyncio.run(scenario(popen, address, redis, node_process))
