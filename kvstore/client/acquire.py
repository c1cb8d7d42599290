"""Finding the longest run of a chain: all stripes at once, each from its first replica, then from the next for what was missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from kvstore.client import metrics
from kvstore.client.hedging import Asked
from kvstore.client.routing import Router
from kvstore.clock import Clock
from kvstore.errors import LarderError
from kvstore.ids import BlockRef, NodeId, StripeId
from kvstore.units import Nanos, to_seconds

MOST_BLOCKS_OF_A_CALL = 2048

Found = TypeVar("Found")
Item = TypeVar("Item")
Answered = Callable[[Sequence[Found | None] | LarderError], None]
AskNode = Callable[[NodeId, Sequence[BlockRef], Answered[Found]], None]
"""Ask one node for some blocks of the chain. `Answered` is called once, now or later: one answer per block, None for a block that it
lacks; or why there are none."""


class PrefixSearch(Generic[Found]):
    """What is found of a chain, and whom to ask next. Pure; `find_prefix` does the asking.

    After `note` of every ask that `next_round` gave, ask the next round, until it is empty. `run_length` is the answer.
    """

    def __init__(self, chain: Sequence[BlockRef], router: Router) -> None:
        self._router = router
        self.chain = chain
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
        for stripe in dict.fromkeys(self.chain[position].stripe for position in positions):
            node_id = self._router.next_reader(stripe, asked=self._asked[stripe])
            if node_id is not None:
                self._asked[stripe].add(node_id)
                asks.setdefault(node_id, []).extend(position for position in positions if self.chain[position].stripe == stripe)
        return asks

    def note(self, positions: Sequence[int], answers: Sequence[Found | None], *, by: NodeId | None = None) -> None:
        """`by`: who answered, when it is not the one that the round named. What another has given already stays."""
        for position, answer in zip(positions, answers, strict=True):
            if self.found[position] is not None:
                continue
            self.found[position] = answer
            if answer is None:
                self._broke[self.chain[position].stripe].setdefault(by or self._asking[position], position)

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


async def find_prefix(chain: Sequence[BlockRef], router: Router, ask: AskNode[Found], *, clock: Clock) -> PrefixSearch[Found]:
    """Ask until the longest run is known. A node that fails counts as one that has nothing; one that is late is not waited for when
    the next replicas have all that it was asked for. Its answer may then come after this has returned, as it may after a cancellation.

    A node gives of each stripe the leading run of what it is asked for. So one whose hole another node fills is asked again for the rest.

    Cost: one round trip when the first replicas have all, one more per replica that lacks something and per hole that is filled.
    """
    search: PrefixSearch[Found] = PrefixSearch(chain, router)
    while asks := search.next_round():
        await _Round(search, router, ask, clock).over(
            [(node_id, part) for node_id, positions in asks.items() for part in parts_of(positions)]
        )
    return search


class _Round(Generic[Found]):
    """Asks several nodes at once. Without a task for any of them: what an answer means is looked at when it comes."""

    def __init__(self, search: PrefixSearch[Found], router: Router, ask: AskNode[Found], clock: Clock) -> None:
        self._search = search
        self._router = router
        self._ask = ask
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._open = 0
        """Parts that something is still waited for."""

    async def over(self, asks: Sequence[tuple[NodeId, Sequence[int]]]) -> None:
        self._open = len(asks)
        parts = [_Part(positions) for _, positions in asks]
        try:
            for part, (node_id, positions) in zip(parts, asks, strict=True):
                late_after = self._router.hedges.late_after(node_id, Asked.ACQUIRE)
                if late_after is not None:
                    part.timer = self._loop.call_later(to_seconds(late_after), self._late, part)
                self._ask_one(part, node_id, positions)
            await self._done
        finally:
            for part in parts:
                part.settle()

    def _ask_one(self, part: _Part, node_id: NodeId, positions: Sequence[int]) -> None:
        asked_at = self._clock.now()
        part.asked += 1

        def answered(answers: Sequence[Found | None] | LarderError) -> None:
            if not isinstance(answers, LarderError):  # else it is counted in the node's circuit; the next replica is asked
                self._router.hedges.answered(node_id, Asked.ACQUIRE, Nanos(self._clock.now() - asked_at))
                self._search.note(positions, answers, by=node_id)
            part.asked -= 1
            if not part.settled and (part.asked == 0 or (part.is_late and self._search.complete(part.positions))):
                part.settle()
                self._open -= 1
                if self._open == 0 and not self._done.done():
                    self._done.set_result(None)

        self._ask(node_id, [self._search.chain[position] for position in positions], answered)

    def _late(self, part: _Part) -> None:
        if self._router.hedges.take():
            part.is_late = True
            spares = self._search.spares(part.positions)
            metrics.second_requests.labels(Asked.ACQUIRE.value).inc(len(spares))
            for node_id, positions in spares.items():
                self._ask_one(part, node_id, positions)


class _Part:
    """Positions of which one node was asked, and others when that was late."""

    __slots__ = ("asked", "is_late", "positions", "settled", "timer")

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = positions
        self.asked = 0
        self.is_late = False
        self.settled = False
        self.timer: asyncio.TimerHandle | None = None

    def settle(self) -> None:
        self.settled = True
        if self.timer is not None:
            self.timer.cancel()


def parts_of(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """The items in order, in as few runs as fit into a call each."""
    for start in range(0, len(items), MOST_BLOCKS_OF_A_CALL):
        yield items[start : start + MOST_BLOCKS_OF_A_CALL]
