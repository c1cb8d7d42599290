"""Regions of the SSD: written front to back, reclaimed whole. Decides places and order; the bytes are others' business."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from enum import Enum, auto

from kvstore.core.copies import Copy
from kvstore.core.events.regions import RecoveredRecord
from kvstore.core.extent import Extent, Tier, round_up
from kvstore.core.index import Entry
from kvstore.core.manifest import HEADER_BYTES, NONCE_BYTES, RegionHeader, footer_bytes, footer_entry_bytes
from kvstore.ids import BlockHash, Generation, KeySpace


class RegionState(Enum):
    FREE = auto()
    """What is on the medium is void: never opened, or dropped."""
    OPENING = auto()
    """Its header is being written."""
    OPEN = auto()
    """Takes records."""
    FULL = auto()
    """Takes no more; the last records are being written."""
    SEALED = auto()
    """Has a footer, or is about to get one."""
    EMPTYING = auto()
    """Chosen to be reclaimed: what lives is moved out, then it waits for its last reader."""
    DROPPING = auto()
    """Its header is being voided."""


class RegionEvent(Enum):
    CHOSEN_TO_OPEN = auto()
    OPENED = auto()
    OPEN_FAILED = auto()
    FILLED = auto()
    LAST_WRITE_DONE = auto()
    CHOSEN_TO_RECLAIM = auto()
    EMPTIED = auto()
    DROPPED = auto()
    DROP_FAILED = auto()
    RECOVERED = auto()


TRANSITIONS: dict[tuple[RegionState, RegionEvent], RegionState] = {
    (RegionState.FREE, RegionEvent.CHOSEN_TO_OPEN): RegionState.OPENING,
    (RegionState.FREE, RegionEvent.RECOVERED): RegionState.SEALED,
    (RegionState.OPENING, RegionEvent.OPENED): RegionState.OPEN,
    (RegionState.OPENING, RegionEvent.OPEN_FAILED): RegionState.FREE,
    (RegionState.OPEN, RegionEvent.FILLED): RegionState.FULL,
    (RegionState.FULL, RegionEvent.LAST_WRITE_DONE): RegionState.SEALED,
    (RegionState.SEALED, RegionEvent.CHOSEN_TO_RECLAIM): RegionState.EMPTYING,
    (RegionState.EMPTYING, RegionEvent.EMPTIED): RegionState.DROPPING,
    (RegionState.DROPPING, RegionEvent.DROPPED): RegionState.FREE,
    (RegionState.DROPPING, RegionEvent.DROP_FAILED): RegionState.SEALED,
}
"""A pair without a row is a bug."""


class Region:
    """Mutable; owned by the region table."""

    __slots__ = (
        "cursor",
        "dead",
        "entry_bytes",
        "footer_stale",
        "footer_writing",
        "header",
        "live",
        "live_bytes",
        "number",
        "state",
        "unfreed",
        "waiting_for_footer",
        "writing",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = RegionState.FREE
        self.header: RegionHeader | None = None
        self.cursor = 0
        """Where the next record header goes."""
        self.entry_bytes = 0
        """What the footer's entries will take."""
        self.writing = 0
        """Records being written."""
        self.live: dict[Copy, Entry] = {}
        """READABLE copies."""
        self.live_bytes = 0
        """Room of those."""
        self.unfreed = 0
        """Copies of any state that have not given their room back, and erasures under way. Until 0 the region is not dropped."""
        self.dead: dict[BlockHash, list[RecoveredRecord]] = {}
        """Records on the medium that count no more: a delete must erase these too, or a restart would find them."""
        self.footer_stale = False
        """The footer on the medium is missing, or lists a record that was erased."""
        self.footer_writing = False
        self.waiting_for_footer: list[Callable[[bool], None]] = []
        """Deletes that last over a restart only when the footer is right again, or the region dropped."""

    def on(self, event: RegionEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    @property
    def dead_bytes(self) -> int:
        """Room that a relocation of what lives would gain."""
        return self.cursor - HEADER_BYTES - self.live_bytes


class RegionTable:
    """All regions of one SSD tier. Every region that is FREE has no valid header on the medium.

    Writing keeps one free region back for relocations, so that reclaiming always has somewhere to move to.
    """

    def __init__(self, *, count: int, region_bytes: int, nonce_seed: bytes) -> None:
        self.region_bytes = region_bytes
        self._regions = [Region(number) for number in range(count)]
        self._free: dict[int, None] = dict.fromkeys(range(count))  # longest free first
        self._open: Region | None = None
        self._sequence = 0
        self._nonce_seed = nonce_seed
        self._sealed: dict[int, None] = {}
        self._sealed_bytes = 0
        """Room of all records in those, dead or alive."""
        self._reclaiming: dict[int, None] = {}  # EMPTYING and DROPPING
        self._unread: dict[int, None] = {}
        self.live_bytes = 0
        """Room of all READABLE records, headers included."""
        self.changed: dict[int, None] = {}
        """Regions whose next step may have become possible; emptied by who takes the steps."""

    def __getitem__(self, number: int) -> Region:
        return self._regions[number]

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions)

    def __len__(self) -> int:
        return len(self._regions)

    @property
    def free_regions(self) -> int:
        return len(self._free)

    @property
    def sealed_regions(self) -> int:
        return len(self._sealed)

    @property
    def reclaim_under_way(self) -> bool:
        """A region will be free soon: it is being emptied or dropped. One that only waits for its last reader does not count."""
        return any(self._regions[number].live or self._regions[number].state is RegionState.DROPPING for number in self._reclaiming)

    @property
    def open(self) -> Region | None:
        """The one region that takes records, or is about to."""
        return self._open

    def fits_a_region(self, key_space: KeySpace, length: int) -> bool:
        return HEADER_BYTES + record_bytes(length) + footer_bytes(footer_entry_bytes(key_space)) <= self.region_bytes

    def choose_to_open(self, *, last_resort: bool) -> Region | None:
        """A free region that is now OPENING with a new header; None while one is open, or none may be taken."""
        if self._open is not None or len(self._free) <= (0 if last_resort else 1):
            return None
        number = next(iter(self._free))
        del self._free[number]
        region = self._regions[number]
        region.on(RegionEvent.CHOSEN_TO_OPEN)
        self._sequence += 1
        nonce = hashlib.sha256(self._nonce_seed + self._sequence.to_bytes(8, "little")).digest()[:NONCE_BYTES]
        region.header = RegionHeader(region=number, region_bytes=self.region_bytes, sequence=self._sequence, nonce=nonce)
        region.cursor = HEADER_BYTES
        region.entry_bytes = 0
        self._open = region
        return region

    def opened(self, region: Region, *, ok: bool) -> None:
        if ok:
            region.on(RegionEvent.OPENED)
        else:
            region.on(RegionEvent.OPEN_FAILED)
            region.header = None
            self._open = None
            self._free[region.number] = None

    def has_room(self, key_space: KeySpace, length: int) -> bool:
        """For one more record in the region that is open now."""
        region = self._open
        if region is None or region.state is not RegionState.OPEN:
            return False
        footer = footer_bytes(region.entry_bytes + footer_entry_bytes(key_space))
        return region.cursor + record_bytes(length) + footer <= self.region_bytes

    def allocate(self, key_space: KeySpace, length: int, *, generation: Generation) -> Extent:
        """Room for one record in the open region, which must have it."""
        region = self._open
        assert region is not None
        assert self.has_room(key_space, length)
        extent = Extent(Tier.SSD, region.number, region.cursor + HEADER_BYTES, length, generation)
        region.cursor += record_bytes(length)
        region.entry_bytes += footer_entry_bytes(key_space)
        region.writing += 1
        region.unfreed += 1
        return extent

    def fill(self) -> None:
        """The open region takes no more."""
        region = self._open
        if region is not None and region.state is RegionState.OPEN:
            region.on(RegionEvent.FILLED)
            self._open = None
            self._seal_if_written(region)

    def write_ended(self, copy: Copy) -> None:
        region = self._regions[copy.region]
        assert region.writing > 0
        region.writing -= 1
        self._seal_if_written(region)

    def _seal_if_written(self, region: Region) -> None:
        if region.state is RegionState.FULL and region.writing == 0:
            region.on(RegionEvent.LAST_WRITE_DONE)
            region.footer_stale = True
            self._add_sealed(region)
        self.changed[region.number] = None

    def add_live(self, copy: Copy, entry: Entry) -> None:
        region = self._regions[copy.region]
        region.live[copy] = entry
        region.live_bytes += record_bytes(copy.length)
        self.live_bytes += record_bytes(copy.length)

    def remove_live(self, copy: Copy) -> None:
        """The copy is not READABLE any more. Its room is taken until `freed`; its record counts no more."""
        region = self._regions[copy.region]
        entry = region.live.pop(copy)
        region.live_bytes -= record_bytes(copy.length)
        self.live_bytes -= record_bytes(copy.length)
        self.add_dead(record_of(entry, copy), region=copy.region)

    def add_dead(self, record: RecoveredRecord, *, region: int) -> None:
        self._regions[region].dead.setdefault(record.block.hash, []).append(record)
        self.changed[region] = None

    def freed(self, number: int) -> None:
        """One copy, or one erasure, is done with the region."""
        region = self._regions[number]
        assert region.unfreed > 0
        region.unfreed -= 1
        self.changed[number] = None

    def take_dead(self, key_space: KeySpace, block: BlockHash) -> list[tuple[Region, RecoveredRecord]]:
        """Every dead record of the key that is still on the medium; forgotten here, so the caller erases them. Cost: O(regions)."""
        found: list[tuple[Region, RecoveredRecord]] = []
        for region in self._regions:
            records = region.dead.get(block)
            if records:
                region.dead[block] = [record for record in records if record.key_space != key_space]
                found += [(region, record) for record in records if record.key_space == key_space]
        return found

    def footer_records(self, region: Region) -> list[RecoveredRecord]:
        """By place, so that a restart lists parents before children as they were written."""
        return [record_of(entry, copy) for copy, entry in sorted(region.live.items(), key=lambda item: item[0].offset)]

    def choose_victim(self, *, min_dead_share: float) -> Region | None:
        """Of the sealed regions whose dead share is large enough the one with the most dead bytes, the first of equals; now EMPTYING. Cost:
        O(regions)."""
        regions = self._regions
        worth_it = [n for n in self._sealed if 0 < regions[n].dead_bytes >= min_dead_share * (regions[n].cursor - HEADER_BYTES)]
        if not worth_it:
            return None
        region = regions[max(worth_it, key=lambda number: (regions[number].dead_bytes, -number))]
        self.reclaim(region)
        return region

    def has_room_to_spare(self, waiting_bytes: int, *, min_dead_share: float, largest: int) -> bool:
        """Whether so many bytes of records can be written without costing any live one its place: into room that was never written, or
        into what reclaiming gains, and that is gained without evicting while somewhere a region has enough dead bytes, so at the latest
        when all together have. One region stays free, and of each other one the room of a record of `largest` bytes may be lost at its
        end."""
        whole = self.region_bytes - HEADER_BYTES - record_bytes(largest)
        fresh = whole * max(0, len(self._free) - 1)
        if self._open is not None:
            fresh += max(0, HEADER_BYTES + whole - self._open.cursor)
        if waiting_bytes <= fresh:
            return True
        others = len(self._regions) - len(self._sealed) - 1
        return self.live_bytes + waiting_bytes <= (1 - min_dead_share) * (self._sealed_bytes + whole * max(0, others))

    def _add_sealed(self, region: Region) -> None:
        self._sealed[region.number] = None
        self._sealed_bytes += region.cursor - HEADER_BYTES

    def reclaim(self, region: Region) -> None:
        region.on(RegionEvent.CHOSEN_TO_RECLAIM)
        del self._sealed[region.number]
        self._sealed_bytes -= region.cursor - HEADER_BYTES
        self._reclaiming[region.number] = None
        self.changed[region.number] = None

    def dropped(self, region: Region, *, ok: bool) -> None:
        del self._reclaiming[region.number]
        if not ok:
            region.on(RegionEvent.DROP_FAILED)
            self._add_sealed(region)
            return
        region.on(RegionEvent.DROPPED)
        self._unread.pop(region.number, None)
        assert not region.live
        region.dead = {}
        region.header = None
        region.footer_stale = False
        self._free[region.number] = None

    def recover(self, header: RegionHeader, *, cursor: int, footer_stale: bool) -> Region:
        """The region as a restart found it: sealed, for its tail is not written on."""
        region = self._regions[header.region]
        del self._free[region.number]
        region.on(RegionEvent.RECOVERED)
        region.header = header
        region.cursor = cursor
        region.footer_stale = footer_stale
        self._add_sealed(region)
        self._sequence = max(self._sequence, header.sequence)
        self.changed[region.number] = None
        return region

    def recover_unreadable(self, number: int) -> None:
        """Nobody knows what is in the region: it is empty, and so the next to be voided."""
        region = self._regions[number]
        del self._free[number]
        region.on(RegionEvent.RECOVERED)
        region.cursor = HEADER_BYTES
        self._add_sealed(region)
        self._unread[number] = None
        self.changed[number] = None

    @property
    def unread(self) -> list[Region]:
        """Regions that may hold records of any block, and are not voided yet."""
        return [self._regions[number] for number in self._unread]


def record_bytes(length: int) -> int:
    """Room of a record: header and padded payload."""
    return HEADER_BYTES + round_up(length)


def record_of(entry: Entry, copy: Copy) -> RecoveredRecord:
    return RecoveredRecord(
        key_space=entry.key_space,
        block=entry.block,
        offset=copy.offset,
        length=copy.length,
        checksum=copy.checksum,
        generation=copy.generation,
        expires_at=entry.expires_at,
        rung=copy.rung,
    )
