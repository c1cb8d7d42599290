"""What a decode node's death costs a stream: how soon it is noticed, and how long the next node takes to go on."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstore.admin.bench_client import BenchClient, opened_client
from kvstore.admin.bench_rows import Row, median
from kvstore.admin.local_cluster import ClusterPlan, LocalCluster
from kvstore.admin.stream_client import Stream
from kvstore.errors import Unavailable

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverPlan:
    prompts: tuple[tuple[int, float], ...] = ((2000, 1 / 5), (6000, 1 / 10))
    """Tokens of a prompt, and the share of its prefill that a takeover may take."""
    kills: int = 2
    answer: int = 88
    kill_after: int = 50
    """Tokens: one block of the answer is sealed by then, and a tail is open."""
    pool_blocks: int = 256


def failover_cluster(plan: FailoverPlan, *, folder: Path, model: str, cache_dir: Path | None) -> ClusterPlan:
    compute = (("pool_blocks", plan.pool_blocks),)
    return ClusterPlan(folder=folder, model=model, cache_dir=cache_dir, store_nodes=2, decode_nodes=2, compute=compute)


async def measure_failover(cluster: LocalCluster, plan: FailoverPlan, tell: Tell) -> list[Row]:
    """Raises Unavailable when a stream that was struck differs from the undisturbed one."""
    async with opened_client(cluster.gateway_url) as client:
        tell("failover: warming up")
        await client.warm_up()
        return await _Failovers(cluster, client, plan, tell).rows()


@dataclass(frozen=True, slots=True)
class Struck:
    """A stream whose decode node was struck at an instant of the monotonic clock."""

    stream: Stream
    at: float

    @property
    def takeover_ms(self) -> float:
        return float(self.stream.larder["takeover_ms"])

    @property
    def notice_ms(self) -> float:
        """From the blow until it was noticed: the wait for the successor's first token, less what the takeover took."""
        arrivals = self.stream.arrivals
        _, resumed = max(itertools.pairwise(arrivals), key=lambda pair: pair[1] - max(pair[0], self.at))
        return round((resumed - self.at) * 1e3 - self.takeover_ms, 1)


class _Failovers:
    def __init__(self, cluster: LocalCluster, client: BenchClient, plan: FailoverPlan, tell: Tell) -> None:
        self._cluster = cluster
        self._client = client
        self._plan = plan
        self._tell = tell
        self._starting: str | None = None
        """A node that was struck last, and started anew beside what does not mind."""

    async def rows(self) -> list[Row]:
        rows: list[Row] = []
        dead: list[float] = []
        for tokens, most in self._plan.prompts:
            prompt = await self._client.prompt(tokens, seed=tokens)
            self._wait_until_whole()
            self._tell(f"failover: {tokens:,} tokens, cold")
            cold = await self._client.ask(prompt, tokens=1)
            struck = [await self._struck(prompt, signal.SIGKILL) for _ in range(self._plan.kills)]
            await self._check(prompt, struck)
            dead += [it.notice_ms for it in struck]
            takeover = median([it.takeover_ms for it in struck])
            what = f"takeover after kill -9, {tokens:,} tokens, beside their prefill"
            rows.append(Row(what=what, value=takeover, unit="ms", beside=cold.ttft_ms, most=most))
        prompt = await self._client.prompt(self._plan.prompts[0][0], seed=7)
        frozen = await self._struck(prompt, signal.SIGSTOP)
        await self._check(prompt, [frozen])
        return [
            Row(what="a dead decode node is noticed after", value=max(dead), unit="ms", most=100),
            Row(what="a frozen decode node is noticed after", value=frozen.notice_ms, unit="ms", most=1000),
            *rows,
        ]

    async def _struck(self, prompt: list[int], blow: signal.Signals) -> Struck:
        """A stream whose decode node is struck in the middle. The other node has an empty pool: it has only just been started, or never
        served this prompt; and the struck one is started anew for the next blow."""
        self._wait_until_whole()
        self._tell(f"failover: {len(prompt):,} tokens, {blow.name}")
        victims: list[str] = []
        at = 0.0

        def strike(stream: Stream) -> None:
            nonlocal at
            if not victims and len(stream.token_ids) >= self._plan.kill_after:
                victims.append(self._cluster.decode_node_of_the_only_stream())
                os.kill(self._cluster.processes[victims[0]].pid, blow)
                at = time.monotonic()

        stream = await self._client.ask(prompt, tokens=self._plan.answer, on_token=strike)
        self._tell(f"failover: {victims[0]} starts anew")
        self._cluster.processes[victims[0]].kill()
        self._cluster.start_anew(victims[0])
        self._starting = victims[0]
        if stream.larder["failovers"] < 1:
            raise Unavailable(f"{victims[0]} was struck, and no stream moved")
        return Struck(stream, at)

    def _wait_until_whole(self) -> None:
        if self._starting is not None:
            self._cluster.wait_until_back(self._starting)
            self._starting = None

    async def _check(self, prompt: list[int], struck: list[Struck]) -> None:
        whole = await self._client.ask(prompt, tokens=self._plan.answer)
        if any(it.stream.token_ids != whole.token_ids for it in struck):
            raise Unavailable("a stream that changed its node has other tokens than the undisturbed one")
