"""Reading leased blocks: batches per node side by side, each payload verified, each block that fails asked of the next replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvstore.byte_budget import ByteBudget
from kvstore.client import metrics
from kvstore.client.answers import ReadBlock
from kvstore.client.batches import batches, shares
from kvstore.client.config import ClientConfig
from kvstore.client.hedging import Asked
from kvstore.client.lease_keeper import LeaseKeeper
from kvstore.client.mapped_read import MappedRead, fresh_memory
from kvstore.client.node_calls import NodeCalls, reason_of
from kvstore.client.prefix_lease import HeldState, LeasedCopy, PrefixLease
from kvstore.client.side_by_side import all_of
from kvstore.clock import Clock
from kvstore.codec.checksum import payload_checksum
from kvstore.errors import LarderError, LeaseExpired
from kvstore.ids import NodeId
from kvstore.transport import PayloadSlot, ReadOutcome
from kvstore.units import MIB, Bytes, Nanos, to_seconds

LEAST_STREAM_BYTES = Bytes(2 * MIB)
"""A stream more must be worth its request and its task."""

_LEASE_GONE = frozenset({ReadOutcome.NOT_LEASED.value, reason_of(LeaseExpired(""))})


@dataclass(slots=True, eq=False)
class _Wanted:
    """One block on its way through the replicas."""

    index: int
    copy: LeasedCopy
    asked: set[NodeId] = field(default_factory=set)
    leased_again: bool = False
    """Whether a node that said "not leased" was asked for a new lease. Once is enough: then its time is too short for us."""
    reason: str = ""
    race: _Race = field(default_factory=lambda: _Race())

    def twin(self) -> _Wanted:
        """The same block, to be had from another replica as well."""
        self.race.paths += 1
        return _Wanted(self.index, self.copy, self.asked, self.leased_again, "late", self.race)


@dataclass(slots=True)
class _Race:
    """Of the one or two ways by which a block is being read at a time."""

    paths: int = 1
    settled: bool = False


class PrefixRead:
    """One read of one lease, of what takes more than a look into mapped memory. What is started puts each of its blocks into `arrived`.
    None in there: a bug, which `until_end` raises. The caller closes it."""

    def __init__(
        self, lease: PrefixLease, nodes: NodeCalls, keeper: LeaseKeeper, mapped: MappedRead, *, config: ClientConfig, clock: Clock
    ) -> None:
        self.lease = lease
        self.nodes = nodes
        self.keeper = keeper
        self._config = config
        self.clock = clock
        self._mapped = mapped
        self.budget = ByteBudget(config.read_ahead_bytes)
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: list[_Stream] = []
        """Those without a task."""
        self._bug: Exception | None = None
        self.hedged = False
        """Whether something was asked of a second replica because it was late: a stream of the first may stand still yet."""
        self.arrived: asyncio.Queue[ReadBlock | None] = asyncio.Queue()

    def start(self, indices: Sequence[int]) -> None:
        """By the node that holds the lease on each: without a task where a stream is at hand."""
        by_lease: dict[int, list[_Wanted]] = {}
        for index in indices:
            block = _Wanted(index, self.lease.copies[index])
            by_lease.setdefault(id(block.copy.held), []).append(block)
        left = [blocks for blocks in by_lease.values() if not self._read_now(blocks)]
        if left:
            self._begin(all_of([self._read_in_batches(blocks) for blocks in left]))

    def start_elsewhere(self, failed: Mapping[int, str]) -> None:
        """Blocks that could not be read where they are leased, each with its reason."""
        blocks = []
        for index, reason in failed.items():
            copy = self.lease.copies[index]
            blocks.append(_Wanted(index, copy, {copy.held.node_id}, reason=reason))
        self._begin(self._fall_over(blocks))

    async def until_end(self) -> None:
        """Waits for the end of what was started. Raises what a bug in it raised."""
        if self._bug is not None:
            raise self._bug
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Ends what is under way."""
        for stream in self._streams:
            stream.stop()
        if self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self.arrived.put_nowait(None)

    def taken(self, block: ReadBlock) -> None:
        """The consumer has the block: more may be asked for."""
        if block.payload is not None:
            self.budget.give_back(len(block.payload))

    def _read_now(self, wanted: Sequence[_Wanted]) -> bool:
        """What one node holds, if it is one batch, and a connection is at hand. False: it takes a task."""
        held, config = wanted[0].copy.held, self._config
        size: int = sum([block.copy.payload_bytes for block in wanted])
        if (
            held.state is not HeldState.HELD
            or len(wanted) > config.batch_blocks
            or size > config.batch_bytes
            or (config.read_streams > 1 and size >= 2 * LEAST_STREAM_BYTES)
            or not self.budget.fits(size)
            or any([self._mapped.view(block.copy) is not None for block in wanted])
        ):
            return False
        stream = _Stream(self, wanted)

        def ended(error: Exception | None) -> None:
            if error is not None and not isinstance(error, LarderError):
                self._bug = error
                self.arrived.put_nowait(None)
                return
            failed = stream.ended(ReadOutcome.MALFORMED.value if error is None else reason_of(error))
            if failed:
                self._begin(self._fall_over(failed))

        stop = self.nodes.read_now(
            held.node_id, held.lease_id, held.ticket, self.lease.key_space, stream.slots, arrived=stream.came, ended=ended
        )
        if stop is None:
            return False
        self.budget.take_now(size)
        for block in wanted:
            block.asked.add(held.node_id)
        stream.stop = stop
        self._streams.append(stream)
        late_after = self.nodes.router.hedges.late_after(held.node_id, Asked.READ)
        if late_after is not None:
            stream.timer = asyncio.get_running_loop().call_later(to_seconds(late_after), self._late, stream)
        return True

    def _late(self, stream: _Stream) -> None:
        again = self._late_blocks(stream.batch)
        if again:
            self._begin(self._fall_over(again))

    def _late_blocks(self, batch: Sequence[_Wanted]) -> list[_Wanted]:
        """Nothing has been heard of the batch in time. What is to be read from the next replicas too: whichever comes first is taken, block
        by block."""
        open_blocks = [block for block in batch if not block.race.settled]
        if not open_blocks or not self.nodes.router.hedges.take():
            return []
        metrics.second_requests.labels(Asked.READ.value).inc()
        self.hedged = True
        return [block.twin() for block in open_blocks]

    async def _read_in_batches(self, wanted: Sequence[_Wanted]) -> None:
        """From one node, one batch after another; what failed moves on while the next batch is read."""
        sized = ((block, block.copy.payload_bytes) for block in wanted)
        async with asyncio.TaskGroup() as group:
            for batch in batches(sized, most_items=self._config.batch_blocks, most_bytes=self._config.batch_bytes):
                failed, others = await self._read_mapped(batch)
                if others:
                    failed += await self._read_over_streams(others, group)
                if failed:
                    group.create_task(self._fall_over(failed))

    async def _read_over_streams(self, batch: Sequence[_Wanted], group: asyncio.TaskGroup) -> list[_Wanted]:
        """Over one stream, or over several at once if the batch is large. Returns what did not come."""
        sized = [(block, int(block.copy.payload_bytes)) for block in batch]
        parts = shares(sized, most=self._config.read_streams, least_bytes=LEAST_STREAM_BYTES)
        if len(parts) == 1:
            return await self._read_in_time(batch, group)
        streams = [group.create_task(self._read_in_time(part, group)) for part in parts]
        return [block for stream in streams for block in await stream]

    async def _read_in_time(self, batch: Sequence[_Wanted], group: asyncio.TaskGroup) -> list[_Wanted]:
        """One stream, and what it is late with from the next replicas too. Returns the blocks that did not come, each with its reason."""
        heard = asyncio.Event()
        late_after = self.nodes.router.hedges.late_after(batch[0].copy.held.node_id, Asked.READ)
        if late_after is not None:
            group.create_task(self._read_a_late_batch_elsewhere(batch, heard, late_after))
        try:
            return await self._read_batch(batch, heard)
        finally:
            heard.set()

    async def _read_a_late_batch_elsewhere(self, batch: Sequence[_Wanted], heard: asyncio.Event, late_after: Nanos) -> None:
        """From the next replicas too, unless something is heard of it in time."""
        try:
            async with asyncio.timeout(to_seconds(late_after)):
                await heard.wait()
        except TimeoutError:
            await self._fall_over(self._late_blocks(batch))

    async def _read_batch(self, batch: Sequence[_Wanted], heard: asyncio.Event) -> list[_Wanted]:
        """One stream. Returns the blocks that did not come, each with its reason. `heard` is set by the first that does."""
        held = batch[0].copy.held
        stream = _Stream(self, batch)
        await self.budget.take(stream.size)
        reason = ReadOutcome.MALFORMED.value
        try:
            async with aclosing(self.nodes.read(held.node_id, held.lease_id, held.ticket, self.lease.key_space, stream.slots)) as payloads:
                async for payload in payloads:
                    heard.set()
                    stream.came(payload.item, payload.outcome)
        except LarderError as error:
            reason = reason_of(error)
        finally:
            failed = stream.ended(reason)
        return failed

    async def _read_mapped(self, batch: Sequence[_Wanted]) -> tuple[list[_Wanted], list[_Wanted]]:
        """From the node's arena, where it is mapped here. Returns (what failed, with its reason; what must be read another way)."""
        held = batch[0].copy.held
        for block in batch:
            block.asked.add(held.node_id)
        if held.state is not HeldState.HELD:
            return _all_failed(batch, ReadOutcome.NOT_LEASED), []
        mapped = [block for block in batch if self._mapped.view(block.copy) is not None]
        size: int = sum(block.copy.payload_bytes for block in mapped)
        await self.budget.take(size)
        failed: list[_Wanted] = []
        try:
            for block in mapped:
                found = await self._mapped.read(block.index, block.copy)
                if found.payload is None:
                    block.reason = found.reason
                    failed.append(block)
                elif self.arrive(block, found):
                    size -= len(found.payload)
        finally:
            self.budget.give_back(size)
        return failed, [block for block in batch if block not in mapped]

    async def _fall_over(self, failed: Sequence[_Wanted]) -> None:
        """Each to the next replica of its stripe, or to a miss when there is none. Those that came another way meanwhile are done."""
        failed = [block for block in failed if not block.race.settled]
        router = self.nodes.refresh()
        by_node: dict[NodeId, list[_Wanted]] = {}
        for block in failed:
            last = block.copy.held.node_id
            node_id: NodeId | None
            if block.reason in _LEASE_GONE and not block.leased_again and router.usable(last):
                block.leased_again = True
                node_id = last
            else:
                node_id = router.next_reader(self.lease.chain[block.index].stripe, asked=block.asked)
            if node_id is None:
                self.arrive(block, ReadBlock(block.index, None, None, None, block.reason))
                continue
            metrics.replica_failovers.labels(block.reason).inc()
            by_node.setdefault(node_id, []).append(block)
        async with asyncio.TaskGroup() as group:
            for node_id, blocks in by_node.items():
                group.create_task(self._read_elsewhere(node_id, blocks))

    async def _read_elsewhere(self, node_id: NodeId, wanted: Sequence[_Wanted]) -> None:
        """Lease at another replica, then read there. The lease joins the others and is released with them."""
        asked_at = self.clock.now()
        missing: list[_Wanted] = []
        found: list[_Wanted] = []
        for block in wanted:
            block.asked.add(node_id)
        try:
            acquired = await self.nodes.call(
                node_id,
                lambda stub: stub.acquire_prefix(
                    self.lease.key_space,
                    [self.lease.chain[block.index] for block in wanted],
                    ttl=self._config.lease_ttl,
                    timeout=self._config.rpc_timeout,
                    as_sealed=self.lease.as_sealed,
                ),
            )
        except LarderError as error:
            await self._fall_over(_all_failed(wanted, reason_of(error)))
            return
        if acquired.lease_id:
            held = self.keeper.hold(
                node_id, acquired.lease_id, self.lease.key_space, ttl=acquired.ttl, asked_at=asked_at, ticket=acquired.ticket
            )
            self.lease.add(held)
            for block, copy in zip(wanted, acquired.copies, strict=True):
                if copy is None:
                    missing.append(block)
                else:
                    block.copy = LeasedCopy(held, *copy)
                    found.append(block)
        else:
            missing = list(wanted)
        async with asyncio.TaskGroup() as group:
            if found:
                group.create_task(self._read_in_batches(found))
            if missing:
                group.create_task(self._fall_over(_all_failed(missing, "not_found")))

    def arrive(self, wanted: _Wanted, block: ReadBlock) -> bool:
        """One way of reading it has ended; True when the block goes to the consumer with that, and its bytes are the consumer's."""
        race = wanted.race
        race.paths -= 1
        if race.settled or (block.payload is None and race.paths):
            return False
        race.settled = True
        if block.payload is not None:
            metrics.read_hits.inc()
        else:
            metrics.read_outcomes.labels("miss", block.reason).inc()
        self.arrived.put_nowait(block)
        return True


