"""The one thread that writes to the SSD tier: in the order asked, many writes to one sync."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstore.tiers.tier import Tier, TierFailure
from kvstore.units import MIB

logger = logging.getLogger(__name__)

MAX_BATCH_BYTES = 32 * MIB
"""Written between two syncs at most: 20 ms of a 1.7 GB/s disk, so that an outcome does not wait long for its neighbours."""


class WriteOutcome(StrEnum):
    OK = "ok"
    REFUSED = "refused"
    """`load` gave nothing to write."""
    FAILED = "failed"


Load = Callable[[], Sequence[bytes | memoryview] | None]
"""Called in the writer thread: the parts to write, or None when there is nothing good to write after all. Must not raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    region: int
    offset: int
    load: Load
    done: Callable[[WriteOutcome], None]


class SsdWriter:
    """An outcome OK is given only after a sync, so that what the core lists then survives a crash."""

    def __init__(self, tier: Tier, loop: asyncio.AbstractEventLoop) -> None:
        self._tier = tier
        self._loop = loop
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ssd-writer", daemon=True)
        self._thread.start()

    def submit(self, *, region: int, offset: int, load: Load, done: Callable[[WriteOutcome], None]) -> None:
        """`done` is called once, on the event loop. The core bounds how much is under way; this queue need not."""
        self._queue.put(_Write(region=region, offset=offset, load=load, done=done))

    def close(self) -> None:
        """Returns when everything submitted has been written, or after 5 s on a hung disk."""
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        ending = False
        while not ending:
            first = self._queue.get()
            ending = first is None
            batch: list[_Write] = []
            outcomes: list[WriteOutcome] = []
            size = 0
            write = first
            while write is not None:
                batch.append(write)
                outcome, written = self._write(write)
                outcomes.append(outcome)
                size += written
                if size >= MAX_BATCH_BYTES:
                    break
                try:
                    write = self._queue.get_nowait()
                except queue.Empty:
                    break
                ending = write is None
            self._sync(batch, outcomes)
            if batch:
                self._loop.call_soon_threadsafe(_report, batch, outcomes)

    def _write(self, write: _Write) -> tuple[WriteOutcome, int]:
        parts = write.load()
        if parts is None:
            return WriteOutcome.REFUSED, 0
        try:
            self._tier.write(write.region, write.offset, parts)
        except TierFailure as failure:
            logger.warning("write to region %d at %d failed (%s): %s", write.region, write.offset, failure.reason, failure)
            return WriteOutcome.FAILED, 0
        return WriteOutcome.OK, sum(len(part) for part in parts)

    def _sync(self, batch: list[_Write], outcomes: list[WriteOutcome]) -> None:
        for region in {write.region for write, outcome in zip(batch, outcomes, strict=True) if outcome is WriteOutcome.OK}:
            try:
                self._tier.sync(region)
            except TierFailure as failure:
                logger.warning("sync of region %d failed: %s", region, failure)
                for position, write in enumerate(batch):
                    if write.region == region and outcomes[position] is WriteOutcome.OK:
                        outcomes[position] = WriteOutcome.FAILED


def _report(batch: list[_Write], outcomes: list[WriteOutcome]) -> None:
    for write, outcome in zip(batch, outcomes, strict=True):
        write.done(outcome)
