"""What strikes the cluster: one store or two at a time, each time until all is whole again; Redis beside it at any time."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Sequence

from chaos.cluster import Cluster, StoreProcess
from chaos.hosts import wipe
from chaos.ledger import Ledger
from chaos.standing import Standing
from chaos.verdict import Tally

from kvstore.errors import LarderError
from kvstore.units import seconds

WHOLE_WITHIN_S = 300.0
"""A few seconds on a quiet machine. On a starved one leases run out again and again."""
_DRAIN_WITHIN_S = 300.0
_FEWEST = 4
_TWO_AT_ONCE = 0.3
"""Share of the episodes. With two replicas some blocks have both of them struck then: those are known, and all others must be there."""


class Hand:
    """`kinds`: the names of what it does; two with a + between them strike two stores at once. `tell` gets a line for each fault."""

    def __init__(
        self, cluster: Cluster, ledger: Ledger, standing: Standing, tally: Tally, *, draw: random.Random, tell: Callable[[str], None]
    ) -> None:
        self._cluster, self._ledger, self._standing, self._tally = cluster, ledger, standing, tally
        self._draw, self._tell = draw, tell
        self._away: dict[str, Callable[[StoreProcess], Awaitable[None]]] = {
            "kill": self._kill,
            "replace": self._replace,
            "freeze": self._freeze,
            "cut": self._cut,
            "silence": self._silence,
            "silence_inward": self._silence_inward,
            "silence_outward": self._silence_outward,
            "delay": self._delay,
            "away_from_redis": self._away_from_redis,
            "unplug": self._unplug,
        }
        """While they last the store is not expected to answer."""
        self._others: dict[str, Callable[[StoreProcess], Awaitable[None]]] = {"full_disk": self._full_disk, "drain": self._drain}

    def draw_kind(self) -> str:
        """One of all, or two that take stores away."""
        if self._draw.random() < _TWO_AT_ONCE:
            return "+".join(self._draw.choice(list(self._away)) for _ in range(2))
        return self._draw.choice((*self._away, *self._others, "join", "redis"))

    async def strike(self, kind: str) -> None:
        """One episode, from the blow until everything is whole. Complains when it does not become so."""
        redis = asyncio.ensure_future(self._restart_redis()) if kind == "redis" or self._draw.random() < 0.2 else None
        try:
            if kind == "join":
                await self._join()
            elif kind != "redis":
                await self._strike_all(kind.split("+"))
        finally:
            if redis is not None:
                await redis
        self._standing.forget_lost()
        missing = await self._cluster.until_whole(self._ledger, within_s=WHOLE_WITHIN_S)
        if missing:
            self._tally.complaints.append(f"after {kind}: not whole within {WHOLE_WITHIN_S:g} s: {missing}")
        if not await self._standing.until_all_are_asked(within_s=WHOLE_WITHIN_S):
            self._tally.complaints.append(f"after {kind}: clients still do not ask {sorted(self._standing.all_given_up())}")
        self._standing.settle()

    async def _strike_all(self, kinds: Sequence[str]) -> None:
        stores = self._draw.sample(self._cluster.wanted(), len(kinds))
        async with asyncio.TaskGroup() as group:
            for number, (kind, store) in enumerate(zip(kinds, stores, strict=True)):
                group.create_task(self._strike_one(kind, store, after_s=self._draw.uniform(0.0, 2.0) if number else 0.0))

    async def _strike_one(self, kind: str, store: StoreProcess, *, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        self._note(kind, store.node_id)
        if kind in self._away:
            self._standing.struck.add(store.node_id)
        await (self._away | self._others)[kind](store)
        store.host.clear_up()
        await asyncio.sleep(0.5)  # one that was declared dead meanwhile finds out now, and ends
        if store.wanted and not store.up:
            self._standing.struck.add(store.node_id)
            await store.bring_up()

    def _note(self, kind: str, who: str) -> None:
        self._tally.faults[kind] += 1
        self._tell(f"{kind} {who}")

    async def _pause(self, least_s: float, most_s: float) -> None:
        await asyncio.sleep(self._draw.uniform(least_s, most_s))

    async def _kill(self, store: StoreProcess) -> None:
        store.kill()
        await self._pause(0.0, 5.0)

    async def _freeze(self, store: StoreProcess) -> None:
        store.send(signal.SIGSTOP)
        try:
            await self._pause(0.3, 5.0)
        finally:
            store.send(signal.SIGCONT)

    async def _replace(self, store: StoreProcess) -> None:
        """Another machine with its name: nothing on its disk, and little room there at first."""
        store.kill()
        wipe(store.host.ssd)
        await self._pause(0.0, 4.0)
        await store.bring_up()
        store.host.fill_disk(store.pid)
        await self._pause(0.5, 3.0)
        store.host.empty_disk(store.pid)

    async def _cut(self, store: StoreProcess) -> None:
        store.host.cut()
        await self._pause(0.3, 4.0)

    async def _silence(self, store: StoreProcess) -> None:
        store.host.silence(inward=True, outward=True)
        await self._pause(0.3, 4.0)

    async def _silence_inward(self, store: StoreProcess) -> None:
        store.host.silence(inward=True, outward=False)
        await self._pause(0.3, 4.0)

    async def _silence_outward(self, store: StoreProcess) -> None:
        store.host.silence(inward=False, outward=True)
        await self._pause(0.3, 4.0)

    async def _delay(self, store: StoreProcess) -> None:
        store.host.delay(self._draw.uniform(0.01, 0.2))
        await self._pause(0.5, 4.0)

    async def _away_from_redis(self, store: StoreProcess) -> None:
        store.host.part_from_redis()
        await self._pause(0.5, 6.0)

    async def _unplug(self, store: StoreProcess) -> None:
        """From everybody, Redis included: it is declared dead and goes on for a while."""
        store.host.cut()
        store.host.part_from_redis()
        await self._pause(0.5, 6.0)

    async def _full_disk(self, store: StoreProcess) -> None:
        store.host.fill_disk(store.pid)
        await self._pause(0.5, 4.0)
        store.host.empty_disk(store.pid)

    async def _drain(self, store: StoreProcess) -> None:
        """Empty it, stop it; with only `_FEWEST` left it comes back."""
        try:
            async with asyncio.timeout(_DRAIN_WITHIN_S):
                await self._until_drained(store)
        except TimeoutError:
            self._tally.complaints.append(f"drain of {store.node_id}: not safe to stop within {_DRAIN_WITHIN_S:g} s")
        code = await store.let_go(30)
        if code != 0:
            self._tally.complaints.append(f"{store.node_id} was told to stop and ended with {code}")
        if len(self._cluster.wanted()) < _FEWEST:
            await self._pause(0.0, 2.0)
            await store.bring_up()

    async def _until_drained(self, store: StoreProcess) -> None:
        told = False
        while True:
            try:
                if not told:
                    await store.admin.drain(timeout=seconds(5))
                    told = True
                report = await store.status()
                if report is not None and report.drain is not None and report.drain.safe_to_stop:
                    return
            except LarderError:
                pass  # Redis is away just now
            await asyncio.sleep(0.1)

    async def _join(self) -> None:
        absent = [store for store in self._cluster.stores.values() if not store.wanted]
        if absent:
            store = self._draw.choice(absent)
            self._note("join", store.node_id)
            await store.bring_up()
        else:
            await self._strike_one("drain", self._draw.choice(self._cluster.wanted()))

    async def _restart_redis(self) -> None:
        """It comes back empty."""
        await self._pause(0.0, 1.0)
        self._note("redis", "restarts empty")
        self._cluster.redis.stop()
        await self._pause(0.0, 3.0)
        self._cluster.redis.start()