class _Stream:
    """A batch on its way over one stream. `size` of the budget is its own until it has ended."""

    def __init__(self, read: PrefixRead, batch: Sequence[_Wanted]) -> None:
        self.batch = batch
        self.size: int = sum([block.copy.payload_bytes for block in batch])
        self.slots = [PayloadSlot(read.lease.chain[block.index].hash, fresh_memory(block.copy.payload_bytes)) for block in batch]
        self.stop: Callable[[], None] = _nothing
        self.timer: asyncio.TimerHandle | None = None
        """Until something is heard of it."""
        self._read = read
        self._open = dict.fromkeys(range(len(batch)))
        self._failed: list[_Wanted] = []
        self._asked_at = read.clock.now()

    def came(self, item: int, outcome: ReadOutcome) -> None:
        read, block, payload = self._read, self.batch[item], self.slots[item].into
        held = block.copy.held
        if len(self._open) == len(self.batch):
            self._hush()
            read.nodes.router.hedges.answered(held.node_id, Asked.READ, Nanos(read.clock.now() - self._asked_at))
        self._open.pop(item, None)
        if outcome is not ReadOutcome.OK:
            block.reason = outcome
            self._failed.append(block)
        elif payload_checksum(payload) != block.copy.checksum:
            block.reason = "bad_checksum"
            self._failed.append(block)
            read.keeper.report_corrupt(held, read.lease.chain[block.index].hash)
        elif read.arrive(block, ReadBlock(block.index, payload, block.copy.tier, held.node_id, "ok", block.copy.rung)):
            self.size -= len(payload)

    def ended(self, reason: str) -> list[_Wanted]:
        """What did not come, each with its reason: this one unless it has its own."""
        self._hush()
        self._read.budget.give_back(self.size)
        return self._failed + _all_failed([self.batch[item] for item in self._open], reason)

    def _hush(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def _nothing() -> None:
    """Of a stream that somebody else ends."""


def _all_failed(blocks: Sequence[_Wanted], reason: str) -> list[_Wanted]:
    for block in blocks:
        block.reason = reason
    return list(blocks)
