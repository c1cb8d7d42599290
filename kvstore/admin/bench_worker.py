"""One client of a benchmark, a process of its own: prepares, says READY, measures when told to, prints its result.

`python -m kvstore.admin.bench_worker` with one JSON line on stdin: the measurement, its number, and where the servers are.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kvstore.admin.bench_plan import NODE_CAPACITY, Measurement
from kvstore.admin.bench_redis import RedisRoute
from kvstore.client import Acknowledge, BlockPut, ClientConfig, PayloadMaker, PutOutcome, StoreClient
from kvstore.core.extent import Tier, round_up
from kvstore.errors import LarderError, Unavailable
from kvstore.ids import BlockHash, BlockRef, KeySpace, LayoutFingerprint, Namespace, StripeId
from kvstore.process import end_with_parent, keep_freed_memory
from kvstore.registry.redis_registry import RedisRegistry
from kvstore.tiers.direct import DirectFile
from kvstore.units import seconds

KEY_SPACE = KeySpace(Namespace("bench"), LayoutFingerprint(b"B" * 32))
_WARM_UP = 2


def chain_of(name: str, blocks: int) -> list[BlockRef]:
    hashes = [hashlib.sha256(f"{name}:{index}".encode()).digest() for index in range(blocks)]
    parents = [hashlib.sha256(name.encode()).digest(), *hashes]
    return [
        BlockRef(BlockHash(digest), BlockHash(parents[index]), StripeId(hashes[index - index % 8]), index)
        for index, digest in enumerate(hashes)
    ]


class StoreRoute:
    """Batches through a StoreClient. A get is acquire, read, release, as an engine does it."""

    def __init__(self, measurement: Measurement, number: int, client: StoreClient, payload: bytes) -> None:
        self._measurement = measurement
        self._number = number
        self._client = client
        self._payload = payload
        self.ssd_blocks = 0

    async def put(self, name: str) -> None:
        payload: bytes | PayloadMaker = self._payload
        if self._measurement.transport == "shm" and self._measurement.in_place:
            payload = PayloadMaker(len(self._payload), self._make)  # a copy stands for the codec's last pass
        puts = [BlockPut(ref, payload) for ref in chain_of(name, self._measurement.batch)]
        report = await self._client.put(KEY_SPACE, puts, acknowledge=Acknowledge.ALL)
        if set(report.outcomes) - {PutOutcome.STORED, PutOutcome.EXISTS}:
            raise Unavailable(f"not every block was stored: {dict(report.reasons)}")

    def _make(self, room: memoryview) -> None:
        room[:] = self._payload

    async def get(self, name: str) -> None:
        chain = chain_of(name, self._measurement.batch)
        async with await self._client.acquire_prefix(KEY_SPACE, chain) as lease:
            found = 0
            if self._measurement.op == "acquire":
                found = len(lease)
            else:
                async for block in self._client.read(lease, in_place=self._measurement.in_place):
                    found += block.payload is not None and block.still_good()
                    self.ssd_blocks += block.tier is Tier.SSD
        if found != len(chain):
            raise Unavailable(f"{len(chain) - found} of {len(chain)} blocks were not readable")


class MemoryRoute:
    """One copy of each payload: what no store can beat."""

    def __init__(self, measurement: Measurement, payload: bytes) -> None:
        self._sources = [bytearray(payload) for _ in range(measurement.batch * min(measurement.sets, 8))]
        self._targets = [memoryview(bytearray(payload)) for _ in range(measurement.batch)]
        self._at = 0

    async def put(self, name: str) -> None:
        for target in self._targets:
            target[:] = self._sources[self._at]
            self._at = (self._at + 1) % len(self._sources)

    get = put


class DiskRoute:
    """Reads of a file past the page cache, each of a block: what an SSD tier cannot beat. One thread reads, as one client asks."""

    def __init__(self, measurement: Measurement, path: Path, payload: bytes) -> None:
        self._file = DirectFile(path)
        self._batch = measurement.batch
        self._payload = payload
        self._step = round_up(len(payload))
        self._into = [memoryview(bytearray(payload)) for _ in range(measurement.batch)]
        self._places: dict[str, int] = {}

    async def put(self, name: str) -> None:
        place = self._places.setdefault(name, len(self._places)) * self._batch
        for index in range(self._batch):
            self._file.write((place + index) * self._step, [self._payload])

    async def get(self, name: str) -> None:
        place = self._places[name] * self._batch
        for index, into in enumerate(self._into):
            self._file.read_into((place + index) * self._step, into)


async def measure(measurement: Measurement, number: int, route: Any) -> dict[str, object]:
    names = [f"{number}-{index}" for index in range(measurement.sets)]
    if measurement.op != "put":
        for name in names:
            await route.put(name)
    fresh = f"{number}-{os.getpid()}-{time.monotonic_ns()}"
    operations = _operations(measurement.op, route, names, fresh)
    for turn in range(_warm_up(measurement)):
        await operations(-1 - turn)
    began_from_ssd = getattr(route, "ssd_blocks", 0)
    print("READY", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    latencies: list[float] = []
    cpu, started = time.process_time(), time.perf_counter()
    turn = 0
    while (began := time.perf_counter()) - started < measurement.seconds:
        await operations(turn)
        latencies.append((time.perf_counter() - began) * 1e3)
        turn += 1
    return {
        "moved_bytes": turn * measurement.batch * measurement.size_bytes,
        "wall_s": time.perf_counter() - started,
        "cpu_s": time.process_time() - cpu,
        "latencies_ms": latencies,
        "ssd_blocks": getattr(route, "ssd_blocks", 0) - began_from_ssd,
    }


def _warm_up(measurement: Measurement) -> int:
    """Batches. A put over shm goes once round the arena: the system zeroes each page under the first who writes there, and a store in
    service has that behind it."""
    if measurement.op == "put" and measurement.transport == "shm":
        return _WARM_UP + NODE_CAPACITY // (measurement.clients * measurement.batch * measurement.size_bytes)
    return _WARM_UP


def _operations(op: str, route: Any, names: list[str], fresh: str) -> Callable[[int], Awaitable[None]]:
    def turn(number: int) -> Awaitable[None]:
        if op == "put" or (op == "mixed" and number % 2):
            return route.put(f"{fresh}-{number}")  # type: ignore[no-any-return]
        return route.get(names[number % len(names)])  # type: ignore[no-any-return]

    return turn


async def main() -> None:
    task = json.loads(sys.stdin.readline())
    measurement = Measurement(**task["measurement"])
    number: int = task["number"]
    payload = os.urandom(measurement.size_bytes)
    match measurement.transport:
        case "memcpy":
            result = await measure(measurement, number, MemoryRoute(measurement, payload))
        case "direct":
            result = await measure(measurement, number, DiskRoute(measurement, Path(task["folder"]) / f"direct-{number}", payload))
        case "redis":
            result = await measure(measurement, number, RedisRoute(task["peer_redis_url"], measurement.batch, payload))
        case kind:
            config = ClientConfig(
                transports=(kind,),
                verify_mapped=measurement.verify,
                read_streams=measurement.streams,
                rpc_timeout=seconds(10),
                read_idle_timeout=seconds(10),
                lease_ttl=seconds(40),
            )
            async with RedisRegistry(task["redis_url"]) as registry:
                async with StoreClient(registry, replicas=measurement.replicas, config=config) as client:
                    result = await measure(measurement, number, StoreRoute(measurement, number, client, payload))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    end_with_parent()
    keep_freed_memory()
    try:
        asyncio.run(main())
    except LarderError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(1)
