"""What a restart found, put in order: which record of each block counts, and what is on the shelves with it."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core.copies import CopyState
from kvstore.core.events.notes import NoteKind
from kvstore.core.events.regions import RecoveredRecord, RecoveredRegion, RegionsRecovered
from kvstore.core.extent import Extent, Tier
from kvstore.core.index import Entry
from kvstore.core.manifest import HEADER_BYTES, RegionHeader
from kvstore.core.region import RegionTable
from kvstore.core.stock import Stock
from kvstore.ids import BlockHash, Generation, KeySpace

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


def restock(stock: Stock, regions: RegionTable, event: RegionsRecovered) -> None:
    """Lists what the SSD had at the restart: on a stock with nothing in it. Cost: O(records)."""
    assert not len(stock.index)
    for found in event.regions:
        if found.unreadable:
            regions.recover_unreadable(found.region)
            continue
        end = max((record.offset + HEADER_BYTES + record.length for record in found.records), default=HEADER_BYTES)
        cursor = min(end, regions.region_bytes) if found.sealed else regions.region_bytes
        regions.recover(region_header(found, region_bytes=regions.region_bytes), cursor=cursor, footer_stale=not found.sealed)
    live, superseded = newest_records(event.regions)
    for number, record in superseded:
        regions.add_dead(record, region=number)
    for number, record in live:
        stock.last_ssd_generation = max(stock.last_ssd_generation, record.generation)
        if 0 < record.expires_at <= stock.today:
            regions.add_dead(record, region=number)
            continue
        entry = Entry(
            key_space=record.key_space,
            block=record.block,
            length=record.length,
            checksum=record.checksum,
            expires_at=record.expires_at,
        )
        extent = Extent(Tier.SSD, number, record.offset, record.length, Generation(record.generation))
        regions[number].unfreed += 1
        copy = stock.take_room(record.key_space, extent, CopyState.READABLE, checksum=record.checksum, rung=record.rung)
        stock.add_copy(entry, copy)
        stock.list_entry(entry)
    stock.note(NoteKind.RECOVERED, "restart", tier=Tier.SSD, payload_bytes=sum(record.length for _, record in live))
