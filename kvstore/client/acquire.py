"""Finding the longest run of a chain: all stripes at once, each from its first replica, then from the next for what was missing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Generic, TypeVar

from kvstore.client import metrics
from kvstore.client.hedging import Asked
from kvstore.client.routing import Router
from kvstore.client.side_by_side import all_of
from kvstore.clock import Clock
from kvstore.errors import LarderError
from kvstore.ids import BlockRef, NodeId, StripeId
from kvstore.units import Nanos, to_seconds

MOST_BLOCKS_OF_A_CALL = 2048

Found = TypeVar("Found")
Item = TypeVar("Item")
AskNode = Callable[[NodeId, Sequence[BlockRef]], Awaitable[Sequence[Found | None]]]
"""Ask one node for some blocks of the chain; one answer per block, None for a block that it lacks. Raises LarderError."""

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class PrefixSearch(Generic[Found]):
    """What is found of a chain, and whom to ask next. Pure; `find_prefix` does the asking.

    After `note` of every ask that `next_round` gave, ask the next round, until it is empty. `run_length` is the answer.
    """

    def __init__(self, chain: Sequence[BlockRef], router: Router) -> None:
        self._router = router
        self._chain = chain
        self.found: list[Found | None] = [None] * len(chain)
        self._stripes: dict[StripeId, list[int]] = {}
        for position, ref in enumerate(chain):
            self._stripes.setdefault(ref.stripe, []).append(position)
        self._asked: dict[StripeId, set[NodeId]] = {stripe: set() for stripe in self._stripes}
        self._broke: dict[StripeId, dict[NodeId, int]] = {stripe: {} for stripe in self._stripes}
        """Where the run of a node that was asked ended: what it has behind that hole it did not say."""
        self._asking: dict[int, NodeId] = {}

    @property
    def run_length(self) -> int:
        """Leading blocks that are found."""
        return next((position for position, found in enumerate(self.found) if found is None), len(self.found))

    def next_round(self) -> dict[NodeId, list[int]]:
        """Positions in the chain to ask each node for. Stripes behind one that nobody can complete are left alone."""
        asks: dict[NodeId, list[int]] = {}
        for stripe, positions in self._stripes.items():
            missing = [position for position in positions if self.found[position] is None]
            if not missing:
                continue
            node_id = self._router.next_reader(stripe, asked=self._asked[stripe]) or self._one_that_may_have_more(stripe)
            if node_id is None:
                break
            self._asked[stripe].add(node_id)
            self._broke[stripe].pop(node_id, None)
            asks.setdefault(node_id, []).extend(missing)
            self._asking.update(dict.fromkeys(missing, node_id))
        return asks

    def spares(self, positions: Sequence[int]) -> dict[NodeId, list[int]]:
        """Whom else to ask for these while who was asked has not answered. Each counts as asked; `note` what it says with `by`."""
        asks: dict[NodeId, list[int]] = {}
        for stripe in dict.fromkeys(self._chain[position].stripe for position in positions):
            node_id = self._router.next_reader(stripe, asked=self._asked[stripe])
            if node_id is not None:
                self._asked[stripe].add(node_id)
                asks.setdefault(node_id, []).extend(position for position in positions if self._chain[position].stripe == stripe)
        return asks

    def note(self, positions: Sequence[int], answers: Sequence[Found | None], *, by: NodeId | None = None) -> None:
        """`by`: who answered, when it is not the one that the round named. What another has given already stays."""
        for position, answer in zip(positions, answers, strict=True):
            if self.found[position] is not None:
                continue
            self.found[position] = answer
            if answer is None:
                self._broke[self._chain[position].stripe].setdefault(by or self._asking[position], position)

    def complete(self, positions: Sequence[int]) -> bool:
        return all(self.found[position] is not None for position in positions)

    def _one_that_may_have_more(self, stripe: StripeId) -> NodeId | None:
        """A node that was asked, whose hole another node has filled since. Each time a hole less is left, so this ends."""
        return next(
            (
                node_id
                for node_id, position in self._broke[stripe].items()
                if self.found[position] is not None and self._router.usable(node_id)
            ),
            None,
        )


async def find_prefix(chain: Sequence[BlockRef], router: Router, ask: AskNode[Found], *, spawn: Spawn, clock: Clock) -> PrefixSearch[Found]:
    """Ask until the longest run is known. A node that fails counts as one that has nothing; one that is late is not waited for when
    the next replicas have all that it was asked for. Its answer may then come after this has returned: `spawn` owns the call.

    A node gives of each stripe the leading run of what it is asked for. So one whose hole another node fills is asked again for the rest.

    Cost: one round trip when the first replicas have all, one more per replica that lacks something and per hole that is filled.
    """
    search: PrefixSearch[Found] = PrefixSearch(chain, router)

    async def ask_one(node_id: NodeId, positions: Sequence[int]) -> None:
        asked_at = clock.now()
        try:
            answers = await ask(node_id, [chain[position] for position in positions])
        except LarderError:
            return  # counted in the node's circuit; the next replica is asked
        router.hedges.answered(node_id, Asked.ACQUIRE, Nanos(clock.now() - asked_at))
        search.note(positions, answers, by=node_id)

    async def ask_in_time(node_id: NodeId, positions: Sequence[int]) -> None:
        late_after = router.hedges.late_after(node_id, Asked.ACQUIRE)
        if late_after is None:
            await ask_one(node_id, positions)
            return
        first = spawn(ask_one(node_id, positions))
        await asyncio.wait({first}, timeout=to_seconds(late_after))
        if not first.done() and router.hedges.take():
            spares = [spawn(ask_one(spare, part)) for spare, part in search.spares(positions).items()]
            metrics.second_requests.labels(Asked.ACQUIRE.value).inc(len(spares))
            waiting = {first, *spares}
            while first in waiting and len(waiting) > 1 and not search.complete(positions):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if search.complete(positions):
                return
            await asyncio.gather(*spares)
        await first

    while asks := search.next_round():
        await all_of([ask_in_time(node_id, part) for node_id, positions in asks.items() for part in parts_of(positions)])
    return search


def parts_of(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """The items in order, in as few runs as fit into a call each."""
    for start in range(0, len(items), MOST_BLOCKS_OF_A_CALL):
        yield items[start : start + MOST_BLOCKS_OF_A_CALL]
