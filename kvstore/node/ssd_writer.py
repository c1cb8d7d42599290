"""The one thread that writes to the SSD tier: in the order asked, many writes to one sync."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstore.core.extent import round_up
from kvstore.tiers.tier import Tier, TierFailure
from kvstore.units import MIB

logger = logging.getLogger(__name__)

MAX_BATCH_BYTES = 32 * MIB
"""Written between two syncs at most: 20 ms of a 1.7 GB/s disk, so that an outcome does not wait long for its neighbours."""
MAX_SPAN_BYTES = 4 * MIB
"""Neighbours written in one call: beyond it a call costs nothing any more beside its bytes."""


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
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="ssd-writer", daemon=True)
        self._thread.start()

    def submit(self, *, region: int, offset: int, load: Load, done: Callable[[WriteOutcome], None]) -> None:
        """`done` is called once, on the event loop. The core bounds how much is under way; this queue need not."""
        self._queue.put(_Write(region=region, offset=offset, load=load, done=done))

    def close(self, *, finish: bool = True) -> None:
        """Returns when everything submitted has been written, or after 5 s on a hung disk. Not `finish`: what has not been begun is left,
        and a disk that hangs is waited for half a second."""
        self._leaving = not finish
        self._queue.put(None)
        self._thread.join(timeout=5 if finish else 0.5)

    def _run(self) -> None:
        ending = False
        while not ending:
            batch, ending = self._take_batch()
            if self._leaving:
                return
            if batch:
                self._put_down(batch)
                self._loop.call_soon_threadsafe(_report, batch)

    def _take_batch(self) -> tuple[list[_Loaded], bool]:
        """(what is waiting now, at least one; whether the end is)."""
        batch: list[_Loaded] = []
        size = 0
        write = self._queue.get()
        while write is not None:
            batch.append(_Loaded(write))
            size += batch[-1].size
            if size >= MAX_BATCH_BYTES:
                return batch, False
            try:
                write = self._queue.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _put_down(self, batch: Sequence[_Loaded]) -> None:
        span: list[_Loaded] = []
        for loaded in batch:
            if span and not (span[-1].is_followed_by(loaded) and sum(one.size for one in span) < MAX_SPAN_BYTES):
                self._write(span)
                span = []
            if loaded.outcome is WriteOutcome.OK:
                span.append(loaded)
        if span:
            self._write(span)
        self._sync(batch)

    def _write(self, span: Sequence[_Loaded]) -> None:
        """One call to the medium for neighbours."""
        first = span[0].write
        parts = [part for loaded in span for part in (*loaded.parts, bytes(loaded.size - loaded.length))]
        try:
            self._tier.write(first.region, first.offset, parts)
        except TierFailure as failure:
            logger.warning("write to region %d at %d failed (%s): %s", first.region, first.offset, failure.reason, failure)
            for loaded in span:
                loaded.outcome = WriteOutcome.FAILED

    def _sync(self, batch: Sequence[_Loaded]) -> None:
        for region in {loaded.write.region for loaded in batch if loaded.outcome is WriteOutcome.OK}:
            try:
                self._tier.sync(region)
            except TierFailure as failure:
                logger.warning("sync of region %d failed: %s", region, failure)
                for loaded in batch:
                    if loaded.write.region == region and loaded.outcome is WriteOutcome.OK:
                        loaded.outcome = WriteOutcome.FAILED


class _Loaded:
    """A write with its bytes, which are the caller's until the outcome."""

    __slots__ = ("length", "outcome", "parts", "size", "write")

    def __init__(self, write: _Write) -> None:
        parts = write.load()
        self.write = write
        self.parts: Sequence[bytes | memoryview] = () if parts is None else parts
        self.outcome = WriteOutcome.REFUSED if parts is None else WriteOutcome.OK
        self.length = sum(len(part) for part in self.parts)
        self.size = round_up(self.length)
        """What it takes on the medium."""

    def is_followed_by(self, other: _Loaded) -> bool:
        at, next_at = self.write, other.write
        return other.outcome is WriteOutcome.OK and at.region == next_at.region and at.offset + self.size == next_at.offset


def _report(batch: Sequence[_Loaded]) -> None:
    for loaded in batch:
        loaded.write.done(loaded.outcome)
