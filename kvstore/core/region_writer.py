"""Region writer: headers, footers and erasures of regions, in the order that keeps a restart honest."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.core.events.notes import NoteKind
from kvstore.core.events.regions import RecoveredRecord, RegionWriteReason, WriteRegion
from kvstore.core.extent import Tier
from kvstore.core.manifest import HEADER_BYTES, encode_footer, encode_record_header, encode_region_header
from kvstore.core.region import Region, RegionEvent, RegionState, RegionTable
from kvstore.core.stock import Stock
from kvstore.core.store_config import SsdConfig
from kvstore.units import Nanos

Erased = Callable[[bool], None]
"""Told once whether a record was voided on the medium."""


class RegionWriter:
    def __init__(self, stock: Stock, config: SsdConfig, regions: RegionTable) -> None:
        self._stock = stock
        self._config = config
        self._regions = regions
        self.paused_until = Nanos(0)
        """After a failed write the disk is left alone for a while."""
        self._pause = config.retry_after

    def pause(self) -> None:
        self.paused_until = Nanos(self._stock.now + self._pause)

    def hurry(self) -> None:
        """The node stops: a pause under way ends, later ones are short, for the shell's deadline runs meanwhile."""
        self.paused_until = self._stock.now
        self._pause = self._config.retry_after_while_stopping

    def quiet(self) -> bool:
        """No header or footer is being written or waits to be, and no region takes records."""
        return self._regions.open is None and not len(self._stock.region_writes) and not self._regions.changed

    def open(self, region: Region) -> None:
        assert region.header is not None

        def on_outcome(ok: bool) -> None:
            self._regions.opened(region, ok=ok)
            if not ok:
                self._failed("open")

        self._write(region, RegionWriteReason.OPEN, 0, encode_region_header(region.header), on_outcome)

    def erase(self, region: Region, record: RecoveredRecord, erased: Erased) -> None:
        """Voids one record on the medium and in the footer. `erased(ok)` is called once, when both are down or one failed."""
        if region.state is RegionState.DROPPING:
            region.waiting_for_footer.append(erased)
            return
        assert region.header is not None
        region.unfreed += 1

        def on_outcome(ok: bool) -> None:
            if not ok:
                self._failed("erase")
                self._regions.add_dead(record, region=region.number)
                erased(False)
            elif region.state in (RegionState.SEALED, RegionState.EMPTYING):
                region.footer_stale = True
                region.waiting_for_footer.append(erased)
            else:
                erased(True)
            self._regions.freed(region.number)

        data = encode_record_header(record, nonce=region.header.nonce, erased=True)
        self._write(region, RegionWriteReason.ERASE, record.offset - HEADER_BYTES, data, on_outcome)

    def step_changed(self) -> None:
        """Starts the next write of each region that may have become ready for it."""
        changed, self._regions.changed = self._regions.changed, {}
        for number in changed:
            self._step(self._regions[number])

    def _step(self, region: Region) -> None:
        empty = not region.live and region.unfreed == 0 and not region.footer_writing
        if region.state is RegionState.SEALED and empty:
            self._regions.reclaim(region)
        if region.state is RegionState.EMPTYING and empty:
            self._drop(region)
        elif region.state in (RegionState.SEALED, RegionState.EMPTYING) and region.footer_stale and not region.footer_writing:
            self._seal(region)

    def _seal(self, region: Region) -> None:
        assert region.header is not None
        waiting, region.waiting_for_footer = region.waiting_for_footer, []
        region.footer_stale = False
        region.footer_writing = True

        def on_outcome(ok: bool) -> None:
            region.footer_writing = False
            self._regions.changed[region.number] = None
            if not ok:
                region.footer_stale = True
                self._failed("seal")
            for erased in waiting:
                erased(ok)

        records = self._regions.footer_records(region)
        offset, data = encode_footer(records, nonce=region.header.nonce, region_bytes=self._regions.region_bytes)
        self._write(region, RegionWriteReason.SEAL, offset, data, on_outcome)

    def _drop(self, region: Region) -> None:
        region.on(RegionEvent.EMPTIED)

        def on_outcome(ok: bool) -> None:
            self._regions.dropped(region, ok=ok)
            if not ok:
                self._failed("drop")
                self._regions.changed[region.number] = None
            waiting, region.waiting_for_footer = region.waiting_for_footer, []
            for erased in waiting:
                erased(ok)

        self._write(region, RegionWriteReason.DROP, 0, bytes(HEADER_BYTES), on_outcome)

    def _write(self, region: Region, reason: RegionWriteReason, offset: int, data: bytes, on_outcome: Callable[[bool], None]) -> None:
        operation = self._stock.region_writes.start(on_outcome)
        self._stock.say(WriteRegion(operation=operation, reason=reason, region=region.number, offset=offset, data=data))

    def _failed(self, reason: str) -> None:
        self._stock.note(NoteKind.REGION_FAILED, reason, tier=Tier.SSD)
        self.pause()
