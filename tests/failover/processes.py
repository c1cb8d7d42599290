"""kill -9 and SIGSTOP on the decode processes of a real cluster, while clients stream."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from verdict import Tally

from kvstore.admin.local_cluster import ClusterPlan, LocalCluster
from kvstore.admin.local_process import LocalProcess, wait_until_ready
from kvstore.admin.stream_client import Stream, stream_chat
from kvstore.errors import LarderError
from kvstore.units import seconds

DECODE_NODES = 4
CLIENTS = 4
ANSWER = 200
TEXT = "The larder keeps what the kitchen has cooked, and whoever comes back finds it on the shelf and goes on. "
OPTIONS: tuple[dict[str, object], ...] = ({"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 11})


@dataclass(frozen=True)
class Blow:
    kind: str
    node: str
    at: float
    """Of the monotonic clock."""


class Load:
    """Clients that ask the same few questions again and again; every answer is known from before the first blow."""

    def __init__(self, http: httpx.AsyncClient, model: str, tally: Tally) -> None:
        self._http, self._model, self._tally = http, model, tally
        self._bodies = [
            {"messages": [{"role": "user", "content": TEXT * size + f"What is number {number}?"}], **options}
            for number, (size, options) in enumerate(itertools.product((1, 6, 12), OPTIONS))
        ]
        self._expected: list[list[int]] = []
        self._numbers = itertools.count()
        self.streams: list[Stream] = []

    async def learn(self) -> None:
        for number in range(len(self._bodies)):
            self._expected.append((await self._ask(number)).token_ids)

    async def _ask(self, number: int, partial: Callable[[Stream], None] = lambda stream: None) -> Stream:
        body = {"model": self._model, "max_tokens": ANSWER, "ignore_eos": True, **self._bodies[number]}
        return await stream_chat(self._http, body, on_token=partial)

    async def client(self, over: asyncio.Event) -> None:
        while not over.is_set():
            turn = next(self._numbers)
            number = turn % len(self._bodies)
            latest: list[Stream] = []
            broken = None
            try:
                await self._ask(number, latest.append)
            except LarderError as error:
                broken = str(error)
            stream = latest[-1] if latest else Stream(sent_at=time.monotonic())
            self._tally.judge(f"stream {turn}", expected=self._expected[number], got=stream.token_ids, broken=broken)
            self._tally.failovers += stream.larder.get("failovers", 0)
            self.streams.append(stream)


class Hand:
    """Strikes decode nodes, and brings them back; never the last two that stand."""

    def __init__(self, cluster: LocalCluster, draw: random.Random) -> None:
        self._processes: dict[str, LocalProcess] = {name: p for name, p in cluster.processes.items() if p.role == "decode"}
        self._draw = draw
        self._down: dict[str, asyncio.Future[None]] = {}
        self.blows: list[Blow] = []

    async def strike(self) -> None:
        while len(up := [name for name in self._processes if name not in self._down]) <= 2:
            await asyncio.wait(self._down.values(), return_when=asyncio.FIRST_COMPLETED)
            self._forget()
        name = self._draw.choice(up)
        process, kind = self._processes[name], self._draw.choice(("kill -9", "SIGSTOP"))
        self.blows.append(Blow(kind, name, time.monotonic()))
        if kind == "SIGSTOP":
            os.kill(process.pid, signal.SIGSTOP)
            self._down[name] = asyncio.ensure_future(self._thaw(process, self._draw.uniform(1.5, 2.5)))
        else:
            process.kill()
            process.start()  # in this thread: the child ends with it
            self._down[name] = asyncio.ensure_future(asyncio.to_thread(wait_until_ready, [process], timeout=seconds(300)))
        self._forget()

    async def _thaw(self, process: LocalProcess, after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
        finally:
            os.kill(process.pid, signal.SIGCONT)

    def _forget(self) -> None:
        for name, coming in list(self._down.items()):
            if coming.done():
                coming.result()
                del self._down[name]

    async def settle(self) -> None:
        await asyncio.gather(*self._down.values())


def note_gaps(tally: Tally, blows: list[Blow], streams: list[Stream]) -> None:
    """For each blow, what each stream that its node was serving waited for the next token."""
    for blow in blows:
        for stream in streams:
            if blow.node not in list(stream.larder.get("decode_nodes", ()))[:-1]:
                continue
            around = [late - early for early, late in itertools.pairwise(stream.arrivals) if late > blow.at and early < blow.at + 0.3]
            # A stream that another blow had moved away before does not feel this one.
            if around and (longest := max(around)) > 0.005:
                tally.gap(blow.kind, longest * 1e3)


async def run_processes(tally: Tally, model: Path, folder: Path, *, blows: int, seed: int, tell: Callable[[int], None]) -> None:
    compute: tuple[tuple[str, Any], ...] = (("threads", 1), ("pool_blocks", 192))
    cluster = LocalCluster(ClusterPlan(folder=folder, model=str(model), decode_nodes=DECODE_NODES, compute=compute))
    with cluster:
        cluster.start()
        async with httpx.AsyncClient(base_url=cluster.gateway_url, timeout=120, trust_env=False) as http:
            name = (await http.get("/v1/models")).json()["data"][0]["id"]
            load, hand, over = Load(http, name, tally), Hand(cluster, random.Random(seed)), asyncio.Event()
            await load.learn()
            clients = [asyncio.ensure_future(load.client(over)) for _ in range(CLIENTS)]
            try:
                for _ in range(blows):
                    await asyncio.sleep(random.Random(seed + len(hand.blows)).uniform(0.2, 1.0))
                    await hand.strike()
                    tally.kills += 1
                    tell(len(hand.blows))
                await hand.settle()
                over.set()
                await asyncio.gather(*clients)
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)
                with suppress(Exception):
                    await hand.settle()
        note_gaps(tally, hand.blows, load.streams)
