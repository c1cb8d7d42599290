"""Stock: everything a node has on its shelves, and the elementary moves that keep its parts in step.

Index, arena, regions, leases, quota and the candidates of eviction each know one thing; here a copy becomes listed, loses a hold, or gives
its room back in all of them at once. Nothing else changes them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from kvstore.core.admission import Admission
from kvstore.core.arena import Arena
from kvstore.core.candidates import Candidates
from kvstore.core.copies import Copy, CopyEvent, CopyState, copy_at
from kvstore.core.events import Instruction
from kvstore.core.events.gets import ReadOutcome
from kvstore.core.events.moves import CopyOutcome, ExtentRecoded
from kvstore.core.events.notes import Note, NoteKind
from kvstore.core.events.verification import VerifyOutcome
from kvstore.core.eviction import EvictionPolicy
from kvstore.core.expiry import ExpiryTable
from kvstore.core.extent import Extent, Tier
from kvstore.core.fairness import TierShares
from kvstore.core.index import Entry, Index
from kvstore.core.lease import LeaseTable
from kvstore.core.operations import OperationIds, Operations
from kvstore.core.pins import PinTable
from kvstore.core.policies import make_policy
from kvstore.core.quota import QuotaLedger
from kvstore.core.region import RegionTable
from kvstore.core.reservation import ReservationTable
from kvstore.core.step_down import StepDownPolicy
from kvstore.core.store_config import StoreConfig, WritePolicy
from kvstore.ids import AS_SEALED, BlockHash, BootId, Generation, KeySpace, RungCode
from kvstore.units import Nanos

_READABLE = CopyState.READABLE
_ENDING = (CopyState.RECLAIMING, CopyState.QUARANTINED)


class Stock:
    def __init__(self, config: StoreConfig, *, boot_id: BootId, day_offset: Nanos, policy: EvictionPolicy | None = None) -> None:
        self.config = config
        self.day_offset = day_offset
        first = first_identity(boot_id)
        self.index = Index()
        self.arena = Arena(tier=Tier.HOST, capacity=config.arena_capacity)
        """The host tier; on a node without one staging: reservations alone have room there."""
        self.gpu_arena = Arena(tier=Tier.GPU, capacity=0 if config.gpu is None else config.gpu.capacity)
        self.regions: RegionTable | None = None
        if config.ssd is not None:
            self.regions = RegionTable(count=config.ssd.regions, region_bytes=config.ssd.region_bytes, nonce_seed=b"larder.nonce" + boot_id)
        self.leases = LeaseTable(config.lease, first_id=first)
        self.reservations = ReservationTable(timeout=config.reservation_timeout, first_token=first)
        self.quota = QuotaLedger(config.quotas)
        self.admission = Admission(config.admission)
        self.expiries = ExpiryTable()
        self.policy = policy if policy is not None else make_policy(config.policy)
        self.pins = PinTable()
        self._shares = {tier: TierShares(config.weights) for tier in Tier}
        on_eviction = config.ssd is not None and config.ssd.write_policy is WritePolicy.ON_EVICTION
        self.candidates = Candidates(self.policy, self.pins, self._shares, demotes_coldest=on_eviction)
        self.offer = self.candidates.offer
        """Asked for every block that comes or loses a lease, so without a step between."""
        self.twin_bytes = 0
        """Of host copies that are on SSD too: room that costs no block its last copy."""
        self.largest_payload = 0
        """That was ever asked to be put."""
        ids = OperationIds(first=first)
        self.verifications: Operations[tuple[VerifyOutcome, ...]] = Operations(ids)
        self.reads: Operations[tuple[ReadOutcome, ...]] = Operations(ids)
        self.moves: Operations[CopyOutcome] = Operations(ids)
        self.recodings: Operations[ExtentRecoded] = Operations(ids)
        self.region_writes: Operations[bool] = Operations(ids)
        self.step_down: StepDownPolicy | None = None
        if config.ssd is not None and config.ssd.step_down:
            self.step_down = StepDownPolicy(config.ssd.step_down, self.index)
        self.undemoted: OrderedDict[Entry, None] = OrderedDict()  # a plain dict is slow to lose its first item many times
        """Host copies without one on SSD, in the order they came: parents before children."""
        self.doomed_moves: set[int] = set()
        """Moves whose block was unlisted meanwhile."""
        self.copies: Counter[Tier] = Counter()
        """Listed and unfreed copies by tier."""
        self.counters: Counter[tuple[str, str]] = Counter()
        """Notes so far, by kind and reason."""
        self.spoiled: list[tuple[KeySpace, BlockHash]] = []
        """Keys whose bad record on SSD is still to be erased, so that no restart lists it again."""
        self.last_ssd_generation = 0
        self.now = Nanos(0)
        """Of the event being handled."""
        self.out: list[Instruction] = []

    # --- saying -------------------------------------------------------------------------------------------------------------------------

    def say(self, instruction: Instruction) -> None:
        self.out.append(instruction)

    def note(self, kind: NoteKind, reason: str, entry: Entry | None = None, tier: Tier | None = None, payload_bytes: int = 0) -> None:
        self.counters[kind, reason] += 1
        if entry is None:
            self.say(Note(kind, reason, tier, payload_bytes))
        else:
            copy = (None if tier is None else entry.copy_in(tier)) or entry.best
            self.say(Note(kind, reason, tier, copy.length, entry.key_space, entry.block))

    # --- listing ------------------------------------------------------------------------------------------------------------------------

    def list_entry(self, entry: Entry) -> None:
        """The entry has its first READABLE copy."""
        self.index.add(entry)
        if entry.expires_at:
            self.expiries.watch(entry)
        self.policy.listed(entry)
        if self.step_down is not None:
            self.step_down.listed(entry, self.now)
        self.offer(entry)

    def list_instead(self, recoded: Entry, entry: Entry) -> None:
        """The same block as sealed, with its first READABLE copy. It lives as long as either would have, and has the pin and the uses of
        the other; whoever leases that one reads on what he was told of."""
        entry.expires_at = max(recoded.expires_at, entry.expires_at) if recoded.expires_at and entry.expires_at else 0
        entry.uses = recoded.uses
        pin = self.pins.get(recoded)
        self.unlist(recoded)
        self.list_entry(entry)
        if pin is not None:
            self.pins.pin(entry, pin)

    def count_use(self, entries: Sequence[Entry]) -> None:
        """The entries, one at least, in chain order, were leased or put again just now."""
        self.policy.used(entries)
        if self.step_down is not None:
            self.step_down.used(entries[0], self.now)

    def put_again(self, entry: Entry, *, ttl: Nanos) -> None:
        """Somebody wanted to put the block, so somebody computed it: a use. It lives as long as the longest of its puts asked for; records
        on the SSD keep the end that they were written with."""
        if entry.expires_at:
            entry.expires_at = max(entry.expires_at, self.today + ttl) if ttl else 0
        self.count_use((entry,))
        self.offer(entry)

    def unlist(self, entry: Entry, *, evicted: bool = False) -> None:
        """Nobody finds the block from now on. Its copies stay for leases and holds, then give their room back."""
        childless = self.index.remove(entry)
        if entry.expires_at:
            self.expiries.forget(entry)
        self.policy.unlisted(entry, evicted=evicted)
        self.pins.unpin(entry)
        if entry.move is not None:
            self.doomed_moves.add(entry.move)
        for copy in (entry.gpu, entry.host, entry.ssd):
            if copy is not None and copy.state is _READABLE:
                self._leave_readable(entry, copy, CopyEvent.UNLISTED)
        self.free_if_loose(entry)
        if childless is not None:
            self.offer(childless)

    def add_copy(self, entry: Entry, copy: Copy) -> None:
        """The copy is READABLE and the entry's one in its tier."""
        assert copy.state is _READABLE
        if copy.tier is Tier.HOST:
            entry.settle(copy)
            if entry.readable_ssd:
                self.twin_bytes += copy.length
            else:
                self.want_demotion(entry)
            return
        entry.settle(copy)
        if copy.tier is Tier.SSD:
            assert self.regions is not None
            if entry.readable_host:
                self.twin_bytes += entry.length
            self.regions.add_live(copy, entry)
            self.undemoted.pop(entry, None)

    def want_demotion(self, entry: Entry) -> None:
        """The block is in the host tier alone: the next to be written to the SSD, after those that wait already."""
        if self.regions is not None:
            self.undemoted.setdefault(entry)

    def replace_ssd_copy(self, entry: Entry, copy: Copy) -> Copy:
        """The block has been moved on the SSD: the new copy serves from now on; gives the old one, RECLAIMING."""
        old = entry.ssd
        assert old is not None
        entry.drop(old)
        self._leave_readable(entry, old, CopyEvent.UNLISTED)
        self.add_copy(entry, copy)
        return old

    def quarantine(self, entry: Entry, copy: Copy, reason: str) -> None:
        """The copy was found bad. The block is unlisted if that was its last readable one."""
        if copy.state is _READABLE:
            self._leave_readable(entry, copy, CopyEvent.FOUND_BAD)
        elif copy.state is CopyState.RECLAIMING:
            copy.on(CopyEvent.FOUND_BAD)
        else:
            return
        self.note(NoteKind.QUARANTINED, reason, entry, copy.tier)
        if copy.tier is Tier.SSD:
            self.spoiled.append((entry.key_space, entry.hash))
        if entry.listed and not entry.readable:
            self.unlist(entry)
        elif entry.listed and entry.readable_host and not entry.readable_ssd:
            self.want_demotion(entry)
        self.free_if_loose(entry)
        self.offer(entry)

    def _leave_readable(self, entry: Entry, copy: Copy, event: CopyEvent) -> None:
        copy.on(event)
        if (copy.tier is Tier.HOST and entry.readable_ssd) or (copy.tier is Tier.SSD and entry.readable_host):
            self.twin_bytes -= entry.length
        if copy.tier is Tier.SSD:
            assert self.regions is not None
            self.regions.remove_live(copy)
        elif copy.tier is Tier.HOST:
            self.undemoted.pop(entry, None)

    # --- the end of a block ---------------------------------------------------------------------------------------------------------------

    @property
    def today(self) -> Nanos:
        """The time of day of the event being handled, since 1970."""
        return Nanos(self.now + self.day_offset)

    def end_due_blocks(self, *, at_most: int) -> None:
        """Unlists blocks whose end has come. Leases that they have last as long as they were promised."""
        while at_most > 0 and (entry := self.expiries.take_due(self.today)) is not None:
            self._end(entry)
            at_most -= 1

    def end_due_among(self, key_space: KeySpace, blocks: Iterable[BlockHash]) -> None:
        """The same for blocks that are asked about: what is over is a miss, also while the sweep is behind."""
        if self.expiries.is_behind(self.today):
            for block in blocks:
                entry = self.index.get(key_space, block)
                if entry is not None and 0 < entry.expires_at <= self.today:
                    self._end(entry)

    def ttl_left(self, entry: Entry) -> Nanos:
        """0: it has no end."""
        return Nanos(max(1, entry.expires_at - self.today) if entry.expires_at else 0)

    def _end(self, entry: Entry) -> None:
        self.note(NoteKind.EXPIRED, "ttl", entry)
        self.unlist(entry)

    # --- holds, leases, extents ---------------------------------------------------------------------------------------------------------

    def unhold(self, entry: Entry, copy: Copy) -> None:
        copy.unhold()
        if copy is entry.copy_in(copy.tier):
            self.free_if_loose(entry)
            self.offer(entry)
        elif copy.holds == 0:
            self._free_after_life(entry, copy)

    def unleased(self, entries: Iterable[Entry]) -> None:
        """No lease covers these any more."""
        for entry in entries:
            if entry.listed:
                self.offer(entry)
            self.free_if_loose(entry)

    def free_if_loose(self, entry: Entry) -> None:
        """Gives back the room of the entry's unreadable copies that nobody leases or holds."""
        if entry.leases:
            return
        if entry.ssd is None and entry.gpu is None and entry.state is _READABLE:
            return  # nearly always
        for copy in (entry.host, entry.ssd, entry.gpu):
            if copy is not None and copy.state in _ENDING and copy.holds == 0:
                entry.drop(copy)
                self._free_after_life(entry, copy)

    def _free_after_life(self, entry: Entry, copy: Copy) -> None:
        copy.on(CopyEvent.LAST_HOLD_GONE)
        self.give_back(entry.key_space, copy)

    def take_room(self, key_space: KeySpace, extent: Extent, state: CopyState, *, checksum: int = 0, rung: RungCode = AS_SEALED) -> Copy:
        """A copy in room that was just allocated; of bytes that are still to come it knows the checksum later (`Copy.stamp`)."""
        namespace, (tier, _, _, length, _) = key_space.namespace, extent
        self.quota.charge(namespace, length)
        self._shares[tier].charge(namespace, length)
        self.copies[tier] += 1
        return copy_at(extent, state, checksum=checksum, rung=rung)

    def give_back(self, key_space: KeySpace, copy: Copy, *, charged: bool = True) -> None:
        """The copy, FREE now, returns its room. `charged`: its namespace pays for it still."""
        assert copy.state is CopyState.FREE
        tier, _, offset, length, _ = copy.extent
        if charged:
            self.quota.refund(key_space.namespace, length)
        self._shares[tier].charge(key_space.namespace, -length)
        self.copies[tier] -= 1
        if tier is Tier.HOST:
            self.arena.free(offset=offset, length=length)
        elif tier is Tier.GPU:
            self.gpu_arena.free(offset=offset, length=length)
        else:
            assert self.regions is not None
            self.regions.freed(copy.region)

    def next_ssd_generation(self) -> Generation:
        self.last_ssd_generation += 1
        return Generation(self.last_ssd_generation)

    # --- eviction -----------------------------------------------------------------------------------------------------------------------

    def evict(self, entry: Entry, tier: Tier, reason: str) -> None:
        """Forgets one loose READABLE copy; the block too if it was the last."""
        copy = entry.copy_in(tier)
        assert copy is not None
        assert entry.leases == 0
        assert copy.holds == 0
        self.note(NoteKind.EVICTED, reason, entry, tier)
        if not entry.readable_beside(tier):
            self.unlist(entry, evicted=True)
        else:
            self._leave_readable(entry, copy, CopyEvent.UNLISTED)
            self.free_if_loose(entry)
            self.offer(entry)
        if entry.queued:
            for queue in self.candidates.queues[tier]:
                queue.discard(entry)

    def end_expired_leases(self, now: Nanos) -> None:
        ended, entries = self.leases.expire(now)
        for _ in range(ended):
            self.note(NoteKind.LEASE_EXPIRED, "time")
        self.unleased(entries)


def first_identity(boot_id: BootId) -> int:
    """Start of the lease ids, write tokens and operation ids of this boot, so that one of an earlier boot matches nothing. 40 bits of the
    boot id above 24 bits of room to the next boot's start; never 0, below 2^63."""
    return (int.from_bytes(boot_id[:5], "little") >> 1 << 24) + 1
