"""A node with any subset of the tiers: what is put is in those and in no other, and is read back from them."""

import asyncio
import os
import signal

import pytest

from kvstore.core.events.puts import CommitStatus, ReserveStatus
from kvstore.core.extent import Tier
from kvstore.errors import ConfigError, LarderError
from kvstore.registry.redis_server import EmbeddedRedis
from kvstore.rpc.admin_stub import AdminStub
from kvstore.tiers.faulty import Faults, FaultyTier
from kvstore.units import KIB, MIB, Bytes, seconds

NO_HOST = {"host_capacity": Bytes(0), "staging_capacity": Bytes(256 * KIB)}
GPU = {"gpu_device": "cpu", "gpu_capacity": Bytes(MIB)}


def test_an_ssd_alone_takes_many_times_its_staging_and_a_restart_finds_every_block(serving, chain, tiers_of):
    async def scenario():
        chains = [chain(f"c{number}", 8) for number in range(25)]
        async with serving(ssd=True, **NO_HOST) as (server, client):
            for refs in chains:
                assert await client.put(refs) == [CommitStatus.DURABLE] * 8
            for refs in chains:
                assert await client.get(refs) == 8, "the client compares every byte"
                assert await tiers_of(server, refs) == [(Tier.SSD,)] * 8
            status = await AdminStub(client.channel).status(timeout=seconds(20))
            assert [tier.tier for tier in status.tiers] == ["ssd"]
            assert (status.staging.capacity_bytes, status.staging.used_bytes) == (256 * KIB, 0)
            assert server.member().capacity_bytes == 8 * MIB
        async with serving(ssd=True, **NO_HOST) as (server, client):
            for refs in chains:
                assert await client.get(refs) == 8

    asyncio.run(scenario())


def test_what_an_ssd_alone_acknowledged_is_found_after_a_kill_9(node_process, chain, connect):
    async def put_until_killed(address, popen):
        client, stored = connect(address), []
        try:
            for number in range(20):
                refs = chain(f"c{number}", 8)
                if number == 8:
                    asyncio.get_running_loop().call_later(0.002, os.kill, popen.pid, signal.SIGKILL)
                statuses = await client.put(refs)
                assert set(statuses) == {CommitStatus.DURABLE}
                stored.append(refs)
        except LarderError:
            pass
        finally:
            await client.close()
        return stored

    async def all_read(address, chains):
        client = connect(address)
        try:
            return [await client.get(refs) for refs in chains]
        finally:
            await client.close()

    keys = {"host_capacity": "0", "staging_capacity": "1MiB"}
    with EmbeddedRedis() as redis:
        with node_process(redis, **keys) as (popen, address):
            stored = asyncio.run(put_until_killed(address, popen))
            popen.wait()
        assert len(stored) >= 8
        with node_process(redis, **keys) as (popen, address):
            assert asyncio.run(all_read(address, stored)) == [8] * len(stored)


def test_a_gpu_alone_serves_what_it_has_room_for_and_evicts_the_coldest(serving, chain, tiers_of):
    async def scenario():
        async with serving(**NO_HOST, **GPU) as (server, client):
            refs = chain("first", 8)
            assert await client.put(refs) == [CommitStatus.STORED] * 8
            assert await tiers_of(server, refs) == [(Tier.GPU,)] * 8
            assert await client.get(refs) == 8
            for number in range(8):
                assert await client.put(chain(f"c{number}", 8)) == [CommitStatus.STORED] * 8
            assert await client.get(refs) == 0, "a MiB holds 51 blocks: the coldest have gone"
            assert await client.get(chain("c7", 8)) == 8
            assert [tier.tier for tier in server.status().tiers] == [Tier.GPU]

    asyncio.run(scenario())


def test_a_gpu_above_an_ssd_gets_the_hot_blocks_and_a_restart_finds_all_of_them_on_the_ssd(serving, chain, tiers_of):
    async def scenario():
        refs = chain("hot", 8)
        async with serving(ssd=True, **NO_HOST, **GPU) as (server, client):
            assert await client.put(refs) == [CommitStatus.DURABLE] * 8
            assert await tiers_of(server, refs) == [(Tier.SSD,)] * 8
            for _ in range(2):
                assert await client.get(refs) == 8
            async with asyncio.timeout(20):
                while set(await tiers_of(server, refs)) != {(Tier.GPU, Tier.SSD)}:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            assert await client.get(refs) == 8, "from the device now"
            assert [tier.tier for tier in server.status().tiers] == [Tier.GPU, Tier.SSD]
        async with serving(ssd=True, **NO_HOST, **GPU) as (server, client):
            assert await client.get(refs) == 8

    asyncio.run(scenario())


@pytest.mark.parametrize("gpu", [{}, GPU])
def test_puts_to_a_full_disk_go_to_the_gpu_or_are_refused_and_reads_go_on(serving, chain, tiers_of, gpu):
    async def scenario():
        faults = Faults()
        async with serving(ssd=True, wrap_ssd=lambda regions: FaultyTier(regions, faults), **NO_HOST, **gpu) as (server, client):
            before, during, after = (chain(name, 4) for name in ("before", "during", "after"))
            await client.put(before)
            faults.full_writes = 1000
            assert await client.put(during) == [CommitStatus.NO_ROOM] * 4
            assert await tiers_of(server, during) == [()] * 4
            assert await client.put(after) == [CommitStatus.STORED if gpu else ReserveStatus.NO_ROOM] * 4
            assert await tiers_of(server, after) == [(Tier.GPU,) if gpu else ()] * 4
            assert await client.get(before) == 4

    asyncio.run(scenario())


def test_a_node_without_any_tier_is_refused_by_the_names_of_the_keys(node_config):
    with pytest.raises(ConfigError, match=r"host_capacity above 0, gpu_device or ssd_path"):
        node_config(host_capacity=Bytes(0))
