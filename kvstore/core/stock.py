"""Stock: everything a node has on its shelves, and the elementary moves that keep its parts in step.

Index, arena, regions, leases, quota and eviction queues each know one thing; here a copy becomes listed, loses a hold, or gives its room
back in all of them at once. Nothing else changes them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from kvstore.core.admission import Admission
from kvstore.core.arena import Arena
from kvstore.core.copies import Copy, CopyEvent, CopyState, copy_at
from kvstore.core.events import Instruction
from kvstore.core.events.gets import ReadOutcome
from kvstore.core.events.moves import CopyOutcome, ExtentRecoded
from kvstore.core.events.notes import Note, NoteKind
from kvstore.core.events.verification import VerifyOutcome
from kvstore.core.eviction import EvictionPolicy
from kvstore.core.expiry import ExpiryTable
from kvstore.core.extent import Extent, Tier
from kvstore.core.fairness import FairQueue, TierShares
from kvstore.core.index import Entry, Index
from kvstore.core.lease import LeaseTable
from kvstore.core.manifest import HEADER_BYTES
from kvstore.core.operations import OperationIds, Operations
from kvstore.core.pins import PinTable
from kvstore.core.policies import make_policy
from kvstore.core.quota import QuotaLedger
from kvstore.core.region import RegionTable, record_bytes
from kvstore.core.reservation import ReservationTable
from kvstore.core.step_down import StepDownPolicy
from kvstore.core.store_config import StoreConfig, WritePolicy
from kvstore.ids import AS_SEALED, BlockHash, BootId, Generation, KeySpace, Namespace, RungCode
from kvstore.units import Nanos

_READABLE = CopyState.READABLE
_ENDING = (CopyState.RECLAIMING, CopyState.QUARANTINED)
_SPARE_BELOW = 0.85
"""Share of the slowest tier that may live before copies that nobody asked for are refused."""


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
        self.pins = pins = PinTable()
        self._shares = {tier: TierShares(config.weights) for tier in Tier}

        def queue(tier: Tier, may_go: Callable[[Entry], bool]) -> FairQueue:
            return FairQueue(self.policy.queue(may_go), self._shares[tier])

        self._twins = queue(Tier.HOST, _is_spare_twin)
        self._last_host_copies = queue(Tier.HOST, lambda entry: _is_last_and_loose(entry) and entry not in pins)
        self._ssd_copies = queue(Tier.SSD, lambda entry: _is_loose_on_ssd(entry) and entry not in pins)
        self._soft_host_copies = queue(Tier.HOST, lambda entry: _is_last_and_loose(entry) and not pins.is_hard(entry))
        self._soft_ssd_copies = queue(Tier.SSD, lambda entry: _is_loose_on_ssd(entry) and not pins.is_hard(entry))
        self._undemoted_cold: FairQueue | None = None
        if config.ssd is not None and config.ssd.write_policy is WritePolicy.ON_EVICTION:
            self._undemoted_cold = queue(Tier.HOST, _is_in_host_alone)
        self._gpu_twins = queue(Tier.GPU, _is_spare_on_gpu)
        self._last_gpu_copies = queue(Tier.GPU, lambda entry: _is_last_on_gpu(entry) and entry not in pins)
        self._soft_gpu_copies = queue(Tier.GPU, lambda entry: _is_last_on_gpu(entry) and not pins.is_hard(entry))
        in_host = (self._twins, self._last_host_copies, self._soft_host_copies)
        self._queues = {
            Tier.GPU: (self._gpu_twins, self._last_gpu_copies, self._soft_gpu_copies),
            Tier.HOST: in_host if self._undemoted_cold is None else (*in_host, self._undemoted_cold),
            Tier.SSD: (self._ssd_copies, self._soft_ssd_copies),
        }
        self.twin_bytes = 0
        """Of host copies that are on SSD too: room that costs no block its last copy."""
        self.largest_payload = 0
        """That was ever asked to be put."""
        self._scan_would_fail: set[Tier] = set()
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

    # --- holds, leases, room ------------------------------------------------------------------------------------------------------------

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

    def offer(self, entry: Entry) -> None:
        """Puts the entry into each eviction queue that it may leave from now."""
        if not entry.listed or entry.leases:
            return
        if self._scan_would_fail:
            self._scan_would_fail.clear()
        host, ssd = entry.host, entry.ssd
        on_ssd = ssd is not None and ssd.state is _READABLE
        if entry.gpu is not None:
            self._offer_on_gpu(entry, entry.gpu)
        if host is not None and host.state is _READABLE and host.holds == 0:
            if on_ssd or entry.readable_gpu:
                self._twins.offer(entry)
            else:
                if self._undemoted_cold is not None:
                    self._undemoted_cold.offer(entry)
                if entry.children == 0:
                    (self._soft_host_copies if entry in self.pins else self._last_host_copies).offer(entry)
        if ssd is not None and on_ssd and ssd.holds == 0 and entry.children == 0:
            (self._soft_ssd_copies if entry in self.pins else self._ssd_copies).offer(entry)

    def _offer_on_gpu(self, entry: Entry, copy: Copy) -> None:
        if copy.state is _READABLE and copy.holds == 0:
            if entry.readable_beside(Tier.GPU):
                self._gpu_twins.offer(entry)
            elif entry.children == 0:
                (self._soft_gpu_copies if entry in self.pins else self._last_gpu_copies).offer(entry)

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
            for queue in self._queues[tier]:
                queue.discard(entry)

    def host_room_of_last_copies(self, length: int, namespace: Namespace) -> Extent | None:
        """Room in the host tier, after `spare_host_room` gave none: from last copies, suffixes first, and if even that fails from any last
        copy that nobody leases or reads: progress goes before order. Soft pins are broken when all that gave nothing."""
        extent = None
        while extent is None and self.config.has_host and self._evict_last(Tier.HOST, length, namespace):
            extent = self.arena.allocate(length)
        return extent

    def gpu_room(self, length: int, namespace: Namespace) -> Extent | None:
        """Room in the GPU tier, spare or from last copies likewise."""
        extent = self.spare_gpu_room(length)
        while extent is None and self._evict_last(Tier.GPU, length, namespace):
            extent = self.gpu_arena.allocate(length)
        return extent

    def _evict_last(self, tier: Tier, length: int, namespace: Namespace) -> bool:
        if tier is Tier.GPU:
            last, soft = self._last_gpu_copies, self._soft_gpu_copies
        else:
            last, soft = self._last_host_copies, self._soft_host_copies
        if (victim := last.take(asking=namespace, size=length)) is not None:
            self.evict(victim, tier, "room")
        elif not self._evict_out_of_order(tier, length):
            if (victim := soft.take(asking=namespace, size=length)) is None:
                return False
            self.evict(victim, tier, "room_of_soft_pin")
        return True

    def spare_host_room(self, length: int, namespace: Namespace) -> Extent | None:
        """Room in the host tier, for that namespace, that costs no block its last copy."""
        extent = self.arena.allocate(length)
        while extent is None:
            victim = self._twins.take(asking=namespace, size=length)
            if victim is None:
                return None
            self.evict(victim, Tier.HOST, "on_ssd_too" if victim.readable_ssd else "on_gpu_too")
            extent = self.arena.allocate(length)
        return extent

    def has_room_to_spare(self, length: int) -> bool:
        """False when the block would push others off the slowest tier, sooner or later."""
        ssd = self.config.ssd
        if self.regions is None or ssd is None:
            return self.config.has_host or self.gpu_arena.used + length <= _SPARE_BELOW * self.gpu_arena.capacity
        waiting = record_bytes(length)
        if self.config.has_host and ssd.write_policy is not WritePolicy.ON_EVICTION:
            waiting += self.arena.used - self.twin_bytes + len(self.undemoted) * HEADER_BYTES  # whatever is here alone goes there too
        share = max(ssd.min_dead_share, 1 - _SPARE_BELOW)
        return self.regions.has_room_to_spare(waiting, min_dead_share=share, largest=max(self.largest_payload, length))

    def _evict_out_of_order(self, tier: Tier, length: int) -> bool:
        """Heads whose children are leased, or in another tier only, are no candidates of the queues. Frees a few lengths at once, for the
        scan is O(blocks); when it fails it is not tried again before something has become loose."""
        if tier in self._scan_would_fail:
            return False
        freed = 0
        for entry in self.suffixes_first([entry for entry in self.index if is_loose(entry, tier) and entry not in self.pins]):
            copy = entry.copy_in(tier)
            freed += 0 if copy is None else copy.length
            self.evict(entry, tier, "room_out_of_order")
            if freed >= 4 * length:
                break
        if freed == 0:
            self._scan_would_fail.add(tier)
        return freed > 0

    def spare_gpu_room(self, length: int) -> Extent | None:
        """Room in the GPU tier that costs no block its last copy."""
        extent = self.gpu_arena.allocate(length)
        while extent is None:
            victim = self._gpu_twins.take()
            if victim is None:
                return None
            self.evict(victim, Tier.GPU, "elsewhere_too")
            extent = self.gpu_arena.allocate(length)
        return extent

    def coldest_on_gpu_alone(self) -> Entry | None:
        """Not offered again by this: the caller moves it, evicts it, or offers it."""
        return self._last_gpu_copies.take()

    def coldest_in_host_alone(self) -> Entry | None:
        """on_eviction: the next to be demoted, heads as well as tails, for nothing is lost; it is offered again when its move has ended."""
        return None if self._undemoted_cold is None else self._undemoted_cold.take()

    def evict_from_ssd(self) -> bool:
        """Forgets the coldest SSD copy that may go; False: there is none. on_eviction: its copy in the host tier goes too, if it may:
        as the coldest of both tiers it would be the next to be written to the SSD, and the next to go from there, for ever."""
        reason, victim = "room", self._ssd_copies.take()
        if victim is None:
            reason, victim = "room_of_soft_pin", self._soft_ssd_copies.take()
        if victim is None:
            return False
        self.evict(victim, Tier.SSD, reason)
        if self._undemoted_cold is not None and _is_in_host_alone(victim):
            self.evict(victim, Tier.HOST, reason)
        return True

    def evict_of_namespace(self, namespace: Namespace, wanted: int, *, at_most: int | None = None) -> None:
        """Makes the namespace give back `wanted` bytes: copies that it has twice first, then the coldest on SSD, then the coldest in the
        host tier, those with soft pins last; `at_most` so many copies. Cost: O(log n) each."""
        queues = (
            (self._gpu_twins, Tier.GPU),
            (self._twins, Tier.HOST),
            (self._ssd_copies, Tier.SSD),
            (self._last_host_copies, Tier.HOST),
            (self._last_gpu_copies, Tier.GPU),
            (self._soft_ssd_copies, Tier.SSD),
            (self._soft_host_copies, Tier.HOST),
            (self._soft_gpu_copies, Tier.GPU),
        )
        goal = self.quota.used(namespace) - wanted
        while self.quota.used(namespace) > goal and at_most != 0:
            for queue, tier in queues:
                victim = queue.take_of(namespace)
                if victim is not None:
                    self.evict(victim, tier, "quota")
                    break
            else:
                return
            at_most = None if at_most is None else at_most - 1

    def suffixes_first(self, entries: list[Entry]) -> Iterator[Entry]:
        """Coldest first, but none before its listed children, while the caller evicts what is given; then those whose children stay.
        Cost: O(log n) each."""
        waiting = dict.fromkeys(entries)
        ready = [(entry.last_used, entry) for entry in entries if entry.children == 0]
        heapify(ready)
        while ready:
            _, entry = heappop(ready)
            del waiting[entry]
            yield entry
            parent = self.index.get(entry.key_space, entry.parent)
            if parent is not None and parent.children == 0 and parent in waiting and not entry.listed:
                heappush(ready, (parent.last_used, parent))
        yield from sorted(waiting, key=lambda entry: (entry.last_used, -entry.index))

    def end_expired_leases(self, now: Nanos) -> None:
        ended, entries = self.leases.expire(now)
        for _ in range(ended):
            self.note(NoteKind.LEASE_EXPIRED, "time")
        self.unleased(entries)


def first_identity(boot_id: BootId) -> int:
    """Start of the lease ids, write tokens and operation ids of this boot, so that one of an earlier boot matches nothing. 40 bits of the
    boot id above 24 bits of room to the next boot's start; never 0, below 2^63."""
    return (int.from_bytes(boot_id[:5], "little") >> 1 << 24) + 1


