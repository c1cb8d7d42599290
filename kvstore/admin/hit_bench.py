"""What a hit costs: cold against the store's host tier, with a replica just killed, and what a load costs those that run beside it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.admin import commands
from kvstore.admin.bench_client import BenchClient, opened_client
from kvstore.admin.bench_rows import Row, Window, median, parted_gaps_ms, percentile
from kvstore.admin.cluster_access import ClusterAccess
from kvstore.admin.local_cluster import ClusterPlan, LocalCluster
from kvstore.admin.stream_client import Stream
from kvstore.errors import Unavailable

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HitPlan:
    prompt_tokens: int = 2000
    prompts: int = 4
    """Asked in turn, so that the decode node's pool, which holds two of them, has always let go of the next one."""
    rounds: int = 3
    batch: int = 4
    """Streams that run while prefixes are loaded."""
    loads: int = 16
    block_tokens: int = 32

    @property
    def pool_blocks(self) -> int:
        return 2 * -(-self.prompt_tokens // self.block_tokens) + self.block_tokens // 2


def hit_cluster(plan: HitPlan, *, folder: Path, model: str, cache_dir: Path | None) -> ClusterPlan:
    """One decode node, so that all of its hits are of one pool."""
    compute = (("pool_blocks", plan.pool_blocks),)
    return ClusterPlan(folder=folder, model=model, cache_dir=cache_dir, store_nodes=3, decode_nodes=1, compute=compute)


async def measure_hits(cluster: LocalCluster, plan: HitPlan, tell: Tell) -> list[Row]:
    """Leaves store nodes restarted."""
    async with opened_client(cluster.gateway_url) as client:
        tell("hits: warming up")
        await client.warm_up()
        return await _Hits(cluster, client, plan, tell).rows()


class _Hits:
    def __init__(self, cluster: LocalCluster, client: BenchClient, plan: HitPlan, tell: Tell) -> None:
        self._cluster = cluster
        self._client = client
        self._plan = plan
        self._tell = tell
        self._turns: itertools.cycle[list[int]] = itertools.cycle(())

    async def rows(self) -> list[Row]:
        plan, tokens = self._plan, f"{self._plan.prompt_tokens:,} tokens"
        prompts = [await self._client.prompt(plan.prompt_tokens, seed=seed) for seed in range(plan.prompts)]
        self._turns = itertools.cycle(prompts)
        cold = []
        for number, prompt in enumerate(prompts, 1):
            self._tell(f"hits: cold prompt {number} of {plan.prompts}")
            cold.append((await self._client.ask(prompt, tokens=1)).ttft_ms)
        self._tell("hits: from the store")
        hits = [await self._hit() for _ in range(plan.rounds * plan.prompts)]
        after_kill = [await self._hit_after_kill(name) for name in ("store-1", "store-2")]
        loaded, undisturbed = await self._itl()
        return [
            Row(what=f"TTFT of {tokens}, cold", value=median(cold), unit="ms"),
            Row(what=f"TTFT of {tokens}, from the store", value=median(hits), unit="ms", beside=median(cold), most=0.1),
            Row(what="the same, a store node just killed", value=median(after_kill), unit="ms", beside=median(hits), most=1.5),
            Row(what=f"ITL p99 while {tokens} are loaded", value=loaded, unit="ms", beside=undisturbed, most=1.2),
        ]

    async def _hit(self) -> float:
        """TTFT of the next prompt, which must come from the store, all but the tail."""
        stream = await self._client.ask(next(self._turns), tokens=1)
        full = (self._plan.prompt_tokens - 1) // self._plan.block_tokens
        if stream.larder["store_blocks"] < full or stream.larder["pool_blocks"]:
            raise Unavailable(f"no hit from the store: {full} full blocks, and {dict(stream.larder)}")
        return stream.ttft_ms

    async def _hit_after_kill(self, name: str) -> float:
        self._tell(f"hits: kill -9 of {name}")
        self._cluster.processes[name].kill()
        ttft_ms = await self._hit()
        self._tell(f"hits: {name} comes back")
        self._cluster.restart(name)
        access = ClusterAccess(redis_url=self._cluster.redis_url, gateway_url=self._cluster.gateway_url)
        await commands.repair(access, lambda *_: None)
        return ttft_ms

    async def _itl(self) -> tuple[float, float]:
        """p99 of the gaps of a running batch that touch a load, and of the others."""
        self._tell(f"hits: {self._plan.loads} loads beside {self._plan.batch} streams")
        over = asyncio.Event()
        streams: list[Stream] = []
        prompts = [await self._client.prompt(40, seed=1000 + number) for number in range(self._plan.batch)]
        running = [asyncio.ensure_future(self._keep_asking(prompt, streams, over)) for prompt in prompts]
        windows: list[Window] = []
        try:
            await asyncio.sleep(2.0)
            for _ in range(self._plan.loads):
                began = time.monotonic()
                await self._hit()
                windows.append((began, time.monotonic()))
                await asyncio.sleep(0.6)
            over.set()
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        inside, outside = parted_gaps_ms([_within(stream.arrivals, windows) for stream in streams], windows)
        return round(percentile(inside, 0.99), 1), round(percentile(outside, 0.99), 1)

    async def _keep_asking(self, prompt: list[int], streams: list[Stream], over: asyncio.Event) -> None:
        while not over.is_set():
            streams.append(await self._client.ask(prompt, tokens=200))


def _within(arrivals: Sequence[float], windows: Sequence[Window]) -> list[float]:
    """Those from the first load to the last: before and after it the batch grows and shrinks."""
    return [at for at in arrivals if windows[0][0] <= at <= windows[-1][1]]
