"""Reading leased blocks: batches per node side by side, each payload verified, each block that fails asked of the next replica."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvstore.client import metrics
from kvstore.client.answers import ReadBlock
from kvstore.client.batches import batches, shares
from kvstore.client.byte_budget import ByteBudget
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
    None in there: it has failed, and the task says how."""

    def __init__(
        self, lease: PrefixLease, nodes: NodeCalls, keeper: LeaseKeeper, mapped: MappedRead, *, config: ClientConfig, clock: Clock
    ) -> None:
        self._lease = lease
        self._nodes = nodes
        self._keeper = keeper
        self._config = config
        self._clock = clock
        self._mapped = mapped
        self._budget = ByteBudget(config.read_ahead_bytes)
        self.hedged = False
        """Whether something was asked of a second replica because it was late: a stream of the first may stand still yet."""
        self.arrived: asyncio.Queue[ReadBlock | None] = asyncio.Queue()

    def start(self, indices: Sequence[int]) -> asyncio.Task[None]:
        """The caller ends the task."""
        return self._started(self._read_each([_Wanted(index, self._lease.copies[index]) for index in indices]))

    def start_elsewhere(self, failed: Mapping[int, str]) -> asyncio.Task[None]:
        """Blocks that could not be read where they are leased, each with its reason. The caller ends the task."""
        blocks = []
        for index, reason in failed.items():
            copy = self._lease.copies[index]
            blocks.append(_Wanted(index, copy, {copy.held.node_id}, reason=reason))
        return self._started(self._fall_over(blocks))

    def _started(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self.arrived.put_nowait(None)

    def taken(self, block: ReadBlock) -> None:
        """The consumer has the block: more may be asked for."""
        if block.payload is not None:
            self._budget.give_back(len(block.payload))

    async def _read_each(self, wanted: Sequence[_Wanted]) -> None:
        """By the node that holds the lease on each."""
        by_lease: dict[int, list[_Wanted]] = {}
        for block in wanted:
            by_lease.setdefault(id(block.copy.held), []).append(block)
        await all_of([self._read_in_batches(blocks) for blocks in by_lease.values()])

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
        late_after = self._nodes.router.hedges.late_after(batch[0].copy.held.node_id, Asked.READ)
        if late_after is not None:
            group.create_task(self._read_a_late_batch_elsewhere(batch, heard, late_after))
        try:
            return await self._read_batch(batch, heard)
        finally:
            heard.set()

    async def _read_a_late_batch_elsewhere(self, batch: Sequence[_Wanted], heard: asyncio.Event, late_after: Nanos) -> None:
        """From the next replicas too, unless something is heard of it in time: whichever comes first is taken, block by block."""
        try:
            async with asyncio.timeout(to_seconds(late_after)):
                await heard.wait()
        except TimeoutError:
            open_blocks = [block for block in batch if not block.race.settled]
            if open_blocks and self._nodes.router.hedges.take():
                metrics.second_requests.labels(Asked.READ.value).inc()
                self.hedged = True
                await self._fall_over([block.twin() for block in open_blocks])

    async def _read_batch(self, batch: Sequence[_Wanted], heard: asyncio.Event) -> list[_Wanted]:
        """One stream. Returns the blocks that did not come, each with its reason. `heard` is set by the first that does."""
        held = batch[0].copy.held
        failed: list[_Wanted] = []
        size: int = sum(block.copy.payload_bytes for block in batch)
        await self._budget.take(size)
        slots = [PayloadSlot(self._lease.chain[block.index].hash, fresh_memory(block.copy.payload_bytes)) for block in batch]
        open_items = set(range(len(batch)))
        asked_at = self._clock.now()
        stream_reason = ReadOutcome.MALFORMED.value
        try:
            async with aclosing(self._nodes.read(held.node_id, held.lease_id, held.ticket, self._lease.key_space, slots)) as payloads:
                async for payload in payloads:
                    block, bytes_read = batch[payload.item], slots[payload.item].into
                    open_items.discard(payload.item)
                    if not heard.is_set():
                        heard.set()
                        self._nodes.router.hedges.answered(held.node_id, Asked.READ, Nanos(self._clock.now() - asked_at))
                    if payload.outcome is not ReadOutcome.OK:
                        block.reason = payload.outcome
                        failed.append(block)
                    elif payload_checksum(bytes_read) != block.copy.checksum:
                        block.reason = "bad_checksum"
                        failed.append(block)
                        self._keeper.report_corrupt(held, self._lease.chain[block.index].hash)
                    elif self._arrive(block, ReadBlock(block.index, bytes_read, block.copy.tier, held.node_id, "ok", block.copy.rung)):
                        size -= len(bytes_read)
        except LarderError as error:
            stream_reason = reason_of(error)
        finally:
            self._budget.give_back(size)
        return failed + _all_failed([batch[item] for item in sorted(open_items)], stream_reason)

    async def _read_mapped(self, batch: Sequence[_Wanted]) -> tuple[list[_Wanted], list[_Wanted]]:
        """From the node's arena, where it is mapped here. Returns (what failed, with its reason; what must be read another way)."""
        held = batch[0].copy.held
        for block in batch:
            block.asked.add(held.node_id)
        if held.state is not HeldState.HELD:
            return _all_failed(batch, ReadOutcome.NOT_LEASED), []
        mapped = [block for block in batch if self._mapped.view(block.copy) is not None]
        size: int = sum(block.copy.payload_bytes for block in mapped)
        await self._budget.take(size)
        failed: list[_Wanted] = []
        try:
            for block in mapped:
                found = await self._mapped.read(block.index, block.copy)
                if found.payload is None:
                    block.reason = found.reason
                    failed.append(block)
                elif self._arrive(block, found):
                    size -= len(found.payload)
        finally:
            self._budget.give_back(size)
        return failed, [block for block in batch if block not in mapped]

    async def _fall_over(self, failed: Sequence[_Wanted]) -> None:
        """Each to the next replica of its stripe, or to a miss when there is none. Those that came another way meanwhile are done."""
        failed = [block for block in failed if not block.race.settled]
        router = self._nodes.refresh()
        by_node: dict[NodeId, list[_Wanted]] = {}
        for block in failed:
            last = block.copy.held.node_id
            node_id: NodeId | None
            if block.reason in _LEASE_GONE and not block.leased_again and router.usable(last):
                block.leased_again = True
                node_id = last
            else:
                node_id = router.next_reader(self._lease.chain[block.index].stripe, asked=block.asked)
            if node_id is None:
                self._arrive(block, ReadBlock(block.index, None, None, None, block.reason))
                continue
            metrics.replica_failovers.labels(block.reason).inc()
            by_node.setdefault(node_id, []).append(block)
        async with asyncio.TaskGroup() as group:
            for node_id, blocks in by_node.items():
                group.create_task(self._read_elsewhere(node_id, blocks))

    async def _read_elsewhere(self, node_id: NodeId, wanted: Sequence[_Wanted]) -> None:
        """Lease at another replica, then read there. The lease joins the others and is released with them."""
        asked_at = self._clock.now()
        missing: list[_Wanted] = []
        found: list[_Wanted] = []
        for block in wanted:
            block.asked.add(node_id)
        try:
            acquired = await self._nodes.call(
                node_id,
                lambda stub: stub.acquire_prefix(
                    self._lease.key_space,
                    [self._lease.chain[block.index] for block in wanted],
                    ttl=self._config.lease_ttl,
                    timeout=self._config.rpc_timeout,
                    as_sealed=self._lease.as_sealed,
                ),
            )
        except LarderError as error:
            await self._fall_over(_all_failed(wanted, reason_of(error)))
            return
        if acquired.lease_id:
            held = self._keeper.hold(
                node_id, acquired.lease_id, self._lease.key_space, ttl=acquired.ttl, asked_at=asked_at, ticket=acquired.ticket
            )
            self._lease.add(held)
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

    def _arrive(self, wanted: _Wanted, block: ReadBlock) -> bool:
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


def _all_failed(blocks: Sequence[_Wanted], reason: str) -> list[_Wanted]:
    for block in blocks:
        block.reason = reason
    return list(blocks)
