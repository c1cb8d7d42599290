"""StoreClient: the store as an engine sees it. Every wait has a deadline; cache trouble is an answer, never an exception."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from kvstore.client import metrics
from kvstore.client.acquire import Answered, find_prefix, parts_of
from kvstore.client.answers import Acknowledge, BlockPut, PutReport, ReadBlock
from kvstore.client.config import ClientConfig
from kvstore.client.lease_keeper import LeaseKeeper
from kvstore.client.leasing import Leasing
from kvstore.client.mapped_read import MappedRead
from kvstore.client.node_calls import NodeCalls
from kvstore.client.prefix_lease import PrefixLease
from kvstore.client.put import BlockPutter
from kvstore.client.read import PrefixRead
from kvstore.client.routing import Router
from kvstore.clock import Clock, SystemClock
from kvstore.errors import LarderError, Unavailable
from kvstore.ids import BlockHash, BlockRef, KeySpace, NodeId
from kvstore.registry.view_source import ViewSource
from kvstore.rpc.channel import ChannelPool
from kvstore.transport import AutoTransport
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
            AutoTransport(channels, kinds=self._config.transports),
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

        async def probe(node_id: NodeId, blocks: Sequence[BlockRef], answered: Answered[bool]) -> None:
            found: Sequence[bool | None] | LarderError = Unavailable("the client was closed")
            try:
                present = await self._nodes.call(
                    node_id, lambda stub: stub.probe_prefix(key_space, blocks, timeout=self._config.rpc_timeout)
                )
                found = [here or None for here in present]
            except LarderError as error:
                found = error
            finally:
                answered(found)

        def ask(node_id: NodeId, blocks: Sequence[BlockRef], answered: Answered[bool]) -> None:
            self._nodes.spawn(probe(node_id, blocks, answered))

        return (await find_prefix(chain, self._nodes.refresh(), ask, clock=self._clock)).run_length

    async def acquire_prefix(
        self, key_space: KeySpace, chain: Sequence[BlockRef], *, ttl: Nanos | None = None, as_sealed: bool = False
    ) -> PrefixLease:
        """Lease the longest run of leading blocks that the store holds, and nothing beyond it. With `as_sealed` a block counts as held
        only where its numbers are those that its layout names: for a sequence that attends to these already.

        The lease is renewed behind the scenes until released; `ttl` (default: `lease_ttl` of the config) is how long the nodes keep
        it when this process dies. A node that does not answer costs one `rpc_timeout`, then its replicas are asked instead.
        """
        asking = Leasing(
            self._nodes,
            self._keeper,
            key_space,
            ttl=ttl or self._config.lease_ttl,
            as_sealed=as_sealed,
            config=self._config,
            clock=self._clock,
        )
        try:
            search = await find_prefix(chain, self._nodes.refresh(), asking.ask, clock=self._clock)
        except BaseException:
            asking.give_all_back()
            raise
        return asking.leased(search)

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
        self._nodes.refresh()
        mapped = MappedRead(lease, self._nodes, self._keeper, config=self._config, clock=self._clock, in_place=in_place)
        reading = PrefixRead(lease, self._nodes, self._keeper, mapped, config=self._config, clock=self._clock)
        quick, slow = mapped.quick(wanted)
        failed: dict[int, str] = {}
        try:
            if slow:
                reading.start(slow)
            for portion in quick:
                for block in mapped.read_now(portion):
                    if block.payload is None:
                        failed[block.index] = block.reason
                    else:
                        yield block
                if mapped.is_turn_over():
                    await asyncio.sleep(0)
            if failed:
                reading.start_elsewhere(failed)
            for _ in range(len(slow) + len(failed)):
                arrived = await reading.arrived.get()
                if arrived is None:  # a bug in the reading must reach the consumer, not leave it waiting
                    await reading.until_end()
                    break
                reading.taken(arrived)
                yield arrived
            if slow and not reading.hedged:
                await reading.until_end()  # a stream that was overtaken has none that is worth waiting for
            metrics.read_seconds.observe(time.perf_counter() - started)
        finally:
            mapped.count_hits()
            await reading.close()

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
