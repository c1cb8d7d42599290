"""Payloads out of a slow medium: each read once, checked, and never waited for without a bound."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.byte_budget import ByteBudget
from kvstore.codec.checksum import payload_checksum
from kvstore.core.extent import ALIGNMENT, Extent, Tier
from kvstore.errors import CorruptPayload
from kvstore.ids import Generation
from kvstore.node.payload_source import PayloadSource, Stored
from kvstore.tiers.faulty import Faults, FaultyTier
from kvstore.tiers.host import HostArena
from kvstore.tiers.ssd import SsdRegions
from kvstore.tiers.tier import FailureReason, TierFailure
from kvstore.units import MIB, Bytes, milliseconds, seconds

PAYLOADS = [bytes([number]) * (5000 + number) for number in range(4)]


@pytest.fixture
def disk(tmp_path):
    """(what is stored, a medium that counts its reads, its faults, a maker of sources)"""
    regions = SsdRegions(tmp_path, capacity=Bytes(MIB), region_bytes=Bytes(MIB))
    stored = []
    for number, payload in enumerate(PAYLOADS):
        offset = number * 4 * ALIGNMENT
        regions.write(0, offset, [payload])
        stored.append(Stored(Extent(Tier.SSD, 0, offset, len(payload), Generation(number)), payload_checksum(payload)))
    faults = Faults()
    host = HostArena(Bytes(MIB))
    with ThreadPoolExecutor(4) as executor:
        yield (
            stored,
            faults,
            lambda timeout=seconds(20): PayloadSource(
                host, FaultyTier(regions, faults), None, executor=executor, timeout=timeout, buffer=ByteBudget(MIB)
            ),
        )
    host.close()
    regions.close()


def test_what_is_being_read_is_not_read_again_and_one_who_leaves_takes_nothing_along(disk):
    stored, faults, source_with = disk
    gate, begun, reads = threading.Event(), threading.Semaphore(0), []

    def before_read():
        reads.append(1)
        begun.release()
        gate.wait(20)

    faults.before_read = before_read

    async def scenario():
        source = source_with()
        leaving = asyncio.create_task(source.read_each(stored[:2]))
        staying = asyncio.create_task(source.read_each(stored[1:3]))
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=20)
        leaving.cancel()
        gate.set()
        assert [bytes(payload) for payload in await staying] == PAYLOADS[1:3]
        await asyncio.gather(leaving, return_exceptions=True)
        assert len(reads) == 3, "each of the three once"
        assert bytes(await source.read(*stored[1])) == PAYLOADS[1]
        assert len(reads) == 4, "what was read before is not kept"

    asyncio.run(scenario())


def test_one_bad_payload_spoils_no_other_of_its_run(disk):
    stored, faults, source_with = disk

    async def scenario():
        source = source_with()
        faults.failing_reads = 1
        failed, *others = await source.read_each(stored)
        assert (failed.reason, [bytes(other) for other in others]) == (FailureReason.IO_ERROR, PAYLOADS[1:])
        faults.flipped_reads = 1
        flipped, *others = await source.read_each(stored)
        assert isinstance(flipped, CorruptPayload)
        assert [bytes(other) for other in others] == PAYLOADS[1:]

    asyncio.run(scenario())


def test_a_medium_that_hangs_is_a_timeout_for_everybody_who_waits_and_no_longer_than_it_hangs(disk):
    stored, faults, source_with = disk
    gate = threading.Event()
    faults.before_read = lambda: gate.wait(20)

    async def scenario():
        source = source_with(milliseconds(50))
        for failure in await asyncio.gather(source.read(*stored[0]), source.read_each(stored[:2]), return_exceptions=True):
            assert isinstance(failure, TierFailure)
            assert failure.reason is FailureReason.TIMEOUT
        gate.set()
        patient = source_with()
        assert [bytes(payload) for payload in await patient.read_each(stored)] == PAYLOADS

    asyncio.run(scenario())
