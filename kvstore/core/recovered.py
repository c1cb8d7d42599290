"""What a restart found, put in order: which record of each block counts."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core.events.regions import RecoveredRecord, RecoveredRegion
from kvstore.core.manifest import RegionHeader
from kvstore.ids import BlockHash, KeySpace

Placed = tuple[int, RecoveredRecord]
"""(region, record)"""


def region_header(found: RecoveredRegion, *, region_bytes: int) -> RegionHeader:
    return RegionHeader(region=found.region, region_bytes=region_bytes, sequence=found.sequence, nonce=found.nonce)


def newest_records(regions: Iterable[RecoveredRegion]) -> tuple[list[Placed], list[Placed]]:
    """(live, superseded): of each block the record with the highest generation lives. Oldest first, as they were written."""
    newest: dict[tuple[KeySpace, BlockHash], Placed] = {}
    superseded: list[Placed] = []
    found = [(region.region, record) for region in regions for record in region.records]
    for placed in sorted(found, key=lambda placed: placed[1].generation):
        key = placed[1].key_space, placed[1].block.hash
        older = newest.pop(key, None)
        if older is not None:
            superseded.append(older)
        newest[key] = placed
    return list(newest.values()), superseded
