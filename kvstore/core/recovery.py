"""Recovery: what one region holds after a restart. The shell lends its eyes (two callables) and hands the result in as RegionsRecovered."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.core.events.regions import RecoveredRecord, RecoveredRegion
from kvstore.core.extent import ALIGNMENT, round_up
from kvstore.core.manifest import HEADER_BYTES, decode_footer, decode_record_header, decode_region_header, footer_offset
from kvstore.errors import UnsupportedFormat


def recover_region(
    read: Callable[[int, int], bytes],
    is_intact: Callable[[RecoveredRecord], bool],
    *,
    region: int,
    region_bytes: int,
) -> RecoveredRegion | None:
    """None: the region is free. One whose header could not be read is not: it comes back as `unreadable`.

    `read(offset, length)` gives bytes of the region, fewer only at a fault; `is_intact(record)` reads the payload and compares its
    checksum. A region with a footer is believed: the footer was written after all its payloads were down. Without one, each payload is
    checked, for the crash may have come between header and payload. Bytes on the medium may still rot later: that is what the checksum of
    every read is for.

    Raises UnsupportedFormat for a region of another format or size.

    Cost: 3 reads with a footer; else one per record and one per block of free room, and all payloads.
    """
    first = read(0, HEADER_BYTES)
    if len(first) < HEADER_BYTES:
        return RecoveredRegion(region=region, sequence=0, nonce=b"", sealed=False, records=(), unreadable=True)
    header = decode_region_header(first)
    if header is None or header.region != region:
        return None
    if header.region_bytes != region_bytes:
        raise UnsupportedFormat(
            f"SSD region {region} was made with region_bytes={header.region_bytes}, the configuration says {region_bytes}"
        )
    records: tuple[RecoveredRecord, ...] | None = None
    start = footer_offset(read(region_bytes - ALIGNMENT, ALIGNMENT), region_bytes=region_bytes)
    if start is not None:
        records = decode_footer(read(start, region_bytes - start), nonce=header.nonce)
    sealed = records is not None
    if records is None:
        records = tuple(record for record in _scan(read, nonce=header.nonce, region_bytes=region_bytes) if is_intact(record))
    return RecoveredRegion(region=region, sequence=header.sequence, nonce=header.nonce, sealed=sealed, records=records)


def _scan(read: Callable[[int, int], bytes], *, nonce: bytes, region_bytes: int) -> list[RecoveredRecord]:
    """Live records by their headers. Several writes may have been under way at the crash, so a gap does not end the scan."""
    records: list[RecoveredRecord] = []
    at = HEADER_BYTES
    while at + HEADER_BYTES <= region_bytes:
        header = decode_record_header(read(at, HEADER_BYTES), nonce=nonce)
        if header is None or header.record.offset != at + HEADER_BYTES:
            at += ALIGNMENT
            continue
        if not header.erased:
            records.append(header.record)
        at = header.record.offset + round_up(header.record.length)
    return records
