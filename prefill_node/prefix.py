"""Leased blocks from the store into pool blocks of the engine: read on the event loop, decoded in worker threads.

The kernels release the GIL, so the running batch goes on meanwhile. A pool block is never let go while a worker may still write
to it: every way out of `fetch_run` waits for the workers first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.client import PrefixLease, ReadBlock, StoreClient
from kvstore.codec import BlockCodec
from kvstore.core.extent import Tier
from kvstore.errors import LarderError, LeaseExpired
from kvstore.ids import AS_SEALED, RungCode
from kvstore.units import Nanos, to_seconds
from prefill_node import metrics
from prefill_node.engine.loop import Engine
from prefill_node.engine.request import PinnedPrefix

log = logging.getLogger(__name__)


@dataclass(slots=True)
class FetchedRun:
    blocks: int = 0
    """Leading blocks that are decoded and verified, from the first one asked for on."""
    canonical: int = 0
    """Of them the leading ones that came as sealed."""
    tiers: Counter[str] = field(default_factory=Counter)
    """Those blocks by the tier that gave them."""
    ended_by: str = ""
    """Why the run is shorter than asked: "missing", "bad_payload", "read_failed", "deadline", "no_room"; empty when it is not."""
    left_for_room: int = 0
    """Blocks behind the run that were not fetched because the pool had no room for them."""
    took: Nanos = Nanos(0)
    arrivals: dict[str, TierArrivals] = field(default_factory=dict)
    """Of every tier that was asked, also for blocks behind the run."""

    def extend(self, part: FetchedRun) -> None:
        """The run goes on with another one."""
        if self.canonical == self.blocks:
            self.canonical += part.canonical
        self.blocks += part.blocks
        self.tiers += part.tiers
        self.ended_by, self.left_for_room = part.ended_by, part.left_for_room
        self.took = Nanos(self.took + part.took)


@dataclass(slots=True)
class TierArrivals:
    """What came from one tier in one fetch."""

    asked: int = 0
    blocks: int = 0
    last_at: Nanos = Nanos(0)
    """From the start of the fetch until the last of them was decoded."""


async def fetch_run(
    store: StoreClient,
    lease: PrefixLease,
    codec: BlockCodec,
    executor: ThreadPoolExecutor,
    arrays: Sequence[np.ndarray],
    *,
    first: int,
    start_position: int,
    allowed: Callable[[int], Nanos],
) -> FetchedRun:
    """Fill `arrays[i]` with block `first + i` of the lease; return how long a leading run made it.

    `arrays` are KV blocks as the codec wants them; the ones behind the returned run hold anything. `start_position` is the position
    of the first token of `arrays[0]`. Once the leading run has k blocks, the whole may take `allowed(k)`, and one block's decode more.
    Raises only what cancels it.
    """
    block_tokens = codec.layout.block_tokens
    decodes: dict[int, tuple[Future[Nanos], str, RungCode]] = {}
    run = FetchedRun()
    end = len(arrays)
    leading = 0
    started, started_s = time.monotonic_ns(), asyncio.get_running_loop().time()
    for copy in lease.copies[first : first + end]:
        run.arrivals.setdefault(tier_name(copy.tier), TierArrivals()).asked += 1
    try:
        async with asyncio.timeout(to_seconds(allowed(0))) as limit:
            async with aclosing(store.read(lease, indices=range(first, first + end), in_place=True)) as blocks:
                async for block in blocks:
                    index = block.index - first
                    if block.payload is None and index < end:
                        run.ended_by = "missing"
                        end = index
                    elif block.payload is not None and index < end:
                        position = start_position + index * block_tokens
                        decode = executor.submit(_decode, codec, block, arrays[index], position)
                        decodes[index] = decode, tier_name(block.tier), block.rung
                        while leading in decodes:
                            leading += 1
                        if not limit.expired():
                            limit.reschedule(started_s + to_seconds(allowed(leading)))
                    if all(index in decodes for index in range(end)):
                        break  # nothing that is still to come can lengthen the run
            await settle([decode for decode, _, _ in decodes.values()])
    except TimeoutError:
        run.ended_by = "deadline"
    except LarderError as error:
        log.warning("reading a leased run raised: %s", error)
        run.ended_by = "read_failed"
    finally:
        for decode, _, _ in decodes.values():
            decode.cancel()
        await settle([decode for decode, _, _ in decodes.values()])
    run.took = Nanos(time.monotonic_ns() - started)
    for decode, tier, _ in decodes.values():
        if not decode.cancelled() and decode.exception() is None:
            arrivals = run.arrivals.setdefault(tier, TierArrivals())
            arrivals.blocks += 1
            arrivals.last_at = max(arrivals.last_at, Nanos(decode.result() - started))
    while run.blocks < end and (entry := decodes.get(run.blocks)) is not None:
        decode, tier, rung = entry
        if decode.cancelled():
            break
        failure = decode.exception()
        if failure is not None:
            run.ended_by = "bad_payload"
            if not isinstance(failure, LarderError):
                log.error("decoding block %d raised", run.blocks, exc_info=failure)
            metrics.codec_failures.labels(reason=type(failure).__name__).inc()
            break
        run.tiers[tier] += 1
        run.canonical += run.canonical == run.blocks and rung == AS_SEALED
        run.blocks += 1
    return run


def tier_name(tier: Tier | None) -> str:
    return tier.name.lower() if tier else "unknown"


def _decode(codec: BlockCodec, block: ReadBlock, out: np.ndarray, start_position: int) -> Nanos:
    """Straight from where the payload lies, which may be the store node's memory: what was made of it counts if its lease lasted.
    Returns the time of the monotonic clock at its end."""
    assert block.payload is not None
    codec.decode_into(block.payload, out, start_position=start_position)
    if not block.still_good():
        raise LeaseExpired("the lease ended while its block was decoded")
    return Nanos(time.monotonic_ns())


def give_back_reserved(engine: Engine, pinned: PinnedPrefix) -> None:
    """Free what was allocated for a load and not adopted; the prefix itself stays pinned."""
    unused = PinnedPrefix(reserved=pinned.reserved)
    pinned.reserved = []
    engine.release(unused)


async def settle(work: Sequence[Future[Any]]) -> None:
    """Wait until no worker thread is at any of `work`, however often this task is cancelled meanwhile; then let the cancel through."""
    loop = asyncio.get_running_loop()
    progress = asyncio.Event()
    for future in work:
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(progress.set))
    cancelled: asyncio.CancelledError | None = None
    while not all(future.done() for future in work):
        progress.clear()
        try:
            await progress.wait()
        except asyncio.CancelledError as cancel:
            cancelled = cancel
    if cancelled is not None:
        raise cancelled
