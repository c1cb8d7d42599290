"""Four real node processes and a real Redis at R = 2: a death, a join and a drain, and every time all of it is whole again by itself."""

import asyncio
import contextlib
import json
import subprocess
import sys

import pytest

from kvstore.admin import upkeep
from kvstore.admin.cluster_access import ClusterAccess
from kvstore.client import Acknowledge, BlockPut, PutOutcome, StoreClient
from kvstore.core.placement import place
from kvstore.core.view import MemberState
from kvstore.registry import EmbeddedRedis, RedisRegistry, RegistryConfig
from kvstore.rpc.admin_stub import AdminStub
from kvstore.rpc.channel import ChannelPool
from kvstore.units import milliseconds, seconds

SOON = seconds(10)


def start(node_id, redis):
    flags = {
        "node_id": node_id,
        "redis_url": redis.url,
        "zone": node_id,
        "host_capacity": "16MiB",
        "log_level": "warning",
        "registry.lease_ttl": "1s",
        "registry.dead_after": "1s",
        "repair.delay": "100ms",
        "repair.anti_entropy_every": "2s",
    }
    command = [sys.executable, "-m", "kvstore.node", *(f"--{key}={value}" for key, value in flags.items())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def until_ready(process):
    line = await asyncio.to_thread(process.stdout.readline)
    assert line.startswith("READY "), line


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


def kvctl(redis, *words):
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.admin.kvctl", *words, "--redis", redis.url, "--json"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Watch:
    """Asks every living node itself where each block is."""

    def __init__(self, registry, channels, key_space, refs):
        self._registry, self._channels, self._key_space, self._refs = registry, channels, key_space, refs

    async def whole(self):
        view = self._registry.view
        held = {}
        for member in view.stores:
            if member.state in (MemberState.ACTIVE, MemberState.SUSPECT, MemberState.DRAINING):
                try:
                    stub = AdminStub(self._channels.get(member.address))
                    held[member.node_id] = await stub.locate(self._key_space, self._refs, timeout=SOON)
                except Exception:  # killed a moment ago
                    held[member.node_id] = None
        for number, ref in enumerate(self._refs):
            for owner in place(ref.stripe, view, replicas=2):
                if held.get(owner) is None or not held[owner][number].tiers:
                    return False
        return True

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@pytest.mark.timeout(240)
def test_the_store_makes_itself_whole_after_a_death_takes_in_a_newcomer_and_lets_a_node_go(chain, payload, key_space):
    refs = [ref for number in range(12) for ref in chain(f"chain {number}", 16)]
    size = 20_000

    async def scenario(redis, processes):
        await asyncio.gather(*(until_ready(process) for process in processes.values()))
        config = RegistryConfig(poll_every=milliseconds(50))
        async with contextlib.AsyncExitStack() as stack:
            registry = await stack.enter_async_context(RedisRegistry(redis.url, config=config))
            client = await stack.enter_async_context(StoreClient(registry, replicas=2))
            channels = ChannelPool()
            stack.push_async_callback(channels.close)
            watch = Watch(registry, channels, key_space, refs)

            async def states(expected):
                return {member.node_id: member.state.value for member in registry.view.stores} == expected

            await watch.until(lambda: states(dict.fromkeys(("s1", "s2", "s3", "s4"), "active")))
            report = await client.put(
                key_space, [BlockPut(ref, payload(ref, size, key_space)) for ref in refs], acknowledge=Acknowledge.ALL
            )
            assert set(report.outcomes) == {PutOutcome.STORED}

            async def all_is_readable():
                for number in range(12):
                    run = refs[number * 16 : number * 16 + 16]
                    async with await client.acquire_prefix(key_space, run) as lease:
                        found = [block async for block in client.read(lease)]
                        assert len(found) == 16
                        for block in found:
                            assert block.payload == payload(run[block.index], size, key_space)

            processes["s2"].kill()
            await all_is_readable()
            await watch.until(lambda: states({"s1": "active", "s2": "dead", "s3": "active", "s4": "active"}))
            await watch.until(watch.whole)
            await all_is_readable()

            end(processes["s2"])
            processes["s2"] = start("s2", redis)
            await until_ready(processes["s2"])

            async def grown():
                member = registry.view.member("s2")
                return member is not None and member.state is MemberState.ACTIVE and member.takeover == 1.0

            await watch.until(grown)
            await watch.until(watch.whole)
            await all_is_readable()

            access = ClusterAccess(redis_url=redis.url, gateway_url=None)
            steps = []
            async with asyncio.timeout(60):
                record = await upkeep.drain(access, "s1", wait=True, on_progress=lambda *step: steps.append(step))
            assert record["drain"]["safe_to_stop"]
            assert steps[-1][0] == steps[-1][1] > 0
            assert await watch.whole()
            processes["s1"].terminate()
            await asyncio.to_thread(processes["s1"].wait, 20)
            await watch.until(lambda: states({"s1": "left", "s2": "active", "s3": "active", "s4": "active"}))
            await all_is_readable()
            status, planned, once = await asyncio.gather(
                *(asyncio.to_thread(kvctl, redis, *words) for words in (("status",), ("rebalance", "--dry-run"), ("top", "--once")))
            )
            assert status["repair"]["under_replicated_stripes"] == 0
            assert (planned["blocks"], planned["dry_run"]) == (0, True)
            assert {node["node_id"] for node in once["nodes"]} == {"s2", "s3", "s4"}

    with EmbeddedRedis() as redis:
        processes = {name: start(name, redis) for name in ("s1", "s2", "s3", "s4")}
        try:
            asyncio.run(scenario(redis, processes))
        finally:
            for process in processes.values():
                end(process)
