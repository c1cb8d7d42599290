"""A prefix into the pool, before its sequence joins the batch: pinned where the pool has it, leased and fetched where the store has it.

Whatever goes wrong shortens the prefix, and the engine computes the rest: nothing here fails a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from decode_node.fetch_plan import FetchPace, FetchPolicy, FetchSpeeds, Speeds, loadable_blocks, plan_fetch
from decode_node.published import PublishedPrefix
from kvstore.client import PrefixLease
from kvstore.ids import BlockHash, BlockRef
from kvstore.units import Nanos, to_seconds
from prefill_node import metrics
from prefill_node.compute_node import ComputeNode
from prefill_node.engine.request import PinnedPrefix
from prefill_node.prefix import FetchedRun, fetch_run, give_back_reserved, tier_name

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPrefix:
    pinned: PinnedPrefix
    """Belongs to the caller: hand it to Engine.submit or release it."""
    local_blocks: int
    store_blocks: int
    recompute_tokens: int
    took: Nanos
    fetchable_blocks: int
    """Leading blocks that could be had now but for the room in the pool; 0 when room was not what ended the load."""
    recoded: bool
    """Some of it is not as sealed."""


@dataclass(slots=True)
class _Load:
    """One load on its way."""

    namespace: str
    chain: Sequence[BlockRef]
    pinned: PinnedPrefix
    tokens: int
    continuation: bool
    as_sealed: bool
    pace: FetchPace | None = None
    """What the parts so far have left of the time; None before the first."""


class PrefixLoader:
    """One per node; lives on the event loop."""

    def __init__(self, node: ComputeNode, *, policy: FetchPolicy) -> None:
        self._node = node
        self._policy = policy
        self._speeds = FetchSpeeds()
        self._loading: dict[BlockHash, asyncio.Event] = {}

    async def load(
        self,
        namespace: str,
        token_ids: Sequence[int],
        *,
        continuation: bool,
        as_sealed: bool = False,
        published: PublishedPrefix | None = None,
    ) -> LoadedPrefix:
        """The longest prefix that pool and store give within the policy's `max_wait`, not counting the time in which there is nothing to
        fetch yet because a prefill node is still at it (`published`). Raises only what cancels it, and then holds nothing. Loads of the
        same blocks at the same time fetch them once. `as_sealed`: re-coded blocks are as good as missing, for there are tokens already that
        come from other numbers."""
        node = self._node
        started = time.monotonic_ns()
        usable = loadable_blocks(len(token_ids), block_tokens=node.block_tokens)
        chain = node.chain(namespace, token_ids)[:usable]
        pinned = await self._pin(chain, started + self._policy.max_wait, as_sealed=as_sealed)
        local = len(pinned.block_ids)
        run = FetchedRun()
        try:
            await self._fetch_all(run, _Load(namespace, chain, pinned, len(token_ids), continuation, as_sealed), published)
        except asyncio.CancelledError:
            node.engine.release(pinned)
            raise
        except Exception:
            # A bug in taking from the cache is still cache trouble: the request is computed.
            log.exception("loading a prefix of %d blocks raised", usable)
            run.ended_by = "internal"
        give_back_reserved(node.engine, pinned)
        loaded = LoadedPrefix(
            pinned=pinned,
            local_blocks=local,
            store_blocks=run.blocks,
            recompute_tokens=len(token_ids) - (local + run.blocks) * node.block_tokens,
            took=Nanos(time.monotonic_ns() - started),
            fetchable_blocks=run.left_for_room and local + run.blocks + run.left_for_room,
            recoded=pinned.recoded,
        )
        self._count(loaded, run)
        return loaded

    async def _fetch_all(self, run: FetchedRun, load: _Load, published: PublishedPrefix | None) -> None:
        """Part by part into `run`, as far as the store has the blocks, and then as they are published."""
        while (have := len(load.pinned.block_ids)) < len(load.chain):
            readable = published.blocks if published is not None else 0
            part = await self._fetch_once(load)
            run.extend(part)
            if part.ended_by or published is None or (readable > have and not part.blocks):
                return  # the last: what was published is gone again
            if not await published.beyond(len(load.pinned.block_ids)):
                return

    async def _pin(self, chain: Sequence[BlockRef], deadline: int, *, as_sealed: bool) -> PinnedPrefix:
        """What the pool has, after any load that is fetching the next block right now."""
        engine = self._node.engine
        while True:
            pinned = engine.pin_local(chain, as_sealed=as_sealed)
            local = len(pinned.block_ids)
            other = self._loading.get(chain[local].hash) if local < len(chain) else None
            if other is None or time.monotonic_ns() >= deadline:
                return pinned
            engine.release(pinned)
            try:
                async with asyncio.timeout(_seconds_until(deadline)):
                    await other.wait()
            except TimeoutError:
                pass

    async def _fetch_once(self, load: _Load) -> FetchedRun:
        first_missing = load.chain[len(load.pinned.block_ids)].hash
        over = self._loading[first_missing] = asyncio.Event()
        try:
            return await self._fetch(load)
        finally:
            if self._loading.get(first_missing) is over:
                del self._loading[first_missing]
            over.set()

    async def _fetch(self, load: _Load) -> FetchedRun:
        """What the store has now of the blocks behind the pinned ones, under a lease on exactly that."""
        node, pinned = self._node, load.pinned
        local = len(pinned.block_ids)
        try:
            async with asyncio.timeout(to_seconds(self._policy.max_wait if load.pace is None else load.pace.most)):
                acquired = await node.store.acquire_prefix(node.key_space(load.namespace), load.chain[local:], as_sealed=load.as_sealed)
        except TimeoutError:
            return FetchedRun(ended_by="deadline")
        async with acquired as lease:
            engine = node.engine.load()
            tiers = [tier_name(copy.tier) for copy in lease.copies]
            plan = plan_fetch(
                tokens=load.tokens,
                block_tokens=node.block_tokens,
                local_blocks=local,
                store_tiers=tiers,
                room_blocks=engine.free_blocks,
                speeds=Speeds(fetch_blocks_per_s=self._speeds.planned_with(tiers), prefill_tokens_per_s=engine.prefill_tokens_per_s),
                continuation=load.continuation,
                policy=self._policy,
                pace=load.pace,
            )
            run = FetchedRun()
            if plan.fetch_blocks:
                block_ids = node.engine.allocate(pinned, plan.fetch_blocks)
                if block_ids is None:  # the engine took the room since
                    return FetchedRun(left_for_room=len(lease), ended_by="no_room")
                run = await self._fill(lease, load, block_ids, plan.pace)
            load.pace = plan.pace.after(blocks=run.blocks, took=run.took)
            if plan.left_for_room and not run.ended_by:
                run.left_for_room, run.ended_by = plan.left_for_room, "no_room"
            elif plan.fetch_blocks < len(lease) and not run.ended_by:
                run.ended_by = "too_slow"
            return run

    async def _fill(self, lease: PrefixLease, load: _Load, block_ids: list[int], pace: FetchPace) -> FetchedRun:
        node = self._node
        local = len(load.pinned.block_ids)
        run = await fetch_run(
            node.store,
            lease,
            node.codec,
            node.executor,
            [node.engine.block_array(block_id) for block_id in block_ids],
            first=0,
            start_position=local * node.block_tokens,
            allowed=pace.allowed,
        )
        refs = load.chain[local : local + run.blocks]
        node.engine.adopt(load.pinned, refs, block_ids[: run.blocks], canonical=run.canonical)
        if run.ended_by in ("", "deadline"):
            for tier, came in run.arrivals.items():
                late = run.ended_by == "deadline" and came.blocks < came.asked
                self._speeds.observe(tier, blocks=came.blocks, took=run.took if late else came.last_at, given_up=late)
        return run

    def _count(self, loaded: LoadedPrefix, run: FetchedRun) -> None:
        block_tokens = self._node.block_tokens
        metrics.hit_tokens.labels(tier="pool").inc(loaded.local_blocks * block_tokens)
        for tier, blocks in run.tiers.items():
            metrics.hit_tokens.labels(tier=tier).inc(blocks * block_tokens)
        metrics.hit_tokens.labels(tier="recompute").inc(loaded.recompute_tokens)
        metrics.prefix_load_seconds.labels(outcome=run.ended_by or "whole").observe(loaded.took / 1e9)


def _seconds_until(deadline: int) -> float:
    return max(0.0, (deadline - time.monotonic_ns()) / 1e9)
