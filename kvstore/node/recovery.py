"""A restart: reads what the regions say about themselves."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from kvstore.codec.checksum import payload_checksum
from kvstore.core.events.regions import RecoveredRecord, RecoveredRegion, RegionsRecovered
from kvstore.core.extent import ALIGNMENT
from kvstore.core.recovery import recover_region
from kvstore.tiers.ssd import SsdRegions
from kvstore.tiers.tier import Tier, TierFailure

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RecoveryReport:
    records: int = 0
    torn_records: int = 0
    """Announced by a header, but the payload is not what was announced: dropped."""
    sealed_regions: int = 0
    scanned_regions: int = 0
    unreadable_regions: int = 0
    """Not even their header: given up, and voided before they are used again."""
    seconds: float = 0.0


def recover(regions: SsdRegions, medium: Tier) -> tuple[RegionsRecovered, RecoveryReport]:
    """Blocks; for a thread. `medium` does the reading: the regions themselves, or a wrapper around them.

    Raises UnsupportedFormat for a folder of another format version: then nothing in it has been touched.
    """
    started = time.monotonic()
    report = RecoveryReport()
    found: list[RecoveredRegion] = []
    for number in regions.existing():
        eyes = _RegionEyes(medium, number, regions.region_bytes)
        region = recover_region(eyes.read, eyes.is_intact, region=number, region_bytes=regions.region_bytes)
        report.torn_records += eyes.torn_records
        if eyes.faults > 1:
            logger.warning("recovery of region %d: %d more places could not be read", number, eyes.faults - 1)
        if region is not None:
            found.append(region)
            report.records += len(region.records)
            report.sealed_regions += region.sealed
            report.scanned_regions += not region.sealed and not region.unreadable
            report.unreadable_regions += region.unreadable
    report.seconds = time.monotonic() - started
    logger.info("recovered from %s: %s", regions.folder, report)
    return RegionsRecovered(regions=tuple(found)), report


class _RegionEyes:
    """Small reads for a region with a footer; for a scan the whole region at once, since 16,384 single reads of 64 MiB take seconds."""

    def __init__(self, medium: Tier, region: int, region_bytes: int) -> None:
        self.torn_records = 0
        self.faults = 0
        """Reads that failed. The first one is logged: a file cut short has 16,384 of them."""
        self._medium = medium
        self._region = region
        self._region_bytes = region_bytes
        self._whole: memoryview | None = None

    def read(self, offset: int, length: int) -> bytes:
        """Fewer bytes than asked (none at all) at a fault."""
        is_scan = length == ALIGNMENT and 0 < offset < self._region_bytes - ALIGNMENT
        if is_scan and self._whole is None:
            self._whole = self._read_medium(0, self._region_bytes)
        if self._whole is not None and len(self._whole):
            return bytes(self._whole[offset : offset + length])
        return bytes(self._read_medium(offset, length))

    def is_intact(self, record: RecoveredRecord) -> bool:
        if self._whole is not None and len(self._whole):
            payload = self._whole[record.offset : record.offset + record.length]
        else:
            payload = self._read_medium(record.offset, record.length)
        intact = len(payload) == record.length and payload_checksum(payload) == record.checksum
        self.torn_records += not intact
        return intact

    def _read_medium(self, offset: int, length: int) -> memoryview:
        out = memoryview(bytearray(length))
        try:
            self._medium.read_into(self._region, offset, out)
        except TierFailure as failure:
            if not self.faults:
                logger.warning("recovery of region %d: %s", self._region, failure)
            self.faults += 1
            return out[:0]
        return out
