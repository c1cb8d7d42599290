"""Candidates: the copies that may be evicted, in a queue for each kind. Which may go at all is said here; which of those goes first, by the
policy and the shares of the namespaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush

from kvstore.core.copies import Copy, CopyState
from kvstore.core.eviction import EvictionPolicy
from kvstore.core.extent import Tier
from kvstore.core.fairness import FairQueue, TierShares
from kvstore.core.index import Entry, Index
from kvstore.core.pins import PinTable

_READABLE = CopyState.READABLE


class Candidates:
    """Nobody leases or holds any of them. Twins cost no block its last copy; other copies go only when no listed child needs them as its
    head. Of those the soft ones, of blocks with a soft pin, go when nothing else can, and those of blocks with a hard pin never."""

    def __init__(self, policy: EvictionPolicy, pins: PinTable, shares: Mapping[Tier, TierShares], *, demotes_coldest: bool) -> None:
        """`demotes_coldest`: whether what is in the host tier alone is written to the SSD by its coldness."""

        def queue(tier: Tier, may_go: Callable[[Entry], bool]) -> FairQueue:
            return FairQueue(policy.queue(may_go), shares[tier])

        self.pins = pins
        self.twins = queue(Tier.HOST, _is_spare_twin)
        self.last_host_copies = queue(Tier.HOST, lambda entry: _is_last_and_loose(entry) and entry not in pins)
        self.ssd_copies = queue(Tier.SSD, lambda entry: _is_loose_on_ssd(entry) and entry not in pins)
        self.soft_host_copies = queue(Tier.HOST, lambda entry: _is_last_and_loose(entry) and not pins.is_hard(entry))
        self.soft_ssd_copies = queue(Tier.SSD, lambda entry: _is_loose_on_ssd(entry) and not pins.is_hard(entry))
        self.undemoted_cold = queue(Tier.HOST, is_in_host_alone) if demotes_coldest else None
        """The next to be written to the SSD, heads as well as tails, for nothing is lost. Offered again when the move has ended."""
        self.gpu_twins = queue(Tier.GPU, _is_spare_on_gpu)
        self.last_gpu_copies = queue(Tier.GPU, lambda entry: _is_last_on_gpu(entry) and entry not in pins)
        self.soft_gpu_copies = queue(Tier.GPU, lambda entry: _is_last_on_gpu(entry) and not pins.is_hard(entry))
        in_host = (self.twins, self.last_host_copies, self.soft_host_copies)
        self.queues = {
            Tier.GPU: (self.gpu_twins, self.last_gpu_copies, self.soft_gpu_copies),
            Tier.HOST: in_host if self.undemoted_cold is None else (*in_host, self.undemoted_cold),
            Tier.SSD: (self.ssd_copies, self.soft_ssd_copies),
        }
        """All of them, by the tier of their copies."""
        self.none_loose: set[Tier] = set()
        """Tiers of which it is known that not even out of order can anything go, until something is offered."""

    def offer(self, entry: Entry) -> None:
        """Puts the entry into each queue that it may leave from now."""
        if not entry.listed or entry.leases:
            return
        if self.none_loose:
            self.none_loose.clear()
        host, ssd = entry.host, entry.ssd
        on_ssd = ssd is not None and ssd.state is _READABLE
        if entry.gpu is not None:
            self._offer_on_gpu(entry, entry.gpu)
        if host is not None and host.state is _READABLE and host.holds == 0:
            if on_ssd or entry.readable_gpu:
                self.twins.offer(entry)
            else:
                if self.undemoted_cold is not None:
                    self.undemoted_cold.offer(entry)
                if entry.children == 0:
                    (self.soft_host_copies if entry in self.pins else self.last_host_copies).offer(entry)
        if ssd is not None and on_ssd and ssd.holds == 0 and entry.children == 0:
            (self.soft_ssd_copies if entry in self.pins else self.ssd_copies).offer(entry)

    def _offer_on_gpu(self, entry: Entry, copy: Copy) -> None:
        if copy.state is _READABLE and copy.holds == 0:
            if entry.readable_beside(Tier.GPU):
                self.gpu_twins.offer(entry)
            elif entry.children == 0:
                (self.soft_gpu_copies if entry in self.pins else self.last_gpu_copies).offer(entry)


def suffixes_first(entries: list[Entry], index: Index) -> Iterator[Entry]:
    """Coldest first, but none before its listed children, while the caller evicts what is given; then those whose children stay.
    Cost: O(log n) each."""
    waiting = dict.fromkeys(entries)
    ready = [(entry.last_used, entry) for entry in entries if entry.children == 0]
    heapify(ready)
    while ready:
        _, entry = heappop(ready)
        del waiting[entry]
        yield entry
        parent = index.get(entry.key_space, entry.parent)
        if parent is not None and parent.children == 0 and parent in waiting and not entry.listed:
            heappush(ready, (parent.last_used, parent))
    yield from sorted(waiting, key=lambda entry: (entry.last_used, -entry.index))


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


def is_in_host_alone(entry: Entry) -> bool:
    return entry.listed and is_loose(entry, Tier.HOST) and not entry.readable_ssd


def _is_loose_on_ssd(entry: Entry) -> bool:
    return entry.listed and is_loose(entry, Tier.SSD) and entry.children == 0


def _is_spare_on_gpu(entry: Entry) -> bool:
    return entry.listed and is_loose(entry, Tier.GPU) and entry.readable_beside(Tier.GPU)


def _is_last_on_gpu(entry: Entry) -> bool:
    return entry.listed and is_loose(entry, Tier.GPU) and entry.children == 0 and not entry.readable_beside(Tier.GPU)
