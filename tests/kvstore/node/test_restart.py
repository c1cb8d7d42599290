"""What a node finds again, in this process; with kill -9 of a real one in test_process.py."""

import asyncio
import os
import threading

import pytest

from kvstore.core.extent import ALIGNMENT, Tier
from kvstore.errors import ConfigError, UnsupportedFormat
from kvstore.ids import LayoutFingerprint, Namespace
from kvstore.tiers.faulty import Faults, FaultyTier
from kvstore.tiers.tier import FailureReason, TierFailure
from kvstore.units import KIB, Bytes, seconds

SOON = seconds(20)


def test_a_graceful_stop_saves_what_is_hot_and_the_next_start_finds_it(serving, chain, tiers_of):
    async def scenario():
        refs = chain("a", 40)
        async with serving(ssd=True) as (server, client):
            await client.store(refs)
            assert {tiers for tiers in await tiers_of(server, refs)} == {(Tier.HOST,)}
        async with serving(ssd=True) as (server, client):
            assert server.recovery.records == 40
            assert {tiers for tiers in await tiers_of(server, refs)} == {(Tier.SSD,)}
            assert await client.get(refs) == 40

    asyncio.run(scenario())


def test_without_an_ssd_a_restart_is_empty(serving, chain):
    async def scenario():
        async with serving() as (_, client):
            await client.store(chain("a", 3))
        async with serving() as (_, client):
            assert await client.get(chain("a", 3)) == 0

    asyncio.run(scenario())


def test_a_deleted_block_stays_deleted_over_restarts(serving, chain, push_to_ssd):
    async def scenario():
        refs = chain("a", 8)
        async with serving(ssd=True) as (server, client):
            await client.store(refs)
            await push_to_ssd(server, client, refs)
            assert await client.stub.delete(client.key_space, refs[6:], timeout=SOON) == [True, True]
        for _ in range(2):
            async with serving(ssd=True) as (_, client):
                assert await client.stub.probe_prefix(client.key_space, refs, timeout=SOON) == [True] * 6 + [False] * 2

    asyncio.run(scenario())


def test_blocks_of_another_layout_or_tenant_on_the_disk_are_a_miss_after_the_restart(serving, chain, key_space):
    """The model was quantised anew, split otherwise, or its RoPE changed: what lies there means other numbers now."""
    others = (key_space._replace(layout=LayoutFingerprint(b"other layout".ljust(32))), key_space._replace(namespace=Namespace("cellar")))

    async def scenario():
        refs = chain("a", 8)
        async with serving(ssd=True) as (_, client):
            await client.store(refs)
        async with serving(ssd=True) as (server, client):
            assert server.recovery.records == 8
            for other in others:
                assert await client.get(refs, key_space=other) == 0
                await client.store(refs[:2], key_space=other)
                assert await client.get(refs, key_space=other) == 2
            assert await client.get(refs) == 8

    asyncio.run(scenario())


def test_a_drain_deadline_that_is_over_ends_the_stop(serving, chain):
    async def scenario():
        faults = Faults()
        stopped = threading.Event()

        def hang():
            stopped.wait(60)
            raise TierFailure(FailureReason.IO_ERROR, "the node is gone")

        try:
            async with asyncio.timeout(30):
                async with serving(ssd=True, drain_deadline=seconds(0.2), wrap_ssd=lambda regions: FaultyTier(regions, faults)) as (
                    _,
                    client,
                ):
                    await client.store(chain("a", 3))
                    faults.before_write = hang
        finally:
            stopped.set()

    asyncio.run(scenario())


@pytest.mark.parametrize("torn_at", ["payload", "header"])
def test_a_torn_or_rotten_record_is_dropped_and_the_others_are_found(serving, chain, payload, node_config, torn_at):
    async def scenario():
        refs = chain("a", 5)
        async with serving(ssd=True) as (server, client):
            await client.store(refs)
        _damage(server.config.ssd_path, payload(refs[2]), header=torn_at == "header")
        _remove_footers(server)
        async with serving(ssd=True) as (server, client):
            assert server.recovery.records == 4
            assert server.recovery.torn_records == (1 if torn_at == "payload" else 0)
            present = await client.stub.probe_prefix(client.key_space, refs, timeout=SOON)
            assert present == [True, True, False, True, True]
            assert await client.get(refs) == 2

    asyncio.run(scenario())


def test_a_folder_full_of_garbage_is_taken_for_free_room(serving, chain, node_config):
    async def scenario():
        config = node_config(ssd=True)
        config.ssd_path.mkdir()
        for number in range(3):
            (config.ssd_path / f"region-{number:06d}").write_bytes(bytes(range(256)) * (config.region_bytes // 256))
        (config.ssd_path / "region-000003").write_bytes(b"short")
        async with serving(ssd=True) as (server, client):
            assert server.recovery.records == 0
            await client.store(chain("a", 40))
        async with serving(ssd=True) as (server, client):
            assert await client.get(chain("a", 40)) == 40

    asyncio.run(scenario())


def test_a_region_file_cut_short_gives_what_is_left_and_two_lines_in_the_log(serving, chain, node_config, caplog):
    async def scenario():
        refs = chain("a", 20)
        async with serving(ssd=True) as (server, client):
            await client.store(refs)
        file = next(file for file in node_config(ssd=True).ssd_path.glob("region-*") if any(file.read_bytes()[:ALIGNMENT]))
        os.truncate(file, file.stat().st_size // 2)
        caplog.clear()
        async with serving(ssd=True) as (server, client):
            assert 10 <= server.recovery.records < 20
            assert 8 <= await client.get(refs) <= server.recovery.records, "the whole first stripe at least"
            await client.store(refs)
            assert await client.get(refs) == 20

    asyncio.run(scenario())
    assert len([record for record in caplog.records if "recovery of region" in record.getMessage()]) <= 2


def test_another_format_version_is_refused_and_not_touched(serving, chain, node_config):
    async def scenario():
        async with serving(ssd=True) as (server, client):
            await client.store(chain("a", 3))
        [path] = [path for path in server.config.ssd_path.glob("region-*") if path.read_bytes()[:7] == b"LARDRGN"]
        data = bytearray(path.read_bytes())
        data[8] = 99
        path.write_bytes(data)
        with pytest.raises(UnsupportedFormat, match="format 99"):
            async with serving(ssd=True):
                pass
        assert path.read_bytes() == bytes(data)

    asyncio.run(scenario())


def test_another_region_size_is_refused_with_what_to_do(serving, node_config):
    async def scenario():
        async with serving(ssd=True):
            pass
        with pytest.raises(ConfigError, match="ssd_discard_other_formats=true"):
            async with serving(ssd=True, region_bytes=Bytes(128 * KIB)):
                pass

    asyncio.run(scenario())


def test_two_nodes_on_one_folder_are_refused(serving):
    async def scenario():
        async with serving(ssd=True):
            with pytest.raises(ConfigError, match="in use by another store node"):
                async with serving(ssd=True):
                    pass

    asyncio.run(scenario())


def _damage(folder, payload, *, header):
    for path in folder.glob("region-*"):
        data = bytearray(path.read_bytes())
        at = data.find(payload)
        if at >= 0:
            data[at - ALIGNMENT + 20 if header else at + 100] ^= 0xFF
            path.write_bytes(data)
            return
    raise AssertionError("the payload is on no region")


def _remove_footers(server):
    for path in server.config.ssd_path.glob("region-*"):
        data = bytearray(path.read_bytes())
        data[-ALIGNMENT:] = bytes(ALIGNMENT)
        path.write_bytes(data)
