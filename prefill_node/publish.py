"""Sealed payloads on their way from the engine thread to the store, beside the compute.

One life of a payload: offered (engine thread) -> accepted | refused -> taken into a batch -> settled (readable or not). The queue is
bounded in bytes; whoever offers chooses what a full queue means: a prefill waits for room (up to a bound: its blocks are the whole
point of the work), a decode drops the payload (its stream must not wait for the store) and the block stays unpublished.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.client import Acknowledge, BlockPut, KeySpace, PutOutcome, PutReport
from kvstore.ids import AS_SEALED, BlockHash, BlockRef, RungCode
from kvstore.units import MIB, Bytes, Nanos, seconds, to_seconds
from prefill_node import metrics

log = logging.getLogger(__name__)

BlockName = tuple[KeySpace, BlockHash]

READABLE = frozenset({PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.DEGRADED})


class BlockSink(Protocol):
    """The part of StoreClient that publishing needs."""

    async def put(self, key_space: KeySpace, blocks: Sequence[BlockPut], *, acknowledge: Acknowledge = ...) -> PutReport: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishConfig:
    acknowledge: Acknowledge = Acknowledge.QUORUM
    queue_bytes: Bytes = Bytes(256 * MIB)
    """Payload bytes offered and not yet settled."""
    batch_blocks: int = 8
    """Blocks of one put: a stripe, so that one batch asks few nodes."""
    batches_in_flight: int = 3
    wait_for_room: Nanos = seconds(5)
    """How long an offer that may wait does wait."""


@dataclass(frozen=True, slots=True)
class SealedPayload:
    key_space: KeySpace
    ref: BlockRef
    payload: bytes
    rung: RungCode = AS_SEALED

    @property
    def name(self) -> BlockName:
        return self.key_space, self.ref.hash


class Publication:
    """What becomes of the blocks of one chain, whichever request seals them. Lives on the event loop; ends with `Publisher.forget`."""

    def __init__(self, names: Sequence[BlockName], *, pending: int) -> None:
        self.names = names
        self._run = 0
        self._readable: set[int] = set()
        self._pending = pending
        self._complete = False
        self._changed = asyncio.Event()
        self.degraded = False
        """Some block reached fewer replicas than asked for, or none."""

    @property
    def readable_blocks(self) -> int:
        """Leading blocks of the chain known to be readable from the store."""
        return self._run

    @property
    def is_complete(self) -> bool:
        """The request that follows this chain has nothing left to compute."""
        return self._complete

    @property
    def done(self) -> bool:
        return self._complete and self._pending == 0

    async def changed(self) -> None:
        """Wait until something happened since the last return."""
        await self._changed.wait()
        self._changed.clear()

    def note_readable(self, blocks: int) -> None:
        """`blocks` leading blocks were found in the store."""
        self._run = max(self._run, blocks)
        self._advance()

    def accepted(self) -> None:
        self._pending += 1

    def settled(self, index: int, outcome: PutOutcome) -> None:
        self._pending -= 1
        self.degraded |= outcome is not PutOutcome.STORED and outcome is not PutOutcome.EXISTS
        if outcome in READABLE:
            self._readable.add(index)
        self._advance()

    def refused(self) -> None:
        """A block of this chain will not be published: the queue had no room, or the codec failed."""
        self.degraded = True
        self._changed.set()

    def complete(self) -> None:
        self._complete = True
        self._changed.set()

    def _advance(self) -> None:
        while self._run in self._readable:
            self._run += 1
        self._readable = {index for index in self._readable if index > self._run}
        self._changed.set()


class Publisher:
    """Owns the queue. `offer` is for any thread; everything else belongs to the loop that runs `run`."""

    def __init__(self, sink: BlockSink, *, config: PublishConfig) -> None:
        self._sink = sink
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room = threading.Condition()
        self._held_bytes = 0
        self._closed = False
        self._queue: deque[SealedPayload] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight = 0
        self._watchers: dict[BlockName, set[Publication]] = {}
        self._unsettled: Counter[BlockName] = Counter()

    @property
    def queued_blocks(self) -> int:
        """Accepted and in no batch yet."""
        return len(self._queue)

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    # -- any thread

    def offer(self, sealed: SealedPayload, *, wait: bool) -> bool:
        """Take over a payload; False when it was refused (no room, closed). Blocks for up to `wait_for_room` only if `wait`."""
        size = len(sealed.payload)
        with self._room:
            if wait and not self._closed and not self._fits(size):
                self._room.wait_for(lambda: self._closed or self._fits(size), timeout=to_seconds(self._config.wait_for_room))
            reason = "closed" if self._closed or self._loop is None else None if self._fits(size) else "queue_full"
            if reason is None:
                self._held_bytes += size
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._accept, sealed)
                return True
            metrics.unpublished_blocks.labels(reason=reason).inc()
            if not self._closed and self._loop is not None:
                self._loop.call_soon_threadsafe(self._refuse, sealed.name)
            return False

    def refuse(self, name: BlockName) -> None:
        """Note that a block was sealed without a payload (the codec failed)."""
        with self._room:
            if not self._closed and self._loop is not None:
                self._loop.call_soon_threadsafe(self._refuse, name)

    def _fits(self, size: int) -> bool:
        # A payload larger than the whole queue may pass through an empty one: it must not wait for ever.
        return self._held_bytes == 0 or self._held_bytes + size <= self._config.queue_bytes

    # -- the loop

    def watch(self, key_space: KeySpace, chain: Sequence[BlockRef]) -> Publication:
        """Follow the blocks of a chain from now on, those that are on their way already included."""
        names = [(key_space, ref.hash) for ref in chain]
        publication = Publication(names, pending=sum(self._unsettled[name] for name in names))
        for name in names:
            self._watchers.setdefault(name, set()).add(publication)
        return publication

    def forget(self, publication: Publication) -> None:
        for name in publication.names:
            watchers = self._watchers.get(name, set())
            watchers.discard(publication)
            if not watchers:
                self._watchers.pop(name, None)

    def is_on_its_way(self, name: BlockName) -> bool:
        """Accepted and not settled yet."""
        return self._unsettled[name] > 0

    async def run(self) -> None:
        """Put batches until cancelled. Start it before the first offer."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            for _ in range(self._config.batches_in_flight):
                group.create_task(self._put_batches())
            try:
                await asyncio.Event().wait()
            finally:
                with self._room:  # before the batches in flight are let go and make room for more
                    self._closed = True
                    self._room.notify_all()

    async def flush(self, *, timeout: Nanos) -> bool:
        """Wait until everything offered has settled; False when `timeout` came first."""
        # One turn of the loop lets offers that are already scheduled be counted.
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(to_seconds(timeout)):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _accept(self, sealed: SealedPayload) -> None:
        self._unsettled[sealed.name] += 1
        for publication in self._watchers.get(sealed.name, ()):
            publication.accepted()
        self._queue.append(sealed)
        self._idle.clear()
        self._wake.set()

    def _refuse(self, name: BlockName) -> None:
        for publication in self._watchers.get(name, ()):
            publication.refused()

    async def _put_batches(self) -> None:
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            batch = self._take_batch()
            self._in_flight += 1
            outcomes = [PutOutcome.FAILED] * len(batch)
            try:
                outcomes = await self._put(batch)
            finally:
                self._in_flight -= 1
                self._settle(batch, outcomes)

    def _take_batch(self) -> list[SealedPayload]:
        """The oldest payload and those behind it of the same key space, in order."""
        batch = [self._queue.popleft()]
        while self._queue and len(batch) < self._config.batch_blocks and self._queue[0].key_space == batch[0].key_space:
            batch.append(self._queue.popleft())
        return batch

    async def _put(self, batch: list[SealedPayload]) -> list[PutOutcome]:
        try:
            report = await self._sink.put(
                batch[0].key_space,
                [BlockPut(ref=sealed.ref, payload=sealed.payload, rung=sealed.rung) for sealed in batch],
                acknowledge=self._config.acknowledge,
            )
        except Exception:
            # Publishing is cache trouble, and cache trouble must not take the streams of this process down with it.
            log.exception("a put of %d blocks raised", len(batch))
            metrics.unpublished_blocks.labels(reason="internal").inc(len(batch))
            return [PutOutcome.FAILED] * len(batch)
        return list(report.outcomes)

    def _settle(self, batch: list[SealedPayload], outcomes: list[PutOutcome]) -> None:
        for sealed, outcome in zip(batch, outcomes, strict=True):
            if outcome not in READABLE:
                metrics.unpublished_blocks.labels(reason="put_failed").inc()
            self._unsettled[sealed.name] -= 1
            if not self._unsettled[sealed.name]:
                del self._unsettled[sealed.name]
            for publication in self._watchers.get(sealed.name, ()):
                publication.settled(sealed.ref.index, outcome)
        with self._room:
            self._held_bytes -= sum(len(sealed.payload) for sealed in batch)
            self._room.notify_all()
        if not self._queue and self._in_flight == 0:
            self._idle.set()
