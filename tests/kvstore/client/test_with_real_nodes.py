"""The client against real store nodes: processes of their own, found through a real Redis."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from kvstore.client import Acknowledge, BlockPut, ClientConfig, PutOutcome, StoreClient
from kvstore.core.placement import place
from kvstore.core.view import MemberState
from kvstore.registry import EmbeddedRedis, RedisRegistry, RegistryConfig
from kvstore.units import milliseconds, to_seconds

PAYLOAD_BYTES = 50_000
BLOCKS = 48
REPLICAS = 2
CONFIG = ClientConfig()


class NodeProcess:
    def __init__(self, node_id: str, redis_url: str) -> None:
        self.node_id = node_id
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvstore.node", f"--node_id={node_id}", f"--redis_url={redis_url}", f"--zone={node_id}"),
                *("--host_capacity=64MiB", "--registry.lease_ttl=1s", "--registry.dead_after=1s", "--log_level=warning"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )

    async def ready(self) -> None:
        assert self.process.stdout is not None
        line = await asyncio.to_thread(self.process.stdout.readline)
        assert line.startswith(f"READY {self.node_id} store "), line

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def spoil_memory(self) -> None:
        """Flip bits all over the node's arena, behind its back."""
        for number in os.listdir(f"/proc/{self.process.pid}/fd"):
            path = f"/proc/{self.process.pid}/fd/{number}"
            if "larder-host-arena" in os.readlink(path):
                with open(path, "r+b") as arena:
                    for offset in range(0, 64 << 20, 4096):
                        arena.seek(offset + 777)
                        byte = arena.read(1)
                        if byte != b"\0":  # pages nobody wrote stay untouched
                            arena.seek(offset + 777)
                            arena.write(bytes([byte[0] ^ 0x10]))
                return
        raise AssertionError("no arena")


class RealCluster:
    def __init__(self, nodes: dict[str, NodeProcess], registry: RedisRegistry, client: StoreClient, redis: EmbeddedRedis) -> None:
        self.nodes = nodes
        self.registry = registry
        self.client = client
        self.redis = redis

    def first_owner(self, ref: Any) -> NodeProcess:
        return self.nodes[place(ref.stripe, self.registry.view, replicas=REPLICAS)[0]]

    async def active(self, stores: int) -> None:
        async with asyncio.timeout(20):
            while sum(member.state is MemberState.ACTIVE for member in self.registry.view.stores) < stores:
                await self.registry.next_view(after=self.registry.view.epoch)


@asynccontextmanager
async def real_cluster(stores: int = 3) -> AsyncIterator[RealCluster]:
    with EmbeddedRedis() as redis:
        nodes = {f"s{number}": NodeProcess(f"s{number}", redis.url) for number in range(stores)}
        try:
            await asyncio.gather(*(node.ready() for node in nodes.values()))
            async with RedisRegistry(redis.url, config=RegistryConfig(poll_every=milliseconds(50))) as registry:
                async with StoreClient(registry, replicas=REPLICAS, config=CONFIG) as client:
                    cluster = RealCluster(nodes, registry, client, redis)
                    await cluster.active(stores)
                    yield cluster
        finally:
            for node in nodes.values():
                if node.process.returncode is None:
                    node.kill()


async def stored_chain(cluster: RealCluster, chain_of: Any, payload: Any, key_space: Any) -> Any:
    chain = chain_of(BLOCKS)
    puts = [BlockPut(ref, payload(ref, PAYLOAD_BYTES)) for ref in chain]
    report = await cluster.client.put(key_space, puts, acknowledge=Acknowledge.ALL)
    assert set(report.outcomes) == {PutOutcome.STORED}, report
    return chain


async def read_once(cluster: RealCluster, key_space: Any, chain: Any, payload: Any, begun: asyncio.Event | None = None) -> float:
    """Lease and read the whole chain; every block must come and be right. How long it took."""
    started = time.perf_counter()
    async with await cluster.client.acquire_prefix(key_space, chain) as lease:
        assert len(lease) == len(chain)
        seen = 0
        async for block in cluster.client.read(lease):
            assert block.payload is not None, block.reason
            assert block.payload == payload(chain[block.index], PAYLOAD_BYTES), "wrong bytes"
            seen += 1
            if begun is not None:
                begun.set()
        assert seen == len(chain)
    return time.perf_counter() - started


