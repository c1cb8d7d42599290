"""Fair shares: whose copy goes when room is short. The namespace furthest above its share gives first; which of its copies, the policy
says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush, heapreplace

from kvstore.core.eviction import EvictionQueue
from kvstore.core.index import Entry
from kvstore.ids import Namespace


class TierShares:
    """Bytes that each namespace has in one tier, over its weight: the larger, the further above its share of a full tier."""

    def __init__(self, weights: Mapping[Namespace, float]) -> None:
        self._weights = dict(weights)
        self._used: dict[Namespace, int] = {}
        self._queues: list[FairQueue] = []

    def add_queue(self, queue: FairQueue) -> None:
        """Of copies in this tier: it is told whose last one has gone."""
        self._queues.append(queue)

    def charge(self, namespace: Namespace, size: int) -> None:
        """`size` below 0: given back."""
        used = self._used.get(namespace, 0) + size
        if used:
            self._used[namespace] = used
        else:
            self._used.pop(namespace, None)
            for queue in self._queues:
                queue.forget(namespace)

    def excess(self, namespace: Namespace, *, more: int = 0) -> float:
        return (self._used.get(namespace, 0) + more) / self._weights.get(namespace, 1.0)


class FairQueue:
    """One queue of the policy for each namespace. With one namespace it is that queue and nothing more.

    The heap holds for each namespace a bound that its excess does not pass: raised when it offers, lowered when met.
    Cost: what the policy's queue costs, and O(log namespaces) amortized.
    """

    def __init__(self, make: Callable[[], EvictionQueue], shares: TierShares) -> None:
        self._make = make
        self._shares = shares
        self._queues: dict[Namespace, EvictionQueue] = {}
        self._bounds: dict[Namespace, float] = {}
        self._heap: list[tuple[float, Namespace]] = []  # (-bound, namespace); outdated ones are skipped when met
        shares.add_queue(self)

    def offer(self, entry: Entry) -> None:
        namespace = entry.key_space.namespace
        queue = self._queues.get(namespace)
        if queue is None:
            queue = self._queues[namespace] = self._make()
            if len(self._queues) == 2:  # of a namespace alone nobody keeps the bound
                self._bounds = {known: self._shares.excess(known) for known in self._queues}
                self._rebuild()
        queue.offer(entry)
        if len(self._queues) > 1 and (excess := self._shares.excess(namespace)) > self._bounds.get(namespace, -1.0):
            self._bounds[namespace] = excess
            heappush(self._heap, (-excess, namespace))
            if len(self._heap) > 2 * len(self._queues) + 64:
                self._rebuild()

    def discard(self, entry: Entry) -> None:
        queue = self._queues.get(entry.key_space.namespace)
        if queue is not None:
            queue.discard(entry)

    def take(self, *, asking: Namespace | None = None, size: int = 0) -> Entry | None:
        """`asking`: whose the room will be, `size` bytes of it: that counts as if it had it already."""
        while len(self._queues) > 1:
            bound, namespace = self._heap[0]
            if self._bounds.get(namespace) != -bound:
                heappop(self._heap)
            elif (excess := self._shares.excess(namespace)) < -bound:
                self._bounds[namespace] = excess
                heapreplace(self._heap, (-excess, namespace))
            else:
                above = asking is not None and asking in self._queues and self._shares.excess(asking, more=size) >= excess
                victim = self.take_of(asking if above and asking is not None else namespace)
                if victim is not None:
                    return victim
        for namespace in self._queues:
            return self.take_of(namespace)
        return None

    def forget(self, namespace: Namespace) -> None:
        """Not a byte of it is left in the tier."""
        if namespace in self._queues:
            victim = self.take_of(namespace)  # drops what cannot go: all, but for an empty payload
            if victim is not None:
                self.offer(victim)

    def take_of(self, namespace: Namespace) -> Entry | None:
        """The coldest of the namespace that may go."""
        queue = self._queues.get(namespace)
        victim = None if queue is None else queue.take()
        if queue is not None and victim is None:
            del self._queues[namespace]
            self._bounds.pop(namespace, None)
        return victim

    def _rebuild(self) -> None:
        self._heap = [(-bound, namespace) for namespace, bound in self._bounds.items()]
        heapify(self._heap)
