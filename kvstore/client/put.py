"""Putting blocks: every owner at once, each with its batches of reserve, bytes, commit."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvstore.byte_budget import ByteBudget
from kvstore.client import metrics
from kvstore.client.answers import Acknowledge, BlockPut, PayloadMaker, PutOutcome, PutReport
from kvstore.client.batches import batches
from kvstore.client.config import ClientConfig
from kvstore.client.node_calls import NodeCalls, reason_of
from kvstore.client.put_progress import BlockProgress, PutProgress
from kvstore.codec.checksum import payload_checksum
from kvstore.core.events.puts import CommitStatus, ReserveItem, ReserveStatus
from kvstore.core.extent import MAX_PAYLOAD_BYTES
from kvstore.errors import CodecFailure, LarderError
from kvstore.ids import BlockHash, KeySpace, NodeId
from kvstore.transport import PayloadWrite, Ticket
from kvstore.transport.shm_transport import INLINE_COPY_BYTES
from kvstore.units import Nanos, to_seconds

_COMMITS_WORTH_A_RETRY = 2
"""A reservation that ran out, or bytes that changed on the way, are tried once more; then it is the machine, not chance."""


class BlockPutter:
    """Puts of one client. Belongs to one event loop."""

    def __init__(self, nodes: NodeCalls, *, config: ClientConfig) -> None:
        self._nodes = nodes
        self._config = config
        self._background = ByteBudget(config.background_bytes)

    async def put(self, key_space: KeySpace, puts: Sequence[BlockPut], *, acknowledge: Acknowledge) -> PutReport:
        router = self._nodes.refresh()
        progress = _progress_of(puts, replicas_needed=acknowledge.replicas_needed(router.replicas))
        by_node: dict[NodeId, list[BlockProgress]] = {}
        for block in dict.fromkeys(progress.blocks):
            owners = router.owners(block.ref.stripe)
            block.reasons += ["no_replica"] * (router.replicas - len(owners))
            usable = [node_id for node_id in owners if router.usable(node_id)]
            block.reasons += ["circuit_open"] * (len(owners) - len(usable))
            if not 0 < block.size <= MAX_PAYLOAD_BYTES:  # a node would refuse the whole batch
                block.reasons += ["too_large" if block.size else "empty"] * len(usable)
                continue
            if block.maker is not None and len(usable) > 1:
                try:
                    _make_here(block)
                except CodecFailure as failure:
                    block.reasons += [failure.reason] * len(usable)
                    continue
            block.outstanding = len(usable)
            for node_id in usable:
                by_node.setdefault(node_id, []).append(block)
        changed = asyncio.Event()
        tasks = [
            self._nodes.spawn(_NodePut(self._nodes, node_id, key_space, config=self._config, changed=changed).run(blocks))
            for node_id, blocks in by_node.items()
        ]
        try:
            # The rest goes on behind the answer, unless too much does already.
            while not (progress.settled and self._background.fits(progress.outstanding_bytes)) and not all(task.done() for task in tasks):
                await changed.wait()
                changed.clear()
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise
        if (size := progress.outstanding_bytes) > 0:
            self._background.take_now(size)
            self._nodes.spawn(self._account_for(tasks, size))
        return self._report(progress)

    async def _account_for(self, tasks: Sequence[asyncio.Task[None]], size: int) -> None:
        await asyncio.wait(tasks)
        self._background.give_back(size)

    def _report(self, progress: PutProgress) -> PutReport:
        outcomes = progress.outcomes()
        counts: Counter[tuple[PutOutcome, str]] = Counter()
        for block, outcome in zip(progress.blocks, outcomes, strict=True):
            counts[outcome, block.reasons[0] if block.reasons else "ok"] += 1
        for (outcome, reason), count in counts.items():
            metrics.put_outcomes.labels(outcome, reason).inc(count)
        return PutReport(outcomes, progress.reasons(), progress.durable())


def _progress_of(puts: Sequence[BlockPut], *, replicas_needed: int) -> PutProgress:
    """The bytes as they are now: whoever asked may change its memory as soon as `put` has begun."""
    seen: dict[BlockHash, BlockProgress] = {}
    for put in puts:
        if put.ref.hash not in seen:
            if isinstance(put.payload, PayloadMaker):
                seen[put.ref.hash] = BlockProgress(put.ref, b"", 0, put.ttl, put.rung, maker=put.payload)
                continue
            payload = bytes(put.payload)  # no copy of what is `bytes` already
            seen[put.ref.hash] = BlockProgress(put.ref, payload, payload_checksum(payload), put.ttl, put.rung)
    return PutProgress([seen[put.ref.hash] for put in puts], replicas_needed)


def _make_here(block: BlockProgress) -> None:
    """In memory of the client's own, for all replicas. Raises CodecFailure."""
    assert block.maker is not None
    payload = np.empty(block.maker.payload_bytes, np.uint8).data
    block.maker.make(payload)
    block.payload, block.checksum, block.maker = payload, payload_checksum(payload), None


def _make_in(room: memoryview, maker: PayloadMaker) -> int:
    """The checksum of what was made. Raises CodecFailure."""
    maker.make(room)
    return payload_checksum(room)


