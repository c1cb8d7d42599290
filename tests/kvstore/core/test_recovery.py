from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.core.events.regions import RecoveredRecord
from kvstore.core.extent import ALIGNMENT
from kvstore.core.manifest import HEADER_BYTES, RegionHeader, encode_footer, encode_record_header, encode_region_header
from kvstore.core.recovered import newest_records
from kvstore.core.recovery import recover_region
from kvstore.errors import UnsupportedFormat
from kvstore.ids import BlockRef, KeySpace

NONCE = b"n" * 16
REGION_BYTES = 32 * ALIGNMENT


class Disk:
    """One region of bytes."""

    def __init__(self) -> None:
        self.bytes = bytearray(REGION_BYTES)
        self.records: list[RecoveredRecord] = []
        self.put(0, encode_region_header(RegionHeader(region=0, region_bytes=REGION_BYTES, sequence=1, nonce=NONCE)))

    def put(self, offset: int, data: bytes) -> None:
        self.bytes[offset : offset + len(data)] = data

    def record(self, space: KeySpace, block: BlockRef, page: int, *, length: int = 5000, nonce: bytes = NONCE) -> RecoveredRecord:
        record = RecoveredRecord(space, block, page * ALIGNMENT + HEADER_BYTES, length, sum(block.hash), page)
        self.put(page * ALIGNMENT, encode_record_header(record, nonce=nonce))
        self.put(record.offset, block.hash * (length // 32 + 1))
        return record

    def is_intact(self, record: RecoveredRecord) -> bool:
        return sum(self.bytes[record.offset : record.offset + 32]) == record.checksum

    def recover(self, **changed: int):
        arguments = {"region": 0, "region_bytes": REGION_BYTES, **changed}
        return recover_region(lambda offset, length: bytes(self.bytes[offset : offset + length]), self.is_intact, **arguments)


def test_a_region_without_a_footer_is_scanned_over_gaps_and_torn_payloads(chain: Callable, space: KeySpace) -> None:
    disk, blocks = Disk(), chain(4)
    first = disk.record(space, blocks[0], 1)
    torn = disk.record(space, blocks[1], 4)
    disk.put(torn.offset, bytes(5000))
    after_gap = disk.record(space, blocks[2], 10)
    found = disk.recover()
    assert (found.sealed, found.records) == (False, (first, after_gap))


def test_a_footer_is_believed_without_reading_payloads(chain: Callable, space: KeySpace) -> None:
    disk, blocks = Disk(), chain(2)
    records = [disk.record(space, blocks[0], 1), disk.record(space, blocks[1], 4)]
    disk.put(*encode_footer(records, nonce=NONCE, region_bytes=REGION_BYTES))
    disk.is_intact = lambda record: pytest.fail("a payload was read")  # type: ignore[method-assign, assignment]
    found = disk.recover()
    assert (found.sealed, found.records) == (True, tuple(records))


def test_a_torn_footer_falls_back_to_the_scan(chain: Callable, space: KeySpace) -> None:
    disk = Disk()
    record = disk.record(space, chain(1)[0], 1)
    offset, data = encode_footer([record], nonce=NONCE, region_bytes=REGION_BYTES)
    disk.put(offset, data)
    disk.bytes[offset + 3] ^= 1
    found = disk.recover()
    assert (found.sealed, found.records) == (False, (record,))


def test_an_erased_record_is_not_found_and_hides_nothing_behind_it(chain: Callable, space: KeySpace) -> None:
    disk, blocks = Disk(), chain(2)
    erased = disk.record(space, blocks[0], 1)
    disk.put(erased.offset - HEADER_BYTES, encode_record_header(erased, nonce=NONCE, erased=True))
    kept = disk.record(space, blocks[1], 4)
    assert disk.recover().records == (kept,)


def test_a_payload_crafted_to_look_like_a_record_of_another_tenant_is_never_listed(chain: Callable, space: KeySpace) -> None:
    disk, blocks = Disk(), chain(2)
    victim = space._replace(namespace="victim")
    # The attacker does not know the region's nonce. The record that carries his payload is torn, so the scan walks through the payload.
    disk.record(victim, blocks[0], 5, nonce=b"guess".ljust(16, b"\0"))
    assert disk.recover().records == ()


def test_a_header_copied_to_another_place_is_not_a_record(chain: Callable, space: KeySpace) -> None:
    disk = Disk()
    record = disk.record(space, chain(1)[0], 1)
    disk.put(20 * ALIGNMENT, encode_record_header(record, nonce=NONCE))
    assert disk.recover().records == (record,)


def test_a_free_region_and_one_that_belongs_to_another_number_are_free(chain: Callable) -> None:
    disk = Disk()
    assert disk.recover(region=1) is None
    disk.put(0, bytes(HEADER_BYTES))
    assert disk.recover() is None


def test_a_changed_region_size_is_refused_with_both_sizes() -> None:
    with pytest.raises(UnsupportedFormat, match=f"{REGION_BYTES}.*{2 * REGION_BYTES}"):
        Disk().recover(region_bytes=2 * REGION_BYTES)


def test_of_two_records_of_one_block_the_newer_lives(chain: Callable, space: KeySpace) -> None:
    disk, block = Disk(), chain(1)[0]
    old, new = disk.record(space, block, 1), disk.record(space, block, 10)
    assert newest_records([disk.recover()]) == ([(0, new)], [(0, old)])


def test_a_region_whose_header_cannot_be_read_is_not_taken_for_free(chain: Callable, space: KeySpace) -> None:
    disk = Disk()
    disk.record(space, chain(1)[0], 1)
    found = recover_region(lambda offset, length: b"", disk.is_intact, region=3, region_bytes=REGION_BYTES)
    assert found is not None
    assert (found.unreadable, found.region, found.records) == (True, 3, ())
