"""Room: what a new copy takes in a tier, and who gives it. Spare room costs no block its last copy here; other room costs the coldest
theirs.
"""

from __future__ import annotations

from kvstore.core.candidates import is_in_host_alone, is_loose, suffixes_first
from kvstore.core.extent import Extent, Tier
from kvstore.core.manifest import HEADER_BYTES
from kvstore.core.region import record_bytes
from kvstore.core.stock import Stock
from kvstore.core.store_config import WritePolicy
from kvstore.ids import Namespace

_SPARE_BELOW = 0.85
"""Share of the slowest tier that may live before copies that nobody asked for are refused."""


class Room:
    """Of an extent that is given out the caller makes a copy at once (`Stock.take_room`). Cost: O(log n) an eviction, but for those out of
    order."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._evict = stock.evict
        self._arena = stock.arena
        self._gpu_arena = stock.gpu_arena
        self._candidates = stock.candidates
        self._twins = stock.candidates.twins

    def spare_in_host(self, length: int, namespace: Namespace) -> Extent | None:
        """Room in the host tier, for that namespace, that costs no block its last copy."""
        extent = self._arena.allocate(length)
        while extent is None:
            victim = self._twins.take(asking=namespace, size=length)
            if victim is None:
                return None
            self._evict(victim, Tier.HOST, "on_ssd_too" if victim.readable_ssd else "on_gpu_too")
            extent = self._arena.allocate(length)
        return extent

    def of_last_in_host(self, length: int, namespace: Namespace) -> Extent | None:
        """Room in the host tier, after `spare_in_host` gave none: from last copies, suffixes first, and if even that fails from any last
        copy that nobody leases or reads: progress goes before order. Soft pins are broken when all that gave nothing."""
        extent = None
        while extent is None and self._stock.config.has_host and self._evict_last(Tier.HOST, length, namespace):
            extent = self._arena.allocate(length)
        return extent

    def spare_on_gpu(self, length: int) -> Extent | None:
        """Room in the GPU tier that costs no block its last copy."""
        extent = self._gpu_arena.allocate(length)
        while extent is None:
            victim = self._candidates.gpu_twins.take()
            if victim is None:
                return None
            self._evict(victim, Tier.GPU, "elsewhere_too")
            extent = self._gpu_arena.allocate(length)
        return extent

    def on_gpu(self, length: int, namespace: Namespace) -> Extent | None:
        """Room in the GPU tier, spare or from last copies as in the host tier."""
        extent = self.spare_on_gpu(length)
        while extent is None and self._evict_last(Tier.GPU, length, namespace):
            extent = self._gpu_arena.allocate(length)
        return extent

    def _evict_last(self, tier: Tier, length: int, namespace: Namespace) -> bool:
        candidates = self._candidates
        if tier is Tier.GPU:
            last, soft = candidates.last_gpu_copies, candidates.soft_gpu_copies
        else:
            last, soft = candidates.last_host_copies, candidates.soft_host_copies
        if (victim := last.take(asking=namespace, size=length)) is not None:
            self._evict(victim, tier, "room")
        elif not self._evict_out_of_order(tier, length):
            if (victim := soft.take(asking=namespace, size=length)) is None:
                return False
            self._evict(victim, tier, "room_of_soft_pin")
        return True

    def _evict_out_of_order(self, tier: Tier, length: int) -> bool:
        """Heads whose children are leased, or in another tier only, are no candidates of the queues. Frees a few lengths at once, for the
        scan is O(blocks); when it fails it is not tried again before something has become loose."""
        index, pins, none_loose = self._stock.index, self._stock.pins, self._candidates.none_loose
        if tier in none_loose:
            return False
        freed = 0
        for entry in suffixes_first([entry for entry in index if is_loose(entry, tier) and entry not in pins], index):
            copy = entry.copy_in(tier)
            freed += 0 if copy is None else copy.length
            self._evict(entry, tier, "room_out_of_order")
            if freed >= 4 * length:
                break
        if freed == 0:
            none_loose.add(tier)
        return freed > 0

    def evict_from_ssd(self) -> bool:
        """Forgets the coldest SSD copy that may go; False: there is none. on_eviction: its copy in the host tier goes too, if it may:
        as the coldest of both tiers it would be the next to be written to the SSD, and the next to go from there, for ever."""
        candidates = self._candidates
        reason, victim = "room", candidates.ssd_copies.take()
        if victim is None:
            reason, victim = "room_of_soft_pin", candidates.soft_ssd_copies.take()
        if victim is None:
            return False
        self._evict(victim, Tier.SSD, reason)
        if candidates.undemoted_cold is not None and is_in_host_alone(victim):
            self._evict(victim, Tier.HOST, reason)
        return True

    def evict_of_namespace(self, namespace: Namespace, wanted: int, *, at_most: int | None = None) -> None:
        """Makes the namespace give back `wanted` bytes: copies that it has twice first, then the coldest on SSD, then the coldest in the
        host tier, those with soft pins last; `at_most` so many copies."""
        candidates, quota = self._candidates, self._stock.quota
        queues = (
            (candidates.gpu_twins, Tier.GPU),
            (candidates.twins, Tier.HOST),
            (candidates.ssd_copies, Tier.SSD),
            (candidates.last_host_copies, Tier.HOST),
            (candidates.last_gpu_copies, Tier.GPU),
            (candidates.soft_ssd_copies, Tier.SSD),
            (candidates.soft_host_copies, Tier.HOST),
            (candidates.soft_gpu_copies, Tier.GPU),
        )
        goal = quota.used(namespace) - wanted
        while quota.used(namespace) > goal and at_most != 0:
            for queue, tier in queues:
                victim = queue.take_of(namespace)
                if victim is not None:
                    self._evict(victim, tier, "quota")
                    break
            else:
                return
            at_most = None if at_most is None else at_most - 1

    def is_to_spare(self, length: int) -> bool:
        """False when the block would push others off the slowest tier, sooner or later."""
        stock, ssd = self._stock, self._stock.config.ssd
        if stock.regions is None or ssd is None:
            return stock.config.has_host or self._gpu_arena.used + length <= _SPARE_BELOW * self._gpu_arena.capacity
        waiting = record_bytes(length)
        if stock.config.has_host and ssd.write_policy is not WritePolicy.ON_EVICTION:
            waiting += self._arena.used - stock.twin_bytes + len(stock.undemoted) * HEADER_BYTES  # whatever is here alone goes there too
        share = max(ssd.min_dead_share, 1 - _SPARE_BELOW)
        return stock.regions.has_room_to_spare(waiting, min_dead_share=share, largest=max(stock.largest_payload, length))
