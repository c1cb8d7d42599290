"""The one checked read path: bytes of an extent, of whichever tier, that have the checksum they were stored with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from kvstore.byte_budget import ByteBudget
from kvstore.codec.checksum import payload_checksum
from kvstore.core.extent import Extent, Tier
from kvstore.errors import CorruptPayload
from kvstore.tiers.direct import aligned_memory
from kvstore.tiers.host import HostArena
from kvstore.tiers.tier import FailureReason, TierFailure
from kvstore.tiers.tier import Tier as Medium
from kvstore.units import MIB, Nanos, to_seconds

INLINE_BYTES = 2 * MIB
"""Up to here a checksum (4 to 10 GB/s; 13 us for 368 KiB in the cache) is done on the event loop: a hop to a thread and back costs 100 us
and more on busy cores. A longer one would keep other calls waiting."""

_INLINE_BATCH_BYTES = 8 * MIB
"""The same for several at once: half a millisecond at 15 GB/s. In a thread a commit of 16 x 368 KiB costs the node a tenth more CPU."""

Found = memoryview | TierFailure | CorruptPayload

RUN_BYTES = 1 * MIB
"""Read by one thread at a time: a hop to a thread and back costs 100 us and more on busy cores, as much as the disk takes for 200 KiB."""


class Stored(NamedTuple):
    extent: Extent
    checksum: int


class PayloadSource:
    def __init__(
        self, host: HostArena, ssd: Medium | None, gpu: Medium | None, *, executor: Executor, timeout: Nanos, buffer: ByteBudget
    ) -> None:
        """`buffer`: for what readers hold of payloads that were read into memory of their own; they take from it."""
        self.timeout = timeout
        self.buffer = buffer
        self._host = host
        self._beside = {Tier.SSD: ssd, Tier.GPU: gpu}
        self._executor = executor
        self._under_way: dict[Stored, tuple[asyncio.Future[list[Found]], int]] = {}
        """In which job, and as which of it."""

    def is_quick(self, extent: Extent) -> bool:
        """True: `read_now` is fit for the event loop."""
        return extent.tier is Tier.HOST and extent.length <= INLINE_BYTES

    def are_quick(self, wanted: Sequence[Stored]) -> bool:
        """The same for `read_each_now`."""
        total = 0
        for (tier, _, _, length, _), _ in wanted:
            if tier is not Tier.HOST or length > INLINE_BYTES:
                return False
            total += length
        return total <= _INLINE_BATCH_BYTES

    def host_view(self, extent: Extent) -> memoryview:
        """A host payload in place, unchecked: for a reader that checks it itself."""
        assert extent.tier is Tier.HOST
        return self._host.view(extent.offset, extent.length)

    def read_now(self, extent: Extent, checksum: int) -> memoryview:
        """The payload, checked; in place for the host tier, in fresh memory for the others. Blocks. Raises TierFailure, CorruptPayload."""
        if extent.tier is Tier.HOST:
            payload = self._host.view(extent.offset, extent.length)
        else:
            medium = self._beside[extent.tier]
            assert medium is not None
            payload = aligned_memory(extent.length)
            medium.read_into(extent.region, extent.offset, payload)
        if payload_checksum(payload) != checksum:
            raise CorruptPayload(f"{extent.tier.name} region {extent.region} [{extent.offset}, +{extent.length}) is not what was stored")
        return payload

    async def read(self, extent: Extent, checksum: int) -> memoryview:
        """The same without blocking the loop. Raises also as `read_each`."""
        if self.is_quick(extent):
            return self.read_now(extent, checksum)
        [payload] = await self.read_each([Stored(extent, checksum)])
        if isinstance(payload, Exception):
            raise payload
        return payload

    async def read_each(self, wanted: Sequence[Stored]) -> list[Found]:
        """Each payload, or why there is none; one after another in one thread, for one hop there and back.

        What is being read already, for a reader or a promotion, is not read twice: both get the same memory, and neither may write to it.

        Raises TierFailure when not all are done within the timeout: a medium that hangs. Then the thread fills memory that nobody looks
        at any more.
        """
        if self.are_quick(wanted):
            return self.read_each_now(wanted)
        fresh = [stored for stored in wanted if stored not in self._under_way]
        if fresh:
            job = asyncio.get_running_loop().run_in_executor(self._executor, self.read_each_now, fresh)
            self._under_way |= {stored: (job, index) for index, stored in enumerate(fresh)}
            job.add_done_callback(lambda _: self._ended(fresh))
        ways = [self._under_way[stored] for stored in wanted]
        _, late = await asyncio.wait({job for job, _ in ways}, timeout=to_seconds(self.timeout))  # cancels none: they may be another's too
        if late:
            tier = wanted[0].extent.tier.name
            raise TierFailure(FailureReason.TIMEOUT, f"{tier} gave no answer within {to_seconds(self.timeout):.1f} s")
        return [job.result()[index] for job, index in ways]

    def _ended(self, stored: Sequence[Stored]) -> None:
        for one in stored:
            self._under_way.pop(one, None)

    def read_each_now(self, wanted: Sequence[Stored]) -> list[Found]:
        """The same, here and now."""
        found: list[Found] = []
        for stored in wanted:
            try:
                found.append(self.read_now(*stored))
            except (TierFailure, CorruptPayload) as error:
                found.append(error)
        return found