class _NodePut:
    """One node's part of one put."""

    def __init__(self, nodes: NodeCalls, node_id: NodeId, key_space: KeySpace, *, config: ClientConfig, changed: asyncio.Event) -> None:
        self._nodes = nodes
        self._node_id = node_id
        self._key_space = key_space
        self._config = config
        self._changed = changed

    async def run(self, blocks: Sequence[BlockProgress]) -> None:
        """Settles every block, whatever happens."""
        open_blocks = dict.fromkeys(blocks)
        reason = "cancelled"
        try:
            async with asyncio.timeout(to_seconds(self._config.put_timeout)):
                sized = ((block, block.size) for block in blocks)
                for batch in batches(sized, most_items=self._config.batch_blocks, most_bytes=self._config.batch_bytes):
                    await self._put_batch(batch, open_blocks)
        except LarderError as error:
            reason = reason_of(error)
        except TimeoutError:
            reason = "timeout"
        finally:
            for block in list(open_blocks):
                self._fail(block, reason, open_blocks)
            self._changed.set()

    async def _put_batch(self, batch: Sequence[BlockProgress], open_blocks: dict[BlockProgress, None]) -> None:
        todo = list(batch)
        commits: dict[BlockProgress, int] = dict.fromkeys(batch, 0)
        for attempt in range(self._config.pending_attempts):
            if attempt:
                await asyncio.sleep(to_seconds(self._config.pending_wait))
            granted, again = await self._reserve(todo, open_blocks)
            for block, status in (await self._send(granted, open_blocks)).items() if granted else ():
                commits[block] += 1
                if status.is_stored:
                    block.durable += status is CommitStatus.DURABLE
                    self._hold(block, open_blocks, existed=False)
                elif status is not CommitStatus.NO_ROOM and commits[block] < _COMMITS_WORTH_A_RETRY:
                    again.append(block)
                else:
                    self._fail(block, status.name.lower(), open_blocks)
            self._changed.set()
            todo = again
            if not todo:
                return
        for block in todo:
            self._fail(block, "pending", open_blocks)

    async def _reserve(
        self, blocks: Sequence[BlockProgress], open_blocks: dict[BlockProgress, None]
    ) -> tuple[dict[BlockProgress, PayloadWrite], list[BlockProgress]]:
        """Settles what needs no bytes; returns what was granted, and what another writer is at work on."""
        asked_at = time.monotonic_ns()
        grants = await self._nodes.call(
            self._node_id,
            lambda stub: stub.reserve(
                self._key_space,
                [ReserveItem(block.ref, block.size, block.ttl, block.rung) for block in blocks],
                timeout=self._config.rpc_timeout,
            ),
        )
        granted: dict[BlockProgress, PayloadWrite] = {}
        pending: list[BlockProgress] = []
        for block, grant in zip(blocks, grants, strict=True):
            match grant.status:
                case ReserveStatus.GRANTED:
                    granted[block] = PayloadWrite(
                        grant.write_token,
                        block.payload,
                        Ticket.from_bytes(grant.ticket),
                        grant.arena_offset,
                        Nanos(asked_at + grant.ttl * 9 // 10),
                    )
                case ReserveStatus.PENDING:
                    pending.append(block)
                case ReserveStatus.EXISTS:
                    self._hold(block, open_blocks, existed=True)
                case _:
                    self._fail(block, grant.status.name.lower(), open_blocks)
        return granted, pending

    async def _send(
        self, granted: dict[BlockProgress, PayloadWrite], open_blocks: dict[BlockProgress, None]
    ) -> dict[BlockProgress, CommitStatus]:
        """Bytes, then the commit. A refused write token counts as a reservation that ran out."""
        await self._make(granted, open_blocks)
        if not granted:
            return {}
        refused = await self._nodes.write(self._node_id, list(granted.values()))
        statuses = {block: CommitStatus.EXPIRED for block, write in granted.items() if write.write_token in refused}
        taken = {block: write.write_token for block, write in granted.items() if write.write_token not in refused}
        if taken:
            items = [(token, block.checksum) for block, token in taken.items()]
            answers = await self._nodes.call(self._node_id, lambda stub: stub.commit(items, timeout=self._config.rpc_timeout))
            statuses |= zip(taken, answers, strict=True)
        return statuses

    async def _make(self, granted: dict[BlockProgress, PayloadWrite], open_blocks: dict[BlockProgress, None]) -> None:
        """What is to be made: in the node's arena if it can be. A block whose maker fails is settled, and no longer granted."""
        waiting = [block for block in granted if block.maker is not None]
        arena = self._nodes.arena(self._node_id) if waiting else None
        for block in waiting:
            write = granted[block]
            assert block.maker is not None
            room = None if arena is None else arena.room(write.arena_offset, block.size)
            try:
                if room is None:
                    _make_here(block)
                    granted[block] = write._replace(payload=block.payload)
                elif time.monotonic_ns() < write.end_by:
                    if block.size <= INLINE_COPY_BYTES:
                        block.checksum = _make_in(room, block.maker)
                    else:
                        block.checksum = await asyncio.to_thread(_make_in, room, block.maker)
                    granted[block] = write._replace(payload=room, in_place=True)
            except CodecFailure as failure:
                del granted[block]
                self._fail(block, failure.reason, open_blocks)

    def _hold(self, block: BlockProgress, open_blocks: dict[BlockProgress, None], *, existed: bool) -> None:
        del open_blocks[block]
        block.outstanding -= 1
        if existed:
            block.existed += 1
        else:
            block.stored += 1

    def _fail(self, block: BlockProgress, reason: str, open_blocks: dict[BlockProgress, None]) -> None:
        del open_blocks[block]
        block.outstanding -= 1
        block.reasons.append(reason)
