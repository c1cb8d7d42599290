"""Payloads on their way out: an open read becomes a stream of chunks."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from kvpb.v1 import store_pb2

from kvstore.core.events.gets import ReadItem, ReadOutcome, ReadStatus
from kvstore.core.extent import Tier
from kvstore.core.upkeep.open_read import OpenRead
from kvstore.errors import CorruptPayload, Unavailable
from kvstore.node.payload_source import INLINE_BYTES, RUN_BYTES, Found, PayloadSource, Stored
from kvstore.rpc.convert import MAX_CHUNK_BYTES
from kvstore.tiers.tier import FailureReason, TierFailure
from kvstore.transport.stream import StreamCut
from kvstore.units import MIB, Nanos, to_seconds

logger = logging.getLogger(__name__)

Entry = memoryview | ReadStatus
"""A payload, or why there is none."""

_RUNS_AHEAD = 4
"""Read and checked while earlier ones are sent: hides the disk's latency, and keeps it busy."""
_AHEAD_BYTES = 8 * MIB
"""Bounds the memory of one stream to this and one payload; that of all streams has a bound of its own (`PayloadSource.buffer`)."""

_STATUS_OF = {ReadOutcome.CORRUPT: ReadStatus.CORRUPT, ReadOutcome.IO_ERROR: ReadStatus.IO_ERROR}


async def send_payloads(read: OpenRead, source: PayloadSource, context: Any, *, deadline: Nanos) -> None:
    """Writes the chunks to a gRPC stream, at the pace its reader takes them. Raises Unavailable when the reader takes nothing for so long.

    Written from here, and not handed to gRPC as a generator, so that a reader that goes away ends this call at once.
    """
    async with aclosing(_chunks_of(read, source)) as chunks:
        async for chunk in chunks:
            try:
                async with asyncio.timeout(to_seconds(deadline)):
                    await context.write(chunk)
            except TimeoutError:
                raise Unavailable(f"the reader took nothing for {to_seconds(deadline):.0f} s") from None


async def _chunks_of(read: OpenRead, source: PayloadSource) -> AsyncGenerator[store_pb2.ReadChunk, None]:
    """Every item of the read, in order: chunks of at most MAX_CHUNK_BYTES, or one chunk with a status that ends it.

    No byte leaves before its whole payload has been checked, nor after the read was closed (its extents may then hold another block).
    Records the outcome of each item in the read; the caller finishes it.
    """
    async with aclosing(groups_of(read, source, gather_bytes=INLINE_BYTES)) as groups:
        async for first, group in groups:
            for index, payload in enumerate(group, first):
                if isinstance(payload, ReadStatus):
                    yield store_pb2.ReadChunk(item=index, status=int(payload), last=True)
                    continue
                for offset in range(0, len(payload), MAX_CHUNK_BYTES):
                    if not read.is_open:
                        yield store_pb2.ReadChunk(item=index, status=int(ReadStatus.NOT_LEASED), last=True)
                        break
                    end = min(offset + MAX_CHUNK_BYTES, len(payload))
                    last = end == len(payload)
                    if last:
                        read.outcomes[index] = ReadOutcome.OK
                    data = bytes(payload[offset:end])
                    yield store_pb2.ReadChunk(item=index, status=int(ReadStatus.OK), offset_bytes=offset, data=data, last=last)
            del payload  # it would keep its memory while the next is waited for


async def groups_of(
    read: OpenRead,
    source: PayloadSource,
    *,
    check_host: bool = True,
    gather_bytes: int,
    until_end: Callable[[], Awaitable[None]] | None = None,
) -> AsyncGenerator[tuple[int, list[Entry]], None]:
    """(index of the first, entries) of every item, in order: as many at once as can be had without waiting, up to `gather_bytes` and the
    payload that passes it. Without `check_host` those of the host tier come in place and unchecked.

    The entries are the caller's until it asks for the next. A read waits for memory only while it holds none, so those that hold some can
    always go on. Raises StreamCut when `until_end` returns before there is any.
    """
    runs = list(_runs(read.items, source, check_host=check_host, gather_bytes=gather_bytes))
    buffer = source.buffer
    held: deque[tuple[_Run, asyncio.Task[list[Entry]]]] = deque()
    """Each with its part of the buffer: what is being sent, and what is read ahead of it."""
    slow = iter([run for run in runs if run.is_slow])
    upcoming = next(slow, None)
    waits = True
    """Until it has waited for memory in vain once, or is over."""

    def begin(run: _Run) -> None:
        held.append((run, asyncio.get_running_loop().create_task(_read_run(read, run, source))))

    try:
        for run in runs:
            while (
                upcoming
                and len(held) < _RUNS_AHEAD
                and (not held or upcoming.size + sum(r.size for r, _ in held) <= _AHEAD_BYTES)
                and buffer.take_if_free(upcoming.buffered)
            ):
                begin(upcoming)
                upcoming = next(slow, None)
            if not run.is_slow:
                yield run.indices.start, [_entry_now(read, index, source, check_host=check_host) for index in run.indices]
                continue
            if not held:
                assert upcoming is run
                upcoming = next(slow, None)
                waits = waits and read.is_open and await _buffer_for(run.buffered, source, until_end)
                if not waits:
                    missing = ReadStatus.IO_ERROR if read.is_open else ReadStatus.NOT_LEASED
                    yield run.indices.start, [missing] * len(run.indices)
                    continue
                begin(run)
            entries = await held[0][1]
            yield run.indices.start, entries
            entries.clear()  # whoever still has the list has no memory
            held.popleft()
            buffer.give_back(run.buffered)
    finally:
        buffer.give_back(sum(run.buffered for run, _ in held))
        for _, task in held:
            task.cancel()
        await asyncio.gather(*(task for _, task in held), return_exceptions=True)


