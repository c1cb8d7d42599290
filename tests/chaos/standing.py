"""Which stores are away at a time: what a reader may expect of the others depends on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from chaos.cluster import REPLICAS, Cluster
from chaos.ledger import Ledger

from kvstore.client import StoreClient
from kvstore.core.view import MemberState
from kvstore.ids import NodeId

_LOOK_EVERY_S = 0.03


class Standing:
    """`struck` is filled by the hand, before it strikes, and emptied when all is whole again."""

    def __init__(self, cluster: Cluster, ledger: Ledger, clients: Sequence[StoreClient]) -> None:
        self._cluster, self._ledger, self._clients = cluster, ledger, clients
        self.struck: set[NodeId] = set()
        self.overlaps = 0
        """Grows whenever as many stores are away as a block has replicas. The hand never brings that about: a starved machine does."""

    @property
    def overlapping(self) -> bool:
        return len(self._away()) >= REPLICAS

    def _away(self) -> set[NodeId]:
        members = self._cluster.registry.view.stores
        late = {member.node_id for member in members if member.state is MemberState.SUSPECT}
        dead = {member.node_id for member in members if member.state is MemberState.DEAD and self._cluster.stores[member.node_id].wanted}
        gone = {store.node_id for store in self._cluster.wanted() if not store.up}
        return self.struck | late | dead | gone | self.given_up()

    def given_up(self) -> set[NodeId]:
        """Stores that a client does not ask at present: it finds out behind the scenes, seconds later, that one is back."""
        return {
            store.node_id for store in self._cluster.wanted() for client in self._clients if store.node_id not in client.usable_stores()
        }

    async def until_all_are_asked(self, *, within_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.given_up():  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_EVERY_S)
                return True
        return False

    async def watch(self) -> None:
        """Ends by being cancelled."""
        was = False
        while True:
            away = self._away()
            now = len(away) >= REPLICAS
            if now and not was:
                self.overlaps += 1
            was = now
            if sum(not self._cluster.stores[name].up or name in self.struck for name in away) >= REPLICAS:
                self._ledger.excuse()
            await asyncio.sleep(_LOOK_EVERY_S)
