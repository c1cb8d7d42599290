import asyncio
import threading

import pytest

from kvstore.core.extent import ALIGNMENT
from kvstore.node.ssd_writer import SsdWriter, WriteOutcome
from kvstore.tiers.ssd import SsdRegions
from kvstore.tiers.tier import FailureReason, TierFailure
from kvstore.units import KIB, Bytes


class Counted:
    """The regions, counting calls."""

    def __init__(self, regions):
        self.regions = regions
        self.writes = []
        self.syncs = []
        self.refused_at = None
        self.not_synced = None

    def write(self, place, offset, parts):
        self.writes.append((place, offset, sum(map(len, parts))))
        if offset == self.refused_at:
            raise TierFailure(FailureReason.IO_ERROR, "refused")
        self.regions.write(place, offset, parts)

    def sync(self, place):
        self.syncs.append(place)
        if place == self.not_synced:
            raise TierFailure(FailureReason.IO_ERROR, "not synced")
        self.regions.sync(place)

    def read_into(self, place, offset, out):
        self.regions.read_into(place, offset, out)


@pytest.fixture
def write_all(tmp_path):
    """Submits (region, offset, bytes or None) after a first write to region 3; gives their outcomes and what the medium saw."""

    def run(writes, *, refused_at=None, not_synced=None):
        async def scenario():
            medium = Counted(SsdRegions(tmp_path / "ssd", capacity=Bytes(1024 * KIB), region_bytes=Bytes(256 * KIB)))
            medium.refused_at, medium.not_synced = refused_at, not_synced
            writer = SsdWriter(medium, asyncio.get_running_loop())
            outcomes = [asyncio.get_running_loop().create_future() for _ in range(len(writes) + 1)]
            all_submitted = threading.Event()
            writer.submit(region=3, offset=0, load=lambda: all_submitted.wait() and [b"first"], done=outcomes[0].set_result)
            for (region, offset, data), outcome in zip(writes, outcomes[1:], strict=True):
                parts = None if data is None else [data[:1], data[1:]]
                writer.submit(region=region, offset=offset, load=lambda parts=parts: parts, done=outcome.set_result)
            all_submitted.set()
            found = await asyncio.wait_for(asyncio.gather(*outcomes), 10)
            writer.close()
            media.append(medium.regions)
            return found[1:], medium

        return asyncio.run(scenario())

    media = []
    yield run
    for regions in media:
        regions.close()


def test_neighbours_go_down_in_one_call_and_come_back_each_in_its_place(write_all):
    payloads = [bytes([number]) * size for number, size in enumerate((5, ALIGNMENT, ALIGNMENT + 1, 3))]
    offsets = [0, ALIGNMENT, 2 * ALIGNMENT, 4 * ALIGNMENT]
    outcomes, medium = write_all([(0, offset, payload) for offset, payload in zip(offsets, payloads, strict=True)])
    assert outcomes == [WriteOutcome.OK] * 4
    assert [write for write in medium.writes if write[0] == 0] == [(0, 0, 5 * ALIGNMENT)]
    assert medium.syncs.count(0) == 1
    for offset, payload in zip(offsets, payloads, strict=True):
        out = bytearray(len(payload))
        medium.read_into(0, offset, memoryview(out))
        assert bytes(out) == payload


def test_gaps_and_other_regions_begin_a_call_of_their_own(write_all):
    outcomes, medium = write_all([(0, 0, b"a"), (0, 2 * ALIGNMENT, b"b"), (1, 3 * ALIGNMENT, b"c")])
    assert outcomes == [WriteOutcome.OK] * 3
    assert [write for write in medium.writes if write[0] != 3] == [
        (0, 0, ALIGNMENT),
        (0, 2 * ALIGNMENT, ALIGNMENT),
        (1, 3 * ALIGNMENT, ALIGNMENT),
    ]


def test_a_failed_call_fails_all_that_was_in_it_and_nothing_else(write_all):
    """The sync that follows goes well: the region is there, by the first write."""
    writes = [(0, 4 * ALIGNMENT, b"z"), (0, ALIGNMENT, b"a"), (0, 2 * ALIGNMENT, b"b"), (1, 0, b"c")]
    outcomes, _ = write_all(writes, refused_at=ALIGNMENT)
    assert outcomes == [WriteOutcome.OK, WriteOutcome.FAILED, WriteOutcome.FAILED, WriteOutcome.OK]


def test_what_was_written_and_could_not_be_synced_is_not_said_to_be_there(write_all):
    outcomes, _ = write_all([(0, 0, b"a"), (1, 0, b"b"), (0, 2 * ALIGNMENT, b"c")], not_synced=0)
    assert outcomes == [WriteOutcome.FAILED, WriteOutcome.OK, WriteOutcome.FAILED]


def test_what_has_nothing_good_to_write_is_refused_and_leaves_its_place_alone(write_all):
    outcomes, medium = write_all([(0, 0, b"a"), (0, ALIGNMENT, None), (0, 2 * ALIGNMENT, b"c")])
    assert outcomes == [WriteOutcome.OK, WriteOutcome.REFUSED, WriteOutcome.OK]
    assert [write for write in medium.writes if write[0] == 0] == [(0, 0, ALIGNMENT), (0, 2 * ALIGNMENT, ALIGNMENT)]
