"""Tiering: demotion to the SSD, promotion back, and the turning of regions.

All work here is started by `pump`, after every event, within bounds: so many moves under way, none while the disk is being left alone after
a failed write.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from kvstore.core.copies import Copy
from kvstore.core.durability import Durability, Settled
from kvstore.core.erasures import Erasures
from kvstore.core.events.moves import CopyReason
from kvstore.core.events.regions import RegionsRecovered
from kvstore.core.events.stop import AnswerStop, StopReport
from kvstore.core.extent import Extent, Tier
from kvstore.core.index import Entry
from kvstore.core.recoder import Recoder
from kvstore.core.recovered import restock
from kvstore.core.region import Region, RegionState, RegionTable
from kvstore.core.region_writer import RegionWriter
from kvstore.core.room import Room
from kvstore.core.ssd_moves import SsdMoves
from kvstore.core.staged_put import StagedPut
from kvstore.core.stock import Stock
from kvstore.core.store_config import SsdConfig, WritePolicy
from kvstore.ids import KeySpace, RequestId
from kvstore.units import Nanos

_MOVES_OF_A_STOP = 4
"""Times as many moves as usual: nobody reads any more, and small records need many to a sync."""
_EVICTIONS_PER_PUMP = 256
"""So that one event never stalls the others for long: some milliseconds."""


class Tiering:
    def __init__(self, stock: Stock, room: Room, config: SsdConfig, regions: RegionTable, *, report: Callable[[], StopReport]) -> None:
        """`report`: how far a stop has come, for its answer."""
        self._stock = stock
        self._room = room
        self._config = config
        self._regions = regions
        self._writer = RegionWriter(stock, config, regions)
        self._emptying: Region | None = None
        self._ready = False
        self._report = report
        self._stop: RequestId | None = None
        self._stop_until: Nanos | None = None
        self.kept: list[int] = []
        """Lengths of the blocks that a stop has put on the SSD so far."""
        self._durable = Durability(config.durable_within)
        given_up = partial(self._durable.settle, durable=False)
        self._recoder = Recoder(stock, given_up=given_up)
        self._moves = SsdMoves(stock, regions, self._writer, demoted=self._demoted, given_up=given_up)
        self.erasures = Erasures(regions, self._writer, self._moves)
        share = 0.0 if config.write_policy is WritePolicy.WRITE_THROUGH else config.demote_above
        self._demote_from = int(share * stock.arena.capacity)

    # --- the doors ----------------------------------------------------------------------------------------------------------------------

    def recover(self, event: RegionsRecovered) -> None:
        assert not self._ready
        self._ready = True
        restock(self._stock, self._regions, event)

    def stop(self, request_id: RequestId, *, within: Nanos | None) -> None:
        """From now on everything in the host tier is worth demoting, the hottest first, but no block before its head: whenever the time is
        over, what is on the SSD is whole prefixes. Cost: O(n log n)."""
        self._stop = request_id
        if within is not None:
            self._stop_until = Nanos(self._stock.now + within - within // 8)
        self._writer.hurry()
        stock = self._stock
        order: OrderedDict[Entry, None] = OrderedDict()
        for entry in sorted(stock.undemoted, key=lambda entry: (-entry.last_used, entry.index)):
            line = []
            while entry not in order and entry in stock.undemoted:
                line.append(entry)
                parent = stock.index.get(entry.key_space, entry.parent)
                if parent is None:
                    break
                entry = parent
            order.update(dict.fromkeys(reversed(line)))
        stock.undemoted = order

    def durability(self, entry: Entry, settled: Settled) -> bool:
        """write_through: the block, just listed, is on its way to the SSD, and `settled` is called when it is there or will not be. False:
        nothing is to be waited for."""
        return (
            self._config.write_policy is WritePolicy.WRITE_THROUGH
            and self._ready
            and self._stop is None
            and self._stock.now >= self._writer.paused_until
            and self._worth_demoting(entry)
            and self._durable.wait(entry, settled, now=self._stock.now)
        )

    def takes_writes(self, now: Nanos) -> bool:
        """Not before the recovery, nor for a while after a failed write."""
        return self._ready and now >= self._writer.paused_until

    def place(self, staged: StagedPut) -> bool:
        """Writes it to the SSD. False: there is no room yet; the next step towards it is under way, or nothing can go now."""
        entry = staged.entry
        source = staged.source
        if len(self._moves.under_way) >= self._most_moves or not self._has_room(entry.key_space, source.length, last_resort=False):
            return False
        staged.starts()
        self._moves.start(entry, source, self._record_room(entry.key_space, source.length), CopyReason.PLACE, staged=staged)
        return True

    def demotes_now(self) -> bool:
        """Demotions are under way, or as good as: host copies become spare soon."""
        stock = self._stock
        if not self._ready or stock.now < self._writer.paused_until or self._stop is not None:
            return False
        if self._moves.demotions or self._recoder.demotions:
            return True
        return bool(stock.undemoted and (self._moves.under_way or len(stock.region_writes)))

    def hit(self, entry: Entry) -> None:
        """A lease reads the block from SSD. Promotes it if it has earned that and room costs no block its last copy."""
        stock = self._stock
        if (
            self._stop is not None
            or not stock.config.has_host
            or not entry.listed
            or entry.host is not None
            or entry.ssd is None
            or entry.move is not None
            or len(self._moves.under_way) >= self._config.max_moves
            or not stock.admission.promotes(entry)
            or stock.quota.missing(entry.key_space.namespace, entry.ssd.length)
        ):
            return
        extent = self._room.spare_in_host(entry.ssd.length, entry.key_space.namespace)
        if extent is not None:
            self._moves.start(entry, entry.ssd, extent, CopyReason.PROMOTE)

    # --- the pump -----------------------------------------------------------------------------------------------------------------------

    def pump(self, now: Nanos) -> None:
        """Starts what may start now."""
        stock = self._stock
        self._durable.sweep(now)
        while stock.spoiled:
            key_space, block = stock.spoiled.pop()
            self.erasures.erase(key_space, block, lambda ok: None)
        if not self._ready or now < self._writer.paused_until:
            return
        self._writer.step_changed()
        if self._emptying is not None and not (self._emptying.state is RegionState.EMPTYING and self._emptying.live):
            self._emptying = None
        self._write_ready()
        if self._emptying is not None:
            self._relocate(self._emptying)
        self._demote()
        self._writer.step_changed()
        if self._stop is not None and not self._moves.under_way and not len(self._recoder) and not stock.undemoted and self._writer.quiet():
            stock.say(AnswerStop(request_id=self._stop, report=self._report()))
            self._stop = None

    def _demote(self) -> None:
        stock = self._stock
        if self._stop is None and self._config.write_policy is WritePolicy.ON_EVICTION:
            self._demote_coldest()
            return
        if self._stop_until is not None and stock.now >= self._stop_until:
            stock.undemoted.clear()
        while stock.undemoted and self._may_demote_more:
            if self._stop is None and stock.arena.used <= self._demote_from:
                return
            entry = next(iter(stock.undemoted))
            if not self._worth_demoting(entry):
                del stock.undemoted[entry]
                self._durable.settle(entry, durable=False)
                continue
            if not self._has_room(entry.key_space, entry.length, last_resort=False):
                return
            del stock.undemoted[entry]
            self._write(entry, entry, CopyReason.DEMOTE)
        if self._stop is not None and not stock.undemoted and not self._moves.under_way and not len(self._recoder):
            self._regions.fill()

    def _write_ready(self) -> None:
        """What has been stepped down, or could not be."""
        stock = self._stock
        for recoding in self._recoder.ready():
            entry, source, relocates = recoding.entry, recoding.source, recoding.reason is CopyReason.RELOCATE
            if self._has_room(entry.key_space, recoding.length, last_resort=relocates):
                extent = self._record_room(entry.key_space, recoding.length)
                source.hold()
                self._recoder.end(recoding)
                self._moves.start(
                    entry, source, extent, recoding.reason, checksum=recoding.checksum, rung=recoding.rung, recoded=recoding.recoded
                )
                source.unhold()
            elif relocates and self._regions.open is None:
                self._recoder.give_up(recoding)  # `_relocate` knows what to do without room
            elif not relocates:
                # It had room when it was sent to be stepped down. To wait for the next would keep others from being demoted meanwhile.
                self._recoder.drop(recoding)
                if entry.listed and entry.readable_host:
                    stock.want_demotion(entry)
                else:
                    self._durable.settle(entry, durable=False)

    def _write(self, entry: Entry, source: Copy, reason: CopyReason) -> None:
        """To the open region, which has room for it; stepped down first where the rules say so. Never what a lease may have to read from
        the new copy: its reader was told of other bytes."""
        stock, policy = self._stock, self._stock.step_down
        rung = None
        if policy is not None and self._stop is None and not (reason is CopyReason.RELOCATE and entry.leases):
            rung = policy.rung_for(entry, source, stock.now)
        if rung is not None:
            self._recoder.start(entry, source, rung, reason)
        else:
            self._moves.start(entry, source, self._record_room(entry.key_space, source.length), reason)

    def _demoted(self, entry: Entry, length: int) -> None:
        self._durable.settle(entry, durable=True)
        if self._stop is not None:
            self.kept.append(length)

    @property
    def _may_demote_more(self) -> bool:
        return len(self._moves.under_way) + self._recoder.demotions < self._most_moves

    @property
    def _most_moves(self) -> int:
        return self._config.max_moves if self._stop is None else _MOVES_OF_A_STOP * self._config.max_moves

    def _demote_coldest(self) -> None:
        """on_eviction: keeps a sixteenth of the host tier, or the largest payload, free or free for the taking."""
        stock, candidates = self._stock, self._stock.candidates.undemoted_cold
        assert candidates is not None
        margin = min(max(stock.arena.capacity // 16, stock.largest_payload), stock.arena.capacity // 2)
        while self._may_demote_more:
            leaving = stock.twin_bytes + self._moves.demoting_bytes + self._recoder.demoting_bytes
            if stock.arena.used - leaving <= stock.arena.capacity - margin:
                return
            entry = candidates.take()
            if entry is None:
                return
            if not self._worth_demoting(entry):
                continue
            if not self._has_room(entry.key_space, entry.length, last_resort=False):
                stock.offer(entry)
                return
            stock.undemoted.pop(entry, None)
            self._write(entry, entry, CopyReason.DEMOTE)

    def _worth_demoting(self, entry: Entry) -> bool:
        return (
            entry.listed
            and entry.readable_host
            and entry.ssd is None
            and entry.move is None
            and self._stock.admission.demotes(entry)
            and self._regions.fits_a_region(entry.key_space, entry.length)
            and not self._stock.quota.missing(entry.key_space.namespace, entry.length)
        )

    def _has_room(self, key_space: KeySpace, length: int, *, last_resort: bool) -> bool:
        """For a record in the open region. If not, does the next step towards it: fill, open, reclaim. The last free region, also when it
        is the open one, is for relocations alone: they end in a free region more."""
        regions = self._regions
        if regions.has_room(key_space, length):
            if last_resort or regions.free_regions:
                return True
        else:
            regions.fill()
            opening = regions.choose_to_open(last_resort=last_resort)
            if opening is not None:
                self._writer.open(opening)
        if not last_resort and self._emptying is None and (regions.open is None or not regions.free_regions):
            self._reclaim()
        return False

    def _record_room(self, key_space: KeySpace, length: int) -> Extent:
        return self._regions.allocate(key_space, length, generation=self._stock.next_ssd_generation())

    def _reclaim(self) -> None:
        """Chooses a region to empty, after evicting enough of the coldest that emptying one gains room."""
        regions, share = self._regions, self._config.min_dead_share
        if regions.reclaim_under_way:
            return
        self._emptying = regions.choose_victim(min_dead_share=share)
        left = _EVICTIONS_PER_PUMP
        while self._emptying is None and left > 0:
            for _ in range(1 + regions.sealed_regions // 64):
                left = left - 1 if self._room.evict_from_ssd() else 0
            self._emptying = regions.choose_victim(min_dead_share=share)

    def _relocate(self, region: Region) -> None:
        """Moves what lives out of the region. Leases do not hinder it: they are served from the new copy, and reads under way hold the
        old one."""
        for copy, entry in list(region.live.items()):
            if len(self._moves.under_way) + self._recoder.relocations >= self._config.max_moves:
                return
            if entry.move is not None:
                continue
            if self._has_room(entry.key_space, copy.length, last_resort=True):
                self._write(entry, copy, CopyReason.RELOCATE)
            elif self._regions.open is None:
                if copy.holds == 0 and entry.leases == 0 and not self._stock.pins.is_hard(entry):
                    self._stock.evict(entry, Tier.SSD, "no_room_to_relocate")
            else:
                return
