"""A flipped bit, a short read, an error of the medium: never wrong bytes, and the copy is put out of use."""

import asyncio

import pytest

from kvstore.core.events.gets import ReadStatus
from kvstore.core.extent import Tier
from kvstore.tiers.faulty import Faults, FaultyTier
from kvstore.units import MIB, Bytes, seconds

SOON = seconds(20)


@pytest.mark.parametrize("size", [20_000, 2 * MIB + 1])
def test_a_byte_flipped_in_memory_is_found_by_the_read_and_quarantined(serving, chain, payload, tiers_of, size):
    async def scenario():
        async with serving(host_capacity=Bytes(10 * MIB)) as (server, client):
            refs = chain("a", 3)
            await client.store(refs, size=size)
            _flip_in_arena(server, payload(refs[1], size))
            acquired = await client.acquire(refs)
            assert await client.read(acquired.lease_id, refs, size=size) == [ReadStatus.OK, ReadStatus.CORRUPT, ReadStatus.OK]
            assert await client.stub.probe_prefix(client.key_space, refs, timeout=SOON) == [True, False, True]
            await client.stub.release(acquired.lease_id, client.key_space, timeout=SOON)
            await client.store(refs, size=size)
            assert await client.get(refs, size=size) == 3

    asyncio.run(scenario())


def test_a_readers_complaint_about_a_bad_copy_is_checked_and_believed_only_if_true(serving, chain, payload, eventually):
    async def scenario():
        async with serving() as (server, client):
            refs = chain("a", 2)
            await client.store(refs)
            _flip_in_arena(server, payload(refs[1]))
            acquired = await client.acquire(refs)
            await client.stub.release(acquired.lease_id, client.key_space, corrupt_hashes=[ref.hash for ref in refs], timeout=SOON)
            assert await client.stub.probe_prefix(client.key_space, refs, timeout=SOON) == [True, False]

    asyncio.run(scenario())


def test_a_byte_flipped_in_the_ssd_file_is_found_by_the_read_and_quarantined(serving, chain, payload, push_to_ssd):
    async def scenario():
        async with serving(ssd=True) as (server, client):
            refs = chain("a", 3)
            await client.store(refs)
            await push_to_ssd(server, client, refs)
            _flip_on_disk(server.config.ssd_path, payload(refs[1]))
            acquired = await client.acquire(refs)
            assert {copy.tier for copy in acquired.copies} == {Tier.SSD}
            assert await client.read(acquired.lease_id, refs) == [ReadStatus.OK, ReadStatus.CORRUPT, ReadStatus.OK]
            assert await client.stub.probe_prefix(client.key_space, refs, timeout=SOON) == [True, False, True]
        async with serving(ssd=True) as (_, client):  # which believes what the region says of its records
            assert await client.stub.probe_prefix(client.key_space, refs, timeout=SOON) == [True, False, True]

    asyncio.run(scenario())


def test_the_scrub_finds_rot_that_nobody_reads_in_both_tiers(serving, chain, payload, push_to_ssd, eventually):
    async def scenario():
        async with serving(ssd=True, scrub_rate=Bytes(200 * MIB)) as (server, client):
            cold = chain("cold", 3)
            await client.store(cold)
            await push_to_ssd(server, client, cold)
            warm = chain("warm", 3)
            await client.store(warm)
            _flip_on_disk(server.config.ssd_path, payload(cold[1]))
            _flip_in_arena(server, payload(warm[1]))
            await eventually(lambda: server.status().counters.get("quarantined:checksum", 0) >= 2)
            assert await client.stub.probe_prefix(client.key_space, cold, timeout=SOON) == [True, False, True]

    asyncio.run(scenario())


def test_a_byte_flipped_in_memory_does_not_reach_the_ssd(serving, chain, payload, eventually, tiers_of, chain_filler):
    async def scenario():
        faults = Faults()
        async with serving(ssd=True, demote_above=0.3, wrap_ssd=lambda regions: FaultyTier(regions, faults)) as (server, client):
            refs = chain("a", 1)
            await client.store(refs)
            _flip_in_arena(server, payload(refs[0]))
            for filler in chain_filler():
                await client.put(filler)
                [tiers] = await tiers_of(server, refs)
                if not tiers:
                    break
                assert Tier.SSD not in tiers
            assert await client.get(refs) == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("failing_reads", ReadStatus.IO_ERROR),
        ("short_reads", ReadStatus.IO_ERROR),
        ("flipped_reads", ReadStatus.CORRUPT),
    ],
)
def test_a_fault_of_the_medium_costs_the_one_block_it_hits(serving, chain, push_to_ssd, fault, status):
    async def scenario():
        faults = Faults()
        async with serving(ssd=True, ssd_threads=1, wrap_ssd=lambda regions: FaultyTier(regions, faults)) as (server, client):
            refs = chain("a", 6)
            await client.store(refs)
            await push_to_ssd(server, client, refs)
            setattr(faults, fault, 1)
            acquired = await client.acquire(refs)
            assert await client.read(acquired.lease_id, refs) == [status] + [ReadStatus.OK] * 5

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["failing_writes", "full_writes", "failing_syncs", "torn_writes"])
def test_a_fault_while_demoting_loses_nothing_that_is_in_memory_and_lists_nothing_bad(serving, chain, eventually, fault):
    async def scenario():
        faults = Faults()
        async with serving(
            ssd=True, demote_above=0.0, drain_deadline=seconds(0.2), wrap_ssd=lambda regions: FaultyTier(regions, faults)
        ) as (_, client):
            setattr(faults, fault, 3)
            refs = chain("a", 20)
            await client.store(refs)
            await eventually(lambda: getattr(faults, fault) < 3)
            assert await client.get(refs) == 20
        async with serving(ssd=True) as (_, client):
            acquired = await client.acquire(refs)
            listed = [ref for ref, copy in zip(refs, acquired.copies, strict=True) if copy is not None]
            statuses = await client.read(acquired.lease_id, listed) if listed else []
            assert set(statuses) <= ({ReadStatus.OK, ReadStatus.CORRUPT} if fault == "torn_writes" else {ReadStatus.OK})

    asyncio.run(scenario())


def _flip_in_arena(server, payload):
    arena = server.host.view(0, server.config.host_capacity)
    at = bytes(arena).index(payload)
    arena[at + len(payload) // 2] ^= 1


def _flip_on_disk(folder, payload):
    found = 0
    for path in folder.glob("region-*"):
        with open(path, "r+b") as file:
            data = file.read()
            at = data.find(payload)
            if at >= 0:
                found += 1
                file.seek(at + len(payload) // 2)
                file.write(bytes([data[at + len(payload) // 2] ^ 1]))
    assert found == 1
