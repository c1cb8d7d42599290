"""StoreState: one node's whole state, as a function of the events so far. Decides everything, does nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvstore.core.events import Event, Instruction
from kvstore.core.events.gets import AcquireRequested, ProbeRequested, ReadFinished, ReadRequested, ReleaseRequested, RenewRequested
from kvstore.core.events.moves import ExtentCopied, ExtentRecoded
from kvstore.core.events.puts import CommitRequested, ReservationsAbandoned, ReserveRequested
from kvstore.core.events.questions import AnswerDescribe, AnswerLocate, BlockPlace, DescribeRequested, ListRequested, LocateRequested
from kvstore.core.events.regions import RegionsRecovered, RegionWritten
from kvstore.core.events.removals import DeleteRequested, EvictRequested
from kvstore.core.events.stop import AnswerStop, StopReport, StopRequested
from kvstore.core.events.tick import Tick
from kvstore.core.events.verification import ExtentsVerified, VerifyRequested
from kvstore.core.events.wishes import PinRequested, QuotaRequested, UnpinRequested
from kvstore.core.eviction import EvictionPolicy
from kvstore.core.extent import Tier
from kvstore.core.gets import Gets
from kvstore.core.gpu_tiering import GpuTiering
from kvstore.core.heat import StripeHeat
from kvstore.core.index import Entry
from kvstore.core.listing import list_step, owned_block
from kvstore.core.pins import PinnedBlock
from kvstore.core.puts import Puts
from kvstore.core.removals import Removals
from kvstore.core.room import Room
from kvstore.core.scrubs import Scrubs
from kvstore.core.staging import Staging
from kvstore.core.stock import Stock
from kvstore.core.store_config import StoreConfig
from kvstore.core.tiering import Tiering
from kvstore.core.wishes import Wishes
from kvstore.ids import BlockHash, BootId, KeySpace
from kvstore.units import Bytes, Nanos, milliseconds

_ENDS_PER_TICK = 1024
"""Blocks that a tick unlists because their time is over: some milliseconds. What is asked about does not wait for its turn."""


_PATIENCE_FOR_STAGING = milliseconds(500)
"""How long a reservation waits for room in staging, while puts there are on their way to a tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUsage:
    tier: Tier
    capacity: Bytes
    used: Bytes
    """Room taken by copies of any state; on SSD by those that count."""
    copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingUsage:
    capacity: Bytes
    used: Bytes
    """Room of puts that are in no tier yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    tiers: tuple[TierUsage, ...]
    """Of the configured tiers, fastest first."""
    staging: StagingUsage | None
    """None on a node with a host tier."""
    blocks: int
    leases: int
    reservations: int
    operations: int
    """I/O under way."""
    counters: Mapping[str, int]
    """Notes so far, by "kind:reason"."""


class StoreState:
    """Feed it every event, in order, from one thread; carry out what it says.

    Deterministic: the same configuration, boot id and events give the same instructions.
    """

    def __init__(self, config: StoreConfig, *, boot_id: BootId, day_offset: Nanos = Nanos(0), policy: EvictionPolicy | None = None) -> None:
        """`day_offset`: what `now` lacks to the time since 1970; the ends of blocks are kept by the time of day."""
        stock = Stock(config, boot_id=boot_id, day_offset=day_offset, policy=policy)
        room = Room(stock)
        self._stock = stock
        self.heat = StripeHeat()
        self._tiering = None
        if config.ssd is not None and stock.regions is not None:
            self._tiering = Tiering(stock, room, config.ssd, stock.regions, report=self.stop_report)
        self._gpu_tiering = None if config.gpu is None else GpuTiering(stock, room, config.gpu)
        self._staging = None if config.has_host else Staging(stock, self._tiering, self._gpu_tiering)
        self._puts = self._make_puts(stock, room)
        self._scrubs = Scrubs(stock)
        self._gets = Gets(stock, check_copy=self._scrubs.check, hit_on_ssd=self._hit_on_ssd, used=self._used)
        self._wishes = Wishes(stock, room)
        self._removals = Removals(stock, self._puts, None if self._tiering is None else self._tiering.erasures)

    def _make_puts(self, stock: Stock, room: Room) -> Puts:
        tiering, staging, ssd = self._tiering, self._staging, stock.config.ssd
        if staging is not None:
            return Puts(stock, room, room_is_coming=staging.is_busy, patience=_PATIENCE_FOR_STAGING, durability=None, staging=staging)
        if tiering is None or ssd is None:
            return Puts(stock, room, room_is_coming=lambda: False, patience=Nanos(0), durability=None, staging=None)
        return Puts(stock, room, room_is_coming=tiering.demotes_now, patience=ssd.patience, durability=tiering.durability, staging=None)

    def handle(self, event: Event, now: Nanos) -> list[Instruction]:
        """`now` never goes back."""
        stock = self._stock
        assert now >= stock.now
        stock.now = now
        self._dispatch(event, now)
        if self._staging is not None:
            self._staging.pump(now)
        if self._tiering is not None:
            self._tiering.pump(now)
        self._puts.go_on(now)
        if self._gpu_tiering is not None:
            self._gpu_tiering.pump()
        out, stock.out = stock.out, []
        return out

    def _dispatch(self, event: Event, now: Nanos) -> None:
        match event:
            case ReserveRequested():
                self._puts.reserve(event, now)
            case CommitRequested():
                self._puts.commit(event, now)
            case ExtentsVerified():
                self._stock.verifications.finish(event.operation, event.outcomes)
            case AcquireRequested():
                self._gets.acquire(event, now)
            case ReadRequested():
                self._gets.read(event, now)
            case ReadFinished():
                self._stock.reads.finish(event.operation, event.outcomes)
            case ReleaseRequested():
                self._gets.release(event, now)
            case RenewRequested():
                self._gets.renew(event, now)
            case ProbeRequested():
                self._gets.probe(event)
            case ExtentCopied():
                self._stock.moves.finish(event.operation, event.outcome)
            case ExtentRecoded():
                self._stock.recodings.finish(event.operation, event)
            case RegionWritten():
                self._stock.region_writes.finish(event.operation, event.ok)
            case ReservationsAbandoned():
                self._puts.abandon(event)
            case DeleteRequested():
                self._removals.delete(event)
            case EvictRequested():
                self._removals.evict(event)
            case PinRequested():
                self._wishes.pin(event)
            case UnpinRequested():
                self._wishes.unpin(event)
            case QuotaRequested():
                self._wishes.quota(event)
            case VerifyRequested():
                self._scrubs.verify(event)
            case LocateRequested():
                self._locate(event)
            case DescribeRequested():
                self._describe(event)
            case ListRequested():
                self._stock.say(list_step(self._stock, event))
            case RegionsRecovered():
                assert self._tiering is not None
                self._tiering.recover(event)
            case Tick():
                self._stock.end_due_blocks(at_most=_ENDS_PER_TICK)
                self._wishes.sweep()
                self._puts.sweep(now)
                self._gets.sweep(now)
            case StopRequested():
                self._puts.stopping = True
                if self._tiering is None:
                    self._stock.say(AnswerStop(request_id=event.request_id, report=self.stop_report()))
                else:
                    self._tiering.stop(event.request_id, within=event.within)

    def pins(self) -> tuple[PinnedBlock, ...]:
        """Cost: O(pins)."""
        return tuple(PinnedBlock(entry.key_space, entry.hash, pin.kind, pin.expires_at) for entry, pin in self._stock.pins)

    def restore_pins(self, pins: Iterable[PinnedBlock], now: Nanos) -> None:
        """Of a restart, after RegionsRecovered. Those that are over, or whose block was not found again, are dropped."""
        self._wishes.restore(pins, today=Nanos(now + self._stock.day_offset))

    def stop_report(self) -> StopReport:
        """How far the stop has come. Cost: O(blocks)."""
        kept = self._tiering.kept if self._tiering is not None else []
        left = [entry.best.length for entry in self._stock.index if not entry.readable_ssd]
        return StopReport(len(kept), Bytes(sum(kept)), len(left), Bytes(sum(left)))

    def status(self) -> StoreStatus:
        """Cost: O(counters)."""
        stock = self._stock
        arenas = [stock.gpu_arena] if stock.config.gpu is not None else []
        arenas += [stock.arena] if stock.config.has_host else []
        tiers = [
            TierUsage(tier=arena.tier, capacity=Bytes(arena.capacity), used=Bytes(arena.used), copies=stock.copies[arena.tier])
            for arena in arenas
        ]
        if stock.regions is not None:
            capacity = Bytes(len(stock.regions) * stock.regions.region_bytes)
            tiers.append(TierUsage(tier=Tier.SSD, capacity=capacity, used=Bytes(stock.regions.live_bytes), copies=stock.copies[Tier.SSD]))
        operations = (stock.verifications, stock.reads, stock.moves, stock.recodings, stock.region_writes)
        return StoreStatus(
            tiers=tuple(tiers),
            staging=None if stock.config.has_host else StagingUsage(capacity=Bytes(stock.arena.capacity), used=Bytes(stock.arena.used)),
            blocks=len(stock.index),
            leases=len(stock.leases),
            reservations=len(stock.reservations),
            operations=sum(len(kind) for kind in operations),
            counters={f"{kind}:{reason}": count for (kind, reason), count in stock.counters.items()},
        )

    def holds(self, key_space: KeySpace, block: BlockHash) -> bool:
        """Whether the block is readable here after the last event. Cost: O(1)."""
        return self._stock.index.get(key_space, block) is not None

    def _used(self, entries: list[Entry]) -> None:
        self.heat.used(entries)
        if self._gpu_tiering is not None:
            self._gpu_tiering.used(entries)

    def _hit_on_ssd(self, entry: Entry) -> None:
        if self._tiering is not None:
            self._tiering.hit(entry)

    def _locate(self, event: LocateRequested) -> None:
        places = []
        self._stock.end_due_among(event.key_space, event.hashes)
        for block in event.hashes:
            entry = self._stock.index.get(event.key_space, block)
            places.append(BlockPlace((), 0) if entry is None else BlockPlace(entry.placed, entry.leases))
        self._stock.say(AnswerLocate(request_id=event.request_id, places=tuple(places)))

    def _describe(self, event: DescribeRequested) -> None:
        self._stock.end_due_among(event.key_space, event.hashes)
        entries = self._stock.index.entries(event.key_space)
        found = [entries.get(block) for block in event.hashes]
        blocks = tuple(None if entry is None else owned_block(self._stock, entry) for entry in found)
        self._stock.say(AnswerDescribe(request_id=event.request_id, blocks=blocks))