async def strike_while_reading(
    cluster: RealCluster, victim: NodeProcess, fault: signal.Signals, key_space: Any, chain: Any, payload: Any
) -> None:
    """Four readers go round while the fault comes in the middle of a read. None of them may miss a block."""
    reading, struck = asyncio.Event(), asyncio.Event()

    async def reader() -> list[float]:
        timings = []
        after = 0
        while after < 3:
            after += struck.is_set()
            timings.append(await read_once(cluster, key_space, chain, payload, reading))
        return timings

    async def strike() -> None:
        await reading.wait()
        victim.send(fault)
        struck.set()

    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(reader()) for _ in range(4)]
        group.create_task(strike())
    last = [task.result()[-1] for task in readers]
    assert max(last) < to_seconds(CONFIG.rpc_timeout), f"still paying for the lost node: {last}"


def test_no_read_fails_while_a_node_is_killed_or_when_it_comes_back_empty(
    run: Callable[..., Any], chain_of: Any, payload: Any, key_space: Any
) -> None:
    async def test() -> None:
        async with real_cluster() as cluster:
            chain = await stored_chain(cluster, chain_of, payload, key_space)
            victim = cluster.first_owner(chain[0])
            await strike_while_reading(cluster, victim, signal.SIGKILL, key_space, chain, payload)
            # Puts go on too, and say how many replicas they reached.
            fresh = chain_of(BLOCKS, seed="fresh")
            report = await cluster.client.put(key_space, [BlockPut(ref, payload(ref)) for ref in fresh], acknowledge=Acknowledge.ALL)
            assert PutOutcome.FAILED not in report.outcomes
            victim.kill()
            cluster.nodes[victim.node_id] = NodeProcess(victim.node_id, cluster.redis.url)
            await cluster.nodes[victim.node_id].ready()
            await cluster.active(3)
            await read_once(cluster, key_space, chain, payload)

    run(test())


def test_no_read_fails_while_a_node_is_frozen_and_it_is_used_again_when_it_thaws(
    run: Callable[..., Any], chain_of: Any, payload: Any, key_space: Any, until: Any
) -> None:
    async def test() -> None:
        async with real_cluster() as cluster:
            chain = await stored_chain(cluster, chain_of, payload, key_space)
            victim = cluster.first_owner(chain[0])
            await strike_while_reading(cluster, victim, signal.SIGSTOP, key_space, chain, payload)
            victim.send(signal.SIGCONT)
            await until(lambda: victim.node_id in cluster.client.usable_stores())
            await cluster.active(3)
            await read_once(cluster, key_space, chain, payload)

    run(test())


def test_rotten_bytes_are_never_handed_out_and_with_every_node_killed_all_is_a_miss_and_soon(
    run: Callable[..., Any], chain_of: Any, payload: Any, key_space: Any
) -> None:
    async def test() -> None:
        async with real_cluster() as cluster:
            chain = await stored_chain(cluster, chain_of, payload, key_space)
            cluster.first_owner(chain[0]).spoil_memory()
            for _ in range(3):
                await read_once(cluster, key_space, chain, payload)

            lease = await cluster.client.acquire_prefix(key_space, chain)
            for node in cluster.nodes.values():
                node.kill()
            started = time.perf_counter()
            blocks = [block async for block in cluster.client.read(lease)]
            assert len(blocks) == BLOCKS
            assert {block.payload for block in blocks} == {None}
            await lease.release()
            assert await cluster.client.probe_prefix(key_space, chain) == 0
            assert not await cluster.client.acquire_prefix(key_space, chain)
            report = await cluster.client.put(key_space, [BlockPut(ref, payload(ref)) for ref in chain])
            assert set(report.outcomes) == {PutOutcome.FAILED}
            assert time.perf_counter() - started < 5

    run(test())
