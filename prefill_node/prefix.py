"""Leased blocks from the store into pool blocks of the engine: read on the event loop, decoded in worker threads.

The kernels release the GIL, so the running batch goes on meanwhile. A pool block is never let go while a worker may still write
to it: every way out of `fetch_run` waits for the workers first.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np

from kvstore.client import PrefixLease, ReadBlock, StoreClient
from kvstore.codec import BlockCodec
from kvstore.errors import LarderError, LeaseExpired
from kvstore.units import Nanos, to_seconds
from prefill_node import metrics
from prefill_node.engine.loop import Engine
from prefill_node.engine.request import PinnedPrefix

log = logging.getLogger(__name__)


@dataclass(slots=True)
class FetchedRun:
    blocks: int = 0
    """Leading blocks that are decoded and verified, from the first one asked for on."""
    tiers: Counter[str] = field(default_factory=Counter)
    """Those blocks by the tier that gave them."""
    ended_by: str = ""
    """Why the run is shorter than asked: "missing", "bad_payload", "read_failed", "deadline", "no_room"; empty when it is not."""
    left_for_room: int = 0
    """Blocks behind the run that were not fetched because the pool had no room for them."""


async def fetch_run(
    store: StoreClient,
    lease: PrefixLease,
    codec: BlockCodec,
    executor: ThreadPoolExecutor,
    arrays: Sequence[np.ndarray],
    *,
    first: int,
    start_position: int,
    wait: Nanos,
) -> FetchedRun:
    """Fill `arrays[i]` with block `first + i` of the lease; return how long a leading run made it.

    `arrays` are KV blocks as the codec wants them; the ones behind the returned run hold anything. `start_position` is the position
    of the first token of `arrays[0]`. Takes at most `wait` plus one block's decode. Raises only what cancels it.
    """
    block_tokens = codec.layout.block_tokens
    decodes: dict[int, tuple[Future[None], str]] = {}
    run = FetchedRun()
    end = len(arrays)
    try:
        async with asyncio.timeout(to_seconds(wait)):
            async with aclosing(store.read(lease, indices=range(first, first + end), in_place=True)) as blocks:
                async for block in blocks:
                    index = block.index - first
                    if block.payload is None and index < end:
                        run.ended_by = "missing"
                        end = index
                    elif block.payload is not None and index < end:
                        position = start_position + index * block_tokens
                        decodes[index] = (
                            executor.submit(_decode, codec, block, arrays[index], position),
                            block.tier.name.lower() if block.tier else "unknown",
                        )
                    if all(index in decodes for index in range(end)):
                        break  # nothing that is still to come can lengthen the run
            await settle([decode for decode, _ in decodes.values()])
    except TimeoutError:
        run.ended_by = "deadline"
    except LarderError as error:
        log.warning("reading a leased run raised: %s", error)
        run.ended_by = "read_failed"
    finally:
        for decode, _ in decodes.values():
            decode.cancel()
        await settle([decode for decode, _ in decodes.values()])
    while run.blocks < end and (entry := decodes.get(run.blocks)) is not None:
        decode, tier = entry
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
        run.blocks += 1
    return run


def _decode(codec: BlockCodec, block: ReadBlock, out: np.ndarray, start_position: int) -> None:
    """Straight from where the payload lies, which may be the store node's memory: what was made of it counts if its lease lasted."""
    assert block.payload is not None
    codec.decode_into(block.payload, out, start_position=start_position)
    if not block.still_good():
        raise LeaseExpired("the lease ended while its block was decoded")


def give_back_reserved(engine: Engine, pinned: PinnedPrefix) -> None:
    """Free what was allocated for a load and not adopted; the prefix itself stays pinned."""
    unused = PinnedPrefix(reserved=pinned.reserved)
    pinned.reserved = []
    engine.release(unused)


async def settle(work: Sequence[Future[None]]) -> None:
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
