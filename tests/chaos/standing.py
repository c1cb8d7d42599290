"""Which stores are away at a time, and which have lost what they had: what a reader may expect depends on it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from chaos.cluster import Cluster
from chaos.ledger import Ledger, may_be_missing
from chaos.verdict import Tally

from kvstore.client import StoreClient
from kvstore.core.view import MemberState, View
from kvstore.ids import NodeId, StripeId

_LOOK_EVERY_S = 0.03
Starts = dict[NodeId, int]
"""Of each store how often its process was started so far."""


class Standing:
    """`struck` is filled by the hand, before it strikes, and emptied when all is whole again: `settle`."""

    def __init__(self, cluster: Cluster, ledger: Ledger, clients: Sequence[StoreClient], tally: Tally) -> None:
        self._cluster, self._ledger, self._clients, self._tally = cluster, ledger, clients, tally
        self.struck: set[NodeId] = set()
        self._starts = self.starts()
        self._forgotten: set[NodeId] = set()
        self._last_away: dict[tuple[int, NodeId], float] = {}
        """By client, or -1 for all of them."""

    # -- what is lost

    def starts(self) -> Starts:
        return {node_id: store.starts for node_id, store in self._cluster.stores.items()}

    def lost(self, since: Starts | None = None) -> set[NodeId]:
        """Stores whose process has ended since all was whole, or since then: a node may have had all it had in memory."""
        stores = self._cluster.stores
        ended = {node_id for node_id, store in stores.items() if not store.up or store.starts != self._starts[node_id]}
        return ended | {node_id for node_id, starts in (since or {}).items() if stores[node_id].starts != starts}

    @property
    def whole(self) -> View:
        return self._cluster.whole

    def forget_lost(self) -> None:
        lost = self.lost()
        if not lost <= self._forgotten:
            self._forgotten = lost
            self._tally.excused_blocks += self._ledger.forget_lost(lost, self.whole)

    def settle(self) -> None:
        """All is whole, and every client asks every store."""
        self._ledger.settle(self.whole)
        self._starts, self._forgotten = self.starts(), set()
        self.struck.clear()

    # -- who is away

    def excuses(self, stripe: StripeId, holders: frozenset[NodeId], *, client: int, since: float) -> bool:
        """Whether this client could reach no store that has the block: each was away at some time since then, or has lost it."""
        self._look()
        away = {node_id for (who, node_id), at in self._last_away.items() if who in (client, -1) and at >= since}
        return may_be_missing(stripe, holders, away | self.lost(), self.whole)

    def away(self) -> set[NodeId]:
        """For every client."""
        members = self._cluster.registry.view.stores
        late = {member.node_id for member in members if member.state is MemberState.SUSPECT}
        dead = {member.node_id for member in members if member.state is MemberState.DEAD and self._cluster.stores[member.node_id].wanted}
        gone = {store.node_id for store in self._cluster.wanted() if not store.up}
        return self.struck | late | dead | gone

    def given_up(self, client: int) -> set[NodeId]:
        """Stores that it does not ask at present: it finds out behind the scenes, seconds later, that one is back."""
        usable = self._clients[client].usable_stores()
        return {store.node_id for store in self._cluster.wanted() if store.node_id not in usable}

    def all_given_up(self) -> set[NodeId]:
        return set().union(*(self.given_up(client) for client in range(len(self._clients))))

    async def until_all_are_asked(self, *, within_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.all_given_up():  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_EVERY_S)
                return True
        return False

    async def watch(self) -> None:
        """Ends by being cancelled."""
        while True:
            self._look()
            self.forget_lost()
            await asyncio.sleep(_LOOK_EVERY_S)

    def _look(self) -> None:
        now = time.monotonic()
        self._last_away.update(((-1, node_id), now) for node_id in self.away())
        for client in range(len(self._clients)):
            self._last_away.update(((client, node_id), now) for node_id in self.given_up(client))
