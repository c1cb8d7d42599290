"""StoreClient: the store as an engine sees it. Every wait has a deadline; cache trouble is an answer, never an exception."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from kvstore.client import metrics
from kvstore.client.acquire import find_prefix, parts_of
from kvstore.client.answers import Acknowledge, BlockPut, PutReport, ReadBlock
from kvstore.client.config import ClientConfig
from kvstore.client.lease_keeper import LeaseKeeper
from kvstore.client.node_calls import NodeCalls
from kvstore.client.prefix_lease import HeldLease, LeasedCopy, PrefixLease
from kvstore.client.put import BlockPutter
from kvstore.client.read import PrefixRead
from kvstore.client.routing import Router
from kvstore.clock import Clock, SystemClock
from kvstore.errors import LarderError
from kvstore.ids import BlockHash, BlockRef, KeySpace, NodeId
from kvstore.registry.view_source import ViewSource
from kvstore.rpc.channel import ChannelPool
from kvstore.transport import AutoTransport, PayloadTransport
from kvstore.units import Nanos


class StoreClient:
    """Puts, finds, leases and reads blocks on the stores of a view.

    Belongs to the event loop it is first used on: use one client per loop. Many coroutines of that loop may use it at once.
    Close it (or use it as an async context manager).
    """

    def __init__(
        self,
        views: ViewSource,
        *,
        replicas: int = 2,
        config: ClientConfig | None = None,
        transport: PayloadTransport | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`replicas` must be the same for all clients and nodes of a cluster: it decides who owns a stripe."""
        self._config = config or ClientConfig()
        self._clock = clock or SystemClock()
        channels = ChannelPool()
        self._nodes = NodeCalls(
            views,
            Router(replicas=replicas, config=self._config),
            channels,
            transport or AutoTransport(channels, kinds=self._config.transports),
            config=self._config,
            clock=self._clock,
        )
        self._keeper = LeaseKeeper(self._nodes, config=self._config, clock=self._clock)
        self._putter = BlockPutter(self._nodes, config=self._config)

    def usable_stores(self) -> tuple[NodeId, ...]:
        """Stores of the last view that are asked now: their circuits are closed. For health pages."""
        router = self._nodes.refresh()
        return tuple(node_id for node_id in router.stores() if router.usable(node_id))

    @property
    def held_leases(self) -> int:
        """Leases at nodes that are being renewed, one per node and prefix. 0 when everything acquired was released."""
        return self._keeper.held_leases

    async def put(self, key_space: KeySpace, blocks: Sequence[BlockPut], *, acknowledge: Acknowledge = Acknowledge.QUORUM) -> PutReport:
        """Store the blocks on all their replicas; return when `acknowledge` of them hold each block or none is left to wait for.

        The other replicas are finished behind the answer. Payload bytes are those at the call. Bounded by `put_timeout`.
        """
        with metrics.put_seconds.time():
            return await self._putter.put(key_space, blocks, acknowledge=acknowledge)

    async def probe_prefix(self, key_space: KeySpace, chain: Sequence[BlockRef]) -> int:
        """How many leading blocks of the chain the store seems to hold. Pins nothing and promises nothing."""

        async def ask(node_id: NodeId, blocks: Sequence[BlockRef]) -> Sequence[bool | None]:
            present = await self._nodes.call(node_id, lambda stub: stub.probe_prefix(key_space, blocks, timeout=self._config.rpc_timeout))
            return [here or None for here in present]

        return (await find_prefix(chain, self._nodes.refresh(), ask, spawn=self._nodes.spawn, clock=self._clock)).run_length

    async def acquire_prefix(
        self, key_space: KeySpace, chain: Sequence[BlockRef], *, ttl: Nanos | None = None, as_sealed: bool = False
    ) -> PrefixLease:
        """Lease the longest run of leading blocks that the store holds, and nothing beyond it. With `as_sealed` a block counts as held
        only where its numbers are those that its layout names: for a sequence that attends to these already.

        The lease is renewed behind the scenes until released; `ttl` (default: `lease_ttl` of the config) is how long the nodes keep
        it when this process dies. A node that does not answer costs one `rpc_timeout`, then its replicas are asked instead.
        """
        held_here: list[HeldLease] = []
        over = False

        async def ask(node_id: NodeId, blocks: Sequence[BlockRef]) -> Sequence[LeasedCopy | None]:
            asked_at = self._clock.now()
            acquired = await self._nodes.call(
                node_id,
                lambda stub: stub.acquire_prefix(
                    key_space, blocks, ttl=ttl or self._config.lease_ttl, timeout=self._config.rpc_timeout, as_sealed=as_sealed
                ),
            )
            if not acquired.lease_id:
                return [None] * len(blocks)
            held = self._keeper.hold(node_id, acquired.lease_id, key_space, ttl=acquired.ttl, asked_at=asked_at, ticket=acquired.ticket)
            if over:  # it was late, and others gave what it was asked for
                self._keeper.give_back(held)
                return [None] * len(blocks)
            held_here.append(held)
            return [
                LeasedCopy(held, copy.payload_bytes, copy.checksum, copy.tier, copy.arena_offset, copy.rung) if copy else None
                for copy in acquired.copies
            ]

        def give_all_back(_: object) -> None:
            nonlocal over
            over = True
            for held in held_here:
                self._keeper.give_back(held)

        searching = self._nodes.spawn(find_prefix(chain, self._nodes.refresh(), ask, spawn=self._nodes.spawn, clock=self._clock))
        try:
            # A caller that goes away must not cut off an answer that carries a lease: nobody could give it back.
            search = await asyncio.shield(searching)
        except BaseException:
            searching.add_done_callback(give_all_back)
            raise
        over = True
        run = search.run_length
        copies = tuple(copy for copy in search.found[:run] if copy is not None)
        self._give_back_surplus(held_here, copies, zip(chain[run:], search.found[run:], strict=True))
        held = {copy.held for copy in copies}
        return PrefixLease(key_space, tuple(chain[:run]), copies, held, give_back=self._keeper.give_back, as_sealed=as_sealed)

    async def read(
        self, lease: PrefixLease, *, indices: Sequence[int] | None = None, in_place: bool = False
    ) -> AsyncGenerator[ReadBlock, None]:
        """Yield the leased blocks (those at `indices` of the run; default all) as they arrive, in any order, each exactly once.

        Each payload is verified. A replica that fails, stands still or gives other bytes is replaced by the next one, block by block;
        `payload` is None when none could give it. Leaving the loop early, or cancelling it, stops the transfers (use `aclosing`).

        `in_place`: payloads that lie in an arena mapped into this process are not copied out of it. They are read-only and may change
        when the lease ends: whoever has used one asks `still_good()` afterwards, and throws away what it made of it when that is False.
        """
        assert not lease.released, "a released lease gives no right to read"
        wanted = list(dict.fromkeys(range(len(lease)) if indices is None else indices))
        started = time.perf_counter()
        reading = PrefixRead(lease, self._nodes, self._keeper, config=self._config, clock=self._clock, in_place=in_place)
        self._nodes.refresh()
        task = asyncio.create_task(reading.run(wanted))
        # A bug in the reading must reach the consumer, not leave it waiting.
        task.add_done_callback(lambda _: reading.arrived.put_nowait(None))
        try:
            for _ in wanted:
                block = await reading.arrived.get()
                if block is None:
                    await task
                    break
                reading.taken(block)
                yield block
            if not reading.hedged:
                await task  # the end of its streams; one that was overtaken has none that is worth waiting for
            metrics.read_seconds.observe(time.perf_counter() - started)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def delete(self, key_space: KeySpace, chain: Sequence[BlockRef]) -> int:
        """Forget the blocks on every store that can be asked; how many of them any store held.

        A store that cannot be asked keeps its copies: content addresses make them harmless, capacity makes them go.
        """
        deleted: set[BlockHash] = set()

        async def ask(node_id: NodeId, blocks: Sequence[BlockRef]) -> None:
            try:
                answers = await self._nodes.call(node_id, lambda stub: stub.delete(key_space, blocks, timeout=self._config.rpc_timeout))
            except LarderError:
                return
            deleted.update(ref.hash for ref, answer in zip(blocks, answers, strict=True) if answer)

        async with asyncio.TaskGroup() as group:
            for node_id in self._nodes.refresh().stores():
                for blocks in parts_of(chain):
                    group.create_task(ask(node_id, blocks))
        return len(deleted)

    async def close(self) -> None:
        """Release all leases, finish the puts behind the answers, both up to `close_timeout`; then close the channels."""
        await self._keeper.close()
        await self._nodes.close()

    async def __aenter__(self) -> StoreClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _give_back_surplus(
        self, held_here: Sequence[HeldLease], copies: Sequence[LeasedCopy], beyond: zip[tuple[BlockRef, LeasedCopy | None]]
    ) -> None:
        needed = {copy.held for copy in copies}
        surplus: dict[HeldLease, list[BlockHash]] = {}
        for ref, copy in beyond:
            if copy is not None:
                surplus.setdefault(copy.held, []).append(ref.hash)
        for held in held_here:
            if held not in needed:
                self._keeper.give_back(held)
            else:
                self._keeper.give_back_some(held, surplus.get(held, ()))
