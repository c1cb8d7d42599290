"""Mixed load by one client that knows every byte, at a set rate, whatever becomes of the stores: what `kvctl bench kill` measures with."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.admin.bench_plan import percentile
from kvstore.admin.bench_worker import KEY_SPACE, chain_of
from kvstore.client import Acknowledge, BlockPut, PutOutcome, StoreClient
from kvstore.errors import LarderError, Unavailable
from kvstore.ids import BlockRef

_HASH_BYTES = 32
_OFFSETS = 1 << 16
_MOST_AT_ONCE = 8
"""Operations. A machine too slow for the rate gets fewer a second, not a queue that grows."""
_PUTS_KEPT = 4
"""Chains put by the load that are not deleted yet: what is stored stays as much as it was."""


class Oracle:
    """What each block must read as: its hash, then bytes of one random piece from an offset that the hash gives."""

    def __init__(self, block_bytes: int, *, seed: int) -> None:
        assert block_bytes > _HASH_BYTES
        self.block_bytes = block_bytes
        self._piece = random.Random(seed).randbytes(block_bytes + _OFFSETS)

    def payload(self, ref: BlockRef) -> bytes:
        at = int.from_bytes(ref.hash[:2], "little")
        return ref.hash + self._piece[at : at + self.block_bytes - _HASH_BYTES]

    def knows(self, ref: BlockRef, payload: memoryview) -> bool:
        return bool(np.array_equal(np.frombuffer(payload, np.uint8), np.frombuffer(self.payload(ref), np.uint8)))


@dataclass(slots=True)
class Phase:
    """What the load met in one stretch of time. An operation belongs to that in which it ended."""

    seconds: float = 0.0
    gets_ms: list[float] = field(default_factory=list)
    """From the call to the last byte."""
    puts_ms: list[float] = field(default_factory=list)
    failed_reads: int = 0
    """Gets that did not find every block."""
    wrong_bytes: int = 0
    """Blocks that were not as they were put."""
    degraded_puts: int = 0
    """Fewer replicas than asked, and said so."""

    def as_record(self, name: str) -> dict[str, object]:
        gets, puts = sorted(self.gets_ms), sorted(self.puts_ms)
        return {
            "phase": name,
            "seconds": round(self.seconds, 1),
            "reads": len(gets),
            "failed_reads": self.failed_reads,
            "wrong_bytes": self.wrong_bytes,
            "read_p50_ms": round(percentile(gets, 0.5), 2),
            "read_p99_ms": round(percentile(gets, 0.99), 2),
            "puts": len(puts),
            "degraded_puts": self.degraded_puts,
            "put_p50_ms": round(percentile(puts, 0.5), 2),
            "put_p99_ms": round(percentile(puts, 0.99), 2),
        }


def joined(phases: Sequence[Phase]) -> Phase:
    """As if they had been one."""
    return Phase(
        seconds=sum(phase.seconds for phase in phases),
        gets_ms=[each for phase in phases for each in phase.gets_ms],
        puts_ms=[each for phase in phases for each in phase.puts_ms],
        failed_reads=sum(phase.failed_reads for phase in phases),
        wrong_bytes=sum(phase.wrong_bytes for phase in phases),
        degraded_puts=sum(phase.degraded_puts for phase in phases),
    )


class KillLoad:
    """`fill`, then `run` as a task while `enter` says which phase it is; it ends with `over`."""

    def __init__(self, client: StoreClient, oracle: Oracle, *, chain_blocks: int, ops_per_s: float, put_share: float, seed: int) -> None:
        self._client, self._oracle, self._chain_blocks = client, oracle, chain_blocks
        self._ops_per_s, self._put_share = ops_per_s, put_share
        self._draw = random.Random(seed)
        self._put_chains: list[list[BlockRef]] = []
        self._number = 0
        self._phase = ""
        self._entered = time.monotonic()
        self.puts = True
        """Whether there are any now."""
        self.chains: list[list[BlockRef]] = []
        """What `fill` put: all of it can be read, or something is wrong."""
        self.phases: dict[str, Phase] = defaultdict(Phase)
        self.over = asyncio.Event()

    async def fill(self) -> None:
        """One more chain, on all its replicas. Raises Unavailable."""
        chain = chain_of(f"filled {len(self.chains)}", self._chain_blocks)
        blocks = [BlockPut(ref, self._oracle.payload(ref)) for ref in chain]
        report = await self._client.put(KEY_SPACE, blocks, acknowledge=Acknowledge.ALL)
        if set(report.outcomes) - {PutOutcome.STORED, PutOutcome.EXISTS}:
            raise Unavailable(f"the cluster could not be filled: {dict(report.reasons)}")
        self.chains.append(chain)

    def enter(self, phase: str) -> None:
        now = time.monotonic()
        if self._phase:
            self.phases[self._phase].seconds += now - self._entered
        self._phase, self._entered = phase, now

    async def run(self) -> None:
        due = time.monotonic()
        places = asyncio.Semaphore(_MOST_AT_ONCE)

        async def one() -> None:
            try:
                await (self._put() if self.puts and self._draw.random() < self._put_share else self._get())
            finally:
                places.release()

        async with asyncio.TaskGroup() as group:
            while not self.over.is_set():
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await places.acquire()
                group.create_task(one())
                due = max(due + 1 / self._ops_per_s, time.monotonic())

    async def forget_puts(self) -> None:
        """Of the load; what `fill` put stays."""
        while self._put_chains:
            await self._client.delete(KEY_SPACE, self._put_chains.pop())

    async def _get(self) -> None:
        began = time.monotonic()
        chain = self._draw.choice(self.chains)
        payloads: dict[int, memoryview] = {}
        try:
            async with await self._client.acquire_prefix(KEY_SPACE, chain) as lease:
                async for block in self._client.read(lease):
                    if block.payload is not None:
                        payloads[block.index] = block.payload
        except LarderError:
            pass  # what did not come is counted
        phase = self.phases[self._phase]
        phase.gets_ms.append((time.monotonic() - began) * 1e3)
        phase.failed_reads += len(payloads) != len(chain)
        phase.wrong_bytes += sum(not self._oracle.knows(chain[index], payload) for index, payload in payloads.items())

    async def _put(self) -> None:
        chain = chain_of(f"put {self._number}", self._chain_blocks)
        self._number += 1
        self._put_chains.append(chain)
        blocks = [BlockPut(ref, self._oracle.payload(ref)) for ref in chain]
        began = time.monotonic()
        report = await self._client.put(KEY_SPACE, blocks)
        phase = self.phases[self._phase]
        phase.puts_ms.append((time.monotonic() - began) * 1e3)
        phase.degraded_puts += bool(set(report.outcomes) - {PutOutcome.STORED, PutOutcome.EXISTS})
        while len(self._put_chains) > _PUTS_KEPT:
            await self._client.delete(KEY_SPACE, self._put_chains.pop(0))
