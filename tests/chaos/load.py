"""Writers and readers that compare every byte with the oracle."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from contextlib import aclosing

from chaos.cluster import Cluster
from chaos.ledger import KEY_SPACE, Chain, Ledger, payload_of
from chaos.standing import Standing
from chaos.verdict import Tally

from kvstore.client import Acknowledge, BlockPut, StoreClient
from kvstore.errors import LarderError
from kvstore.units import seconds

_LENGTHS = (8, 12, 16, 24)
_PAUSE_S = 0.02
"""Between two pieces of work of one client: the stores, not the clients, shall have the cores."""
_REFS_OF_A_CALL = 1024
_STILL_AWAY_S = 0.1
"""Who was away this long before a read may be so still in the eyes of its client."""


class Load:
    """Runs until `over` is set."""

    def __init__(self, cluster: Cluster, ledger: Ledger, standing: Standing, clients: Sequence[StoreClient], tally: Tally) -> None:
        self._cluster, self._ledger, self._standing, self._clients, self._tally = cluster, ledger, standing, clients, tally
        self._retired: list[Chain] = []
        self._retired_before: list[Chain] = []
        self.over = asyncio.Event()

    async def writer(self, client: StoreClient, draw: random.Random) -> None:
        """Puts new chains, and goes on with those of which something is not acknowledged yet."""
        while not self.over.is_set():
            unfinished = [number for number, chain in self._ledger.chains.items() if chain.run < len(chain.refs)]
            number = draw.choice(unfinished) if unfinished and draw.random() < 0.7 else self._ledger.make(draw.choice(_LENGTHS))
            await self.put(client, number, draw.choice((Acknowledge.QUORUM, Acknowledge.ALL)))
            for chain in self._ledger.retire():
                self._retired.append(chain)
            await asyncio.sleep(_PAUSE_S * 4)

    async def put(self, client: StoreClient, number: int, acknowledge: Acknowledge) -> None:
        refs, standing = self._ledger.chains[number].refs, self._standing
        starts, view = standing.starts(), self._cluster.registry.view  # the client takes its view at the call as well
        report = await client.put(KEY_SPACE, [BlockPut(ref, payload_of(ref)) for ref in refs], acknowledge=acknowledge)
        self._tally.puts += 1
        lost = standing.lost(starts)
        self._tally.acknowledged += self._ledger.put(number, report.outcomes, view=view, lost=lost, whole=standing.whole)

    async def reader(self, client: StoreClient, draw: random.Random) -> None:
        while not self.over.is_set():
            if readable := [number for number, chain in self._ledger.chains.items() if chain.run]:
                await self._read_one(client, draw.choice(readable))
            await asyncio.sleep(_PAUSE_S)

    async def _read_one(self, client: StoreClient, number: int) -> None:
        chain, started = self._ledger.chains[number], time.monotonic()
        promised = chain.run
        found, why = await self.read(client, chain)
        self._tally.reads += 1
        self._tally.blocks_read += found
        self._standing.forget_lost()
        if found >= promised or number not in self._ledger.chains or chain.run <= found:
            return
        if self._standing.excuses(
            chain.refs[found].stripe, chain.holders[found], client=self._clients.index(client), since=started - _STILL_AWAY_S
        ):
            self._tally.excused_reads += 1
            return
        self._tally.failed_reads += 1
        away = ", ".join(sorted(self._standing.away())) or "nobody"
        fate = await self._cluster.fate(chain.refs[found], chain.holders[found])
        self._tally.complaints.append(
            f"chain {number}: {found} of {promised} acknowledged blocks were read ({why}); of the next {fate}; away: {away}"
        )

    async def read(self, client: StoreClient, chain: Chain) -> tuple[int, str]:
        """(leading blocks that came, why the next did not)."""
        came: set[int] = set()
        reason = "not found"
        try:
            async with await client.acquire_prefix(KEY_SPACE, chain.refs) as lease:
                async with aclosing(client.read(lease)) as blocks:
                    async for block in blocks:
                        if block.payload is None:
                            reason = block.reason
                        elif block.payload != payload_of(chain.refs[block.index]):
                            self._tally.wrong_bytes += 1
                        else:
                            came.add(block.index)
        except LarderError as error:
            reason = str(error)
        return next((index for index in range(len(chain.refs)) if index not in came), len(chain.refs)), reason

    async def forget_retired(self) -> None:
        """On every store, when all is whole. Twice: a copy that was leased, or on its way, is there again. Else they would fill the stores,
        which would then evict what was promised."""
        chains = [*self._retired_before, *self._retired]
        self._retired_before, self._retired = self._retired, []
        refs = [ref for chain in chains for ref in chain.refs]
        for store in self._cluster.wanted():
            for start in range(0, len(refs), _REFS_OF_A_CALL):
                with contextlib.suppress(LarderError):
                    await store.admin.evict_blocks(KEY_SPACE, refs[start : start + _REFS_OF_A_CALL], timeout=seconds(5))
