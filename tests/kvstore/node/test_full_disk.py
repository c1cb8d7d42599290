"""A full disk: puts degrade to the host tier with a reason, reads go on, and nothing half-written is listed."""

import asyncio
import contextlib

from kvstore.core.extent import Tier
from kvstore.units import KIB, MIB, Bytes, seconds


def test_a_medium_filled_by_somebody_else_degrades_puts_and_not_reads(tiny_tmpfs, serving, chain, tiers_of, push_to_ssd, eventually):
    folder = tiny_tmpfs(Bytes(8 * MIB))

    async def scenario():
        async with serving(ssd_path=folder / "ssd", ssd_capacity=Bytes(6 * MIB), demote_above=0.0, drain_deadline=seconds(0.2)) as (
            server,
            client,
        ):
            early = chain("early", 8)
            await client.store(early)
            await push_to_ssd(server, client, early)
            _fill(folder / "of-somebody-else")
            for number in range(40):
                await client.store(chain(f"late-{number}", 8))
            await eventually(lambda: _failures(server))
            assert await client.get(chain("late-39", 8)) == 8
            tiers = await tiers_of(server, early)
            assert all(found in ((Tier.SSD,), ()) for found in tiers)
            assert await client.get(early) == sum(bool(found) for found in tiers)

    asyncio.run(scenario())


def test_two_nodes_share_a_small_medium_without_a_corrupt_block(tiny_tmpfs, serving, chain):
    folder = tiny_tmpfs(Bytes(6 * MIB))

    async def scenario():
        keys = {"ssd_capacity": Bytes(5 * MIB), "demote_above": 0.0, "host_capacity": Bytes(MIB), "drain_deadline": seconds(0.2)}
        async with serving(ssd_path=folder / "a", **keys) as (_, first), serving(ssd_path=folder / "b", **keys) as (_, second):
            for number in range(60):
                await asyncio.gather(first.store(chain(f"f{number}", 8)), second.store(chain(f"s{number}", 8)))
            for client, name in ((first, "f"), (second, "s")):
                found = [await client.get(chain(f"{name}{number}", 8)) for number in range(60)]  # each compared with the oracle
                assert found[-1] == 8

    asyncio.run(scenario())


def _fill(path):
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(64 * KIB)):
            pass


def _failures(server):
    return sum(count for name, count in server.status().counters.items() if "failed" in name)
