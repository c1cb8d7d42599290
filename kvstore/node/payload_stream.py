"""Payloads on their way out: an open read becomes a stream of chunks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from kvpb.v1 import store_pb2

from kvstore.core.events import ReadItem, ReadOutcome, ReadStatus
from kvstore.core.extent import Tier
from kvstore.core.upkeep.open_read import OpenRead
from kvstore.errors import CorruptPayload, Unavailable
from kvstore.node.payload_source import PayloadSource
from kvstore.rpc.convert import MAX_CHUNK_BYTES
from kvstore.tiers.tier import FailureReason, TierFailure
from kvstore.units import Nanos, to_seconds

logger = logging.getLogger(__name__)

READ_AHEAD = 4
"""Payloads read and checked while an earlier one is sent: hides the disk's latency, bounds a stream's memory to a few payloads."""

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
    async with aclosing(payloads_of(read, source)) as payloads:
        async for index, payload in payloads:
            if isinstance(payload, ReadStatus):
                yield store_pb2.ReadChunk(item=index, status=int(payload), last=True)
                continue
            for offset in range(0, len(payload), MAX_CHUNK_BYTES):
                if not read.is_open:
                    yield store_pb2.ReadChunk(item=index, status=int(ReadStatus.NOT_LEASED), last=True)
                    break
                end = min(offset + MAX_CHUNK_BYTES, len(payload))
                if end == len(payload):
                    read.outcomes[index] = ReadOutcome.OK
                yield store_pb2.ReadChunk(
                    item=index, status=int(ReadStatus.OK), offset_bytes=offset, data=bytes(payload[offset:end]), last=end == len(payload)
                )


async def payloads_of(
    read: OpenRead, source: PayloadSource, *, check_host: bool = True
) -> AsyncGenerator[tuple[int, memoryview | ReadStatus], None]:
    """Every item in order: its payload, or why there is none. Without `check_host` those of the host tier come in place and unchecked."""
    tasks: dict[int, asyncio.Task[memoryview | ReadStatus]] = {}
    try:
        for index in range(len(read.items)):
            for ahead in range(index, min(index + READ_AHEAD, len(read.items))):
                if ahead not in tasks and _is_slow(read.items[ahead], source, check_host=check_host):
                    tasks[ahead] = asyncio.get_running_loop().create_task(_payload(read, ahead, source, check_host=check_host))
            task = tasks.get(index)
            yield index, await (_payload(read, index, source, check_host=check_host) if task is None else task)
            tasks.pop(index, None)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _payload(read: OpenRead, index: int, source: PayloadSource, *, check_host: bool) -> memoryview | ReadStatus:
    item = read.items[index]
    if item.status is not ReadStatus.OK:
        return item.status
    if not read.is_open:
        return ReadStatus.NOT_LEASED
    assert item.extent is not None
    if not check_host and item.extent.tier is Tier.HOST:
        return source.host_view(item.extent)
    try:
        return await source.read(item.extent, item.checksum)
    except CorruptPayload:
        outcome = ReadOutcome.CORRUPT
    except TierFailure as failure:
        logger.warning("read: %s", failure)
        if failure.reason is FailureReason.TIMEOUT:
            return ReadStatus.IO_ERROR  # the outcome stays UNREAD: a stalled medium is no reason to give up its copies
        outcome = ReadOutcome.IO_ERROR
    if not read.is_open:
        return ReadStatus.NOT_LEASED  # the extent was another block's by then: nothing is known about the copy
    read.outcomes[index] = outcome
    return _STATUS_OF[outcome]


def _is_slow(item: ReadItem, source: PayloadSource, *, check_host: bool) -> bool:
    if item.extent is None:
        return False
    return item.extent.tier is not Tier.HOST if not check_host else not source.is_quick(item.extent)