async def _buffer_for(size: int, source: PayloadSource, until_end: Callable[[], Awaitable[None]] | None) -> bool:
    """Waits for so much of it. False: not in time, which leaves the reader as long again to be told, and to ask elsewhere. Raises
    StreamCut."""
    limit_s = to_seconds(source.timeout) / 2
    turn = asyncio.ensure_future(source.buffer.take(size))
    end = None if until_end is None else asyncio.ensure_future(until_end())
    waiting = {turn} if end is None else {turn, end}
    try:
        await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        if turn.done():
            source.buffer.give_back(size)
        raise
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    if not turn.cancelled():
        return True
    if end is not None and not end.cancelled():
        raise StreamCut("the other side closed the connection")
    logger.warning("read: no memory for %d bytes within %.1f s: other readers have it", size, limit_s)
    return False


class _Run(NamedTuple):
    """Neighbours that are had in one go."""

    indices: range
    size: int
    buffered: int
    """Of the size: what takes memory, as it does not lie in the host tier."""
    is_slow: bool
    """Not to be read on the event loop."""


def _runs(items: Sequence[ReadItem], source: PayloadSource, *, check_host: bool, gather_bytes: int) -> Iterator[_Run]:
    start, size, buffered, was_slow = 0, 0, 0, False
    for index, item in enumerate(items):
        is_slow, is_buffered, length = False, False, 0
        if item.status is ReadStatus.OK:
            assert item.extent is not None
            is_buffered = item.extent.tier is not Tier.HOST
            is_slow = is_buffered if not check_host else not source.is_quick(item.extent)
            length = item.extent.length
        is_full = size + length > RUN_BYTES if is_slow else size >= gather_bytes
        if index > start and (is_slow is not was_slow or is_full):
            yield _Run(range(start, index), size, buffered, was_slow)
            start, size, buffered = index, 0, 0
        size += length
        buffered += length if is_buffered else 0
        was_slow = is_slow
    if items:
        yield _Run(range(start, len(items)), size, buffered, was_slow)


def _entry_now(read: OpenRead, index: int, source: PayloadSource, *, check_host: bool) -> Entry:
    item = read.items[index]
    if item.status is not ReadStatus.OK:
        return item.status
    if not read.is_open:
        return ReadStatus.NOT_LEASED
    assert item.extent is not None
    if not check_host:
        return source.host_view(item.extent)
    try:
        return source.read_now(item.extent, item.checksum)
    except CorruptPayload as error:
        return _failed(read, index, error)


async def _read_run(read: OpenRead, run: _Run, source: PayloadSource) -> list[Entry]:
    if not read.is_open:
        return [ReadStatus.NOT_LEASED] * len(run.indices)
    wanted = [Stored(item.extent, item.checksum) for index in run.indices if (item := read.items[index]).extent is not None]
    found: Sequence[Found]
    try:
        found = await source.read_each(wanted)
    except TierFailure as failure:
        found = [failure] * len(wanted)
    return [_failed(read, index, entry) if isinstance(entry, Exception) else entry for index, entry in zip(run.indices, found, strict=True)]


def _failed(read: OpenRead, index: int, error: TierFailure | CorruptPayload) -> ReadStatus:
    """What its reader is told, and what the core will be."""
    outcome = ReadOutcome.CORRUPT
    if isinstance(error, TierFailure):
        logger.warning("read: %s", error)
        if error.reason is FailureReason.TIMEOUT:
            return ReadStatus.IO_ERROR  # the outcome stays UNREAD: a stalled medium is no reason to give up its copies
        outcome = ReadOutcome.IO_ERROR
    if not read.is_open:
        return ReadStatus.NOT_LEASED  # the extent was another block's by then: nothing is known about the copy
    read.outcomes[index] = outcome
    return _STATUS_OF[outcome]
