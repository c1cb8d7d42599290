"""What sealing costs those that decode: canonical KV and write-behind, on and off, in turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.admin.bench_client import BenchClient, opened_client
from kvstore.admin.bench_rows import Row, median
from kvstore.admin.local_cluster import ClusterPlan, LocalCluster

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBehindPlan:
    batch: int = 8
    prompt_tokens: int = 48
    answer: int = 128
    rounds: int = 3


def plain_cluster(sealing: ClusterPlan, *, folder: Path) -> ClusterPlan:
    """The same without sealing, and so without a store to spend anything on. Prompts here are too short for a prefill node."""
    return replace(sealing, folder=folder, store_nodes=0, prefill_nodes=0, compute=(*sealing.compute, ("seal", False)))


async def measure_write_behind(sealing: LocalCluster, plain: LocalCluster, plan: WriteBehindPlan, tell: Tell) -> list[Row]:
    """The share of its speed that a batch loses, as the median over rounds, each of which has both."""
    async with opened_client(sealing.gateway_url) as with_it, opened_client(plain.gateway_url) as without:
        tell("write-behind: warming up")
        for client in (with_it, without):
            await client.warm_up()
        pairs = []
        for number in range(plan.rounds):
            tell(f"write-behind: round {number + 1} of {plan.rounds}")
            pairs.append((await _tokens_per_s(with_it, plan, seed=number), await _tokens_per_s(without, plan, seed=number)))
    lost = median([100 * (1 - sealed / bare) for sealed, bare in pairs])
    return [
        Row(what=f"decode of {plan.batch} streams, sealing and publishing", value=median([sealed for sealed, _ in pairs]), unit="tokens/s"),
        Row(what=f"decode of {plan.batch} streams, neither", value=median([bare for _, bare in pairs]), unit="tokens/s"),
        Row(what="canonical KV and write-behind cost", value=lost, unit="%", most=2.0),
    ]


async def _tokens_per_s(client: BenchClient, plan: WriteBehindPlan, *, seed: int) -> float:
    """Of all streams, from the last one's first token to the first one's last: the batch is whole in between."""
    prompts = [await client.prompt(plan.prompt_tokens, seed=10_000 + 100 * seed + number) for number in range(plan.batch)]
    streams = await asyncio.gather(*(client.ask(prompt, tokens=plan.answer) for prompt in prompts))
    begin, end = max(stream.arrivals[0] for stream in streams), min(stream.arrivals[-1] for stream in streams)
    return sum(begin < at <= end for stream in streams for at in stream.arrivals) / max(end - begin, 1e-9)
