"""Pins and quotas of a running node, and over its restarts."""

import asyncio

import pytest

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.rpc.admin_stub import AdminStub, Pinned
from kvstore.units import KIB, MIB, Bytes, seconds

SOON = seconds(20)


def test_pins_and_quotas_set_at_run_time_are_there_after_a_restart(serving, chain):
    async def scenario():
        pinned, other = chain("pinned", 4), chain("other", 4)
        async with serving(ssd=True, quotas={"kitchen": Bytes(200 * KIB)}) as (server, client):
            admin = AdminStub(client.channel)
            report = await admin.set_quota("kitchen", 3 * MIB, timeout=SOON)
            assert (report.limit_bytes, report.lasts) == (3 * MIB, True)
            await client.store([*pinned, *other])
            answer = await admin.pin(client.key_space, [*pinned, *chain("absent", 1)], hard=True, ttl=seconds(3600), timeout=SOON)
            assert answer == Pinned(4, 1, 0, True)
            assert (await admin.evict_all(timeout=SOON)).leased_copies_kept == 4
            await client.store([*other, *chain("more", 8)])
        async with serving(ssd=True, quotas={"kitchen": Bytes(200 * KIB)}) as (server, client):
            admin = AdminStub(client.channel)
            assert server.recovery.records == 16, "the configured quota, which is smaller, evicted nothing"
            assert server.status().blocks == 16
            await admin.evict_all(timeout=SOON)
            assert await client.stub.probe_prefix(client.key_space, pinned, timeout=SOON) == [True] * 4
            assert await admin.unpin(client.key_space, pinned, timeout=SOON) == 4
            await admin.evict_all(timeout=SOON)
            assert server.status().blocks == 0
            assert (await admin.quota("kitchen", timeout=SOON)).limit_bytes == 3 * MIB

    asyncio.run(scenario())


def test_a_node_without_an_ssd_says_that_its_pins_and_quotas_do_not_last(serving, chain):
    async def scenario():
        async with serving() as (_, client):
            admin = AdminStub(client.channel)
            await client.store(chain("a", 2))
            assert not (await admin.pin(client.key_space, chain("a", 2), hard=False, ttl=seconds(10), timeout=SOON)).lasts
            report = await admin.set_quota("kitchen", None, timeout=SOON)
            assert (report.limit_bytes, report.lasts) == (None, False)

    asyncio.run(scenario())


def test_a_pin_for_ever_and_a_quota_of_nobody_are_refused(serving, chain):
    async def scenario():
        async with serving() as (_, client):
            admin = AdminStub(client.channel)
            for ttl in (seconds(0), seconds(400 * 86_400)):
                with pytest.raises(InvalidRequest, match="every pin ends"):
                    await admin.pin(client.key_space, chain("a", 1), hard=True, ttl=ttl, timeout=SOON)
            with pytest.raises(InvalidRequest, match="namespace must have"):
                await admin.set_quota("", 5, timeout=SOON)

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ["", "{}", '{"quotas": {"a": "x"}, "pins": []}', '{"quotas": [], "pins": 3}'])
def test_a_table_of_quotas_that_cannot_be_read_is_not_taken_for_an_empty_one(serving, node_config, text):
    async def scenario():
        folder = node_config(ssd=True).ssd_path
        folder.mkdir()
        (folder / "WISHES.json").write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            async with serving(ssd=True):
                pass

    asyncio.run(scenario())
