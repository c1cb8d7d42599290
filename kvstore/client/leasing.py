"""The leases that one acquire takes, node by node, while it looks for the longest run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvstore.client.acquire import Answered, PrefixSearch
from kvstore.client.config import ClientConfig
from kvstore.client.lease_keeper import LeaseKeeper
from kvstore.client.node_calls import NodeCalls
from kvstore.client.prefix_lease import HeldLease, LeasedCopy, PrefixLease
from kvstore.clock import Clock
from kvstore.errors import LarderError, Unavailable
from kvstore.ids import BlockHash, BlockRef, KeySpace, NodeId
from kvstore.rpc.store_stub import Acquired
from kvstore.units import Nanos


class Leasing:
    """Of one acquire. What comes after `leased` or `give_all_back` is given back: the caller is gone, or was served by others."""

    def __init__(
        self,
        nodes: NodeCalls,
        keeper: LeaseKeeper,
        key_space: KeySpace,
        *,
        ttl: Nanos,
        as_sealed: bool,
        config: ClientConfig,
        clock: Clock,
    ) -> None:
        self._nodes = nodes
        self._keeper = keeper
        self._key_space = key_space
        self._ttl = ttl
        self._as_sealed = as_sealed
        self._timeout = config.rpc_timeout
        self._clock = clock
        self._held: list[HeldLease] = []
        self._is_over = False

    def ask(self, node_id: NodeId, blocks: Sequence[BlockRef], answered: Answered[LeasedCopy]) -> None:
        """Without a task where a line to the node is open. Whatever becomes of the caller, an answer that carries a lease is taken in."""
        asked_at = self._clock.now()

        def take(acquired: Acquired | LarderError) -> None:
            self._nodes.note(node_id, acquired if isinstance(acquired, LarderError) else None)
            answered(acquired if isinstance(acquired, LarderError) else self._take(node_id, acquired, asked_at))

        stub = self._nodes.stub_now(node_id)
        if stub is None or not stub.acquire_now(
            self._key_space, blocks, ttl=self._ttl, timeout=self._timeout, answered=take, as_sealed=self._as_sealed
        ):
            self._nodes.spawn(self._call(node_id, blocks, answered))

    async def _call(self, node_id: NodeId, blocks: Sequence[BlockRef], answered: Answered[LeasedCopy]) -> None:
        asked_at = self._clock.now()
        found: Sequence[LeasedCopy | None] | LarderError = Unavailable("the client was closed")
        try:
            acquired = await self._nodes.call(
                node_id,
                lambda stub: stub.acquire_prefix(self._key_space, blocks, ttl=self._ttl, timeout=self._timeout, as_sealed=self._as_sealed),
            )
            found = self._take(node_id, acquired, asked_at)
        except LarderError as error:
            found = error
        finally:
            answered(found)

    def _take(self, node_id: NodeId, acquired: Acquired, asked_at: Nanos) -> Sequence[LeasedCopy | None]:
        if not acquired.lease_id:
            return [None] * len(acquired.copies)
        held = self._keeper.hold(node_id, acquired.lease_id, self._key_space, ttl=acquired.ttl, asked_at=asked_at, ticket=acquired.ticket)
        if self._is_over:
            self._keeper.give_back(held)
            return [None] * len(acquired.copies)
        self._held.append(held)
        make = partial(tuple.__new__, LeasedCopy)  # half the time of its constructor
        return [copy and make((held, *copy)) for copy in acquired.copies]

    def give_all_back(self) -> None:
        self._is_over = True
        for held in self._held:
            self._keeper.give_back(held)

    def leased(self, search: PrefixSearch[LeasedCopy]) -> PrefixLease:
        """A lease on exactly the run that was found; what is leased beyond it is given back."""
        self._is_over = True
        run, found = search.run_length, search.found
        copies = tuple([copy for copy in found[:run] if copy is not None])
        needed = {copy.held for copy in copies}
        surplus: dict[HeldLease, list[BlockHash]] = {}
        for ref, copy in zip(search.chain[run:], found[run:], strict=True):
            if copy is not None:
                surplus.setdefault(copy.held, []).append(ref.hash)
        for held in self._held:
            if held not in needed:
                self._keeper.give_back(held)
            else:
                self._keeper.give_back_some(held, surplus.get(held, ()))
        chain, give_back = tuple(search.chain[:run]), self._keeper.give_back
        return PrefixLease(self._key_space, chain, copies, needed, give_back=give_back, as_sealed=self._as_sealed)
