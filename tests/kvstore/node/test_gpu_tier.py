"""A node with a GPU tier, on the torch device cpu."""

import asyncio
import subprocess
import sys

import pytest

from kvstore.core.extent import Tier
from kvstore.errors import ConfigError
from kvstore.units import KIB, MIB, Bytes


def test_hot_blocks_are_copied_to_the_gpu_and_read_back_from_it_when_the_host_copy_has_gone(serving, chain, chain_filler, tiers_of):
    async def scenario():
        refs = chain("hot", 8)
        async with serving(gpu_device="cpu", gpu_capacity=Bytes(MIB), host_capacity=Bytes(512 * KIB)) as (server, client):
            await client.store(refs)
            for _ in range(2):
                assert await client.get(refs) == 8
            async with asyncio.timeout(20):
                while set(await tiers_of(server, refs)) != {(Tier.GPU, Tier.HOST)}:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            fillers = chain_filler()
            while set(await tiers_of(server, refs)) != {(Tier.GPU,)}:
                await client.put(next(fillers))
            assert await client.get(refs) == 8, "the client compares every byte"
            assert [tier.tier for tier in server.status().tiers] == [Tier.GPU, Tier.HOST]

    asyncio.run(scenario())


def test_a_gpu_tier_larger_than_its_device_is_refused_at_the_start(serving):
    async def scenario():
        async with serving(gpu_device="cpu", gpu_capacity=Bytes(1 << 43)):
            pass

    with pytest.raises(ConfigError, match="gpu_capacity"):
        asyncio.run(scenario())


def test_a_node_without_a_gpu_tier_does_not_import_torch():
    code = "import sys, kvstore.node.server; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