def is_loose(entry: Entry, tier: Tier) -> bool:
    """Has a READABLE copy there that nobody leases or holds."""
    copy = entry.copy_in(tier)
    return copy is not None and copy.state is _READABLE and copy.holds == 0 and entry.leases == 0


def _is_spare_twin(entry: Entry) -> bool:
    return entry.listed and is_loose(entry, Tier.HOST) and (entry.readable_ssd or entry.readable_gpu)


def _is_last_and_loose(entry: Entry) -> bool:
    """Asked twice for every block that is evicted: no calls where its one copy is in the host tier."""
    return (
        entry.listed
        and entry.state is _READABLE
        and entry.children == 0
        and entry.leases == 0
        and entry.holds == 0
        and ((entry.ssd is None and entry.gpu is None) or not entry.readable_beside(Tier.HOST))
    )


def _is_in_host_alone(entry: Entry) -> bool:
    return entry.listed and is_loose(entry, Tier.HOST) and not entry.readable_ssd


def _is_loose_on_ssd(entry: Entry) -> bool:
    return entry.listed and is_loose(entry, Tier.SSD) and entry.children == 0


def _is_spare_on_gpu(entry: Entry) -> bool:
    return entry.listed and is_loose(entry, Tier.GPU) and entry.readable_beside(Tier.GPU)


def _is_last_on_gpu(entry: Entry) -> bool:
    return entry.listed and is_loose(entry, Tier.GPU) and entry.children == 0 and not entry.readable_beside(Tier.GPU)
