"""A prefix into the pool, before its sequence joins the batch: pinned where the pool has it, leased and fetched where the store has it.

Whatever goes wrong shortens the prefix, and the engine computes the rest: nothing here fails a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from decode_node.fetch_plan import FetchPolicy, FetchSpeed, Speeds, loadable_blocks, plan_fetch
from kvstore.client import PrefixLease
from kvstore.ids import BlockHash, BlockRef
from kvstore.units import Nanos
from prefill_node import metrics
from prefill_node.compute_node import ComputeNode
from prefill_node.engine.request import PinnedPrefix
from prefill_node.prefix import FetchedRun, fetch_run, give_back_reserved

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


class PrefixLoader:
    """One per node; lives on the event loop."""

    def __init__(self, node: ComputeNode, *, policy: FetchPolicy) -> None:
        self._node = node
        self._policy = policy
        self._speed = FetchSpeed()
        self._loading: dict[BlockHash, asyncio.Event] = {}

    async def load(self, namespace: str, token_ids: Sequence[int], *, continuation: bool) -> LoadedPrefix:
        """The longest prefix that pool and store give within the policy's `max_wait`. Raises only what cancels it, and then holds
        nothing. Loads of the same blocks at the same time fetch them once."""
        node = self._node
        started = time.monotonic_ns()
        deadline = started + self._policy.max_wait
        usable = loadable_blocks(len(token_ids), block_tokens=node.block_tokens)
        chain = node.chain(namespace, token_ids)[:usable]
        pinned = await self._pin(chain, deadline)
        try:
            local = len(pinned.block_ids)
            run = FetchedRun()
            if local < usable:
                run = await self._fetch_once(namespace, chain, pinned, tokens=len(token_ids), continuation=continuation, deadline=deadline)
        except asyncio.CancelledError:
            node.engine.release(pinned)
            raise
        except Exception:
            # A bug in taking from the cache is still cache trouble: the request is computed.
            log.exception("loading a prefix of %d blocks raised", usable)
            run = FetchedRun(ended_by="internal")
        give_back_reserved(node.engine, pinned)
        loaded = LoadedPrefix(
            pinned=pinned,
            local_blocks=local,
            store_blocks=run.blocks,
            recompute_tokens=len(token_ids) - (local + run.blocks) * node.block_tokens,
            took=Nanos(time.monotonic_ns() - started),
            fetchable_blocks=run.left_for_room and local + run.blocks + run.left_for_room,
        )
        self._count(loaded, run)
        return loaded

    async def _pin(self, chain: Sequence[BlockRef], deadline: int) -> PinnedPrefix:
        """What the pool has, after any load that is fetching the next block right now."""
        engine = self._node.engine
        while True:
            pinned = engine.pin_local(chain)
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

    async def _fetch_once(
        self, namespace: str, chain: Sequence[BlockRef], pinned: PinnedPrefix, *, tokens: int, continuation: bool, deadline: int
    ) -> FetchedRun:
        first_missing = chain[len(pinned.block_ids)].hash
        over = self._loading[first_missing] = asyncio.Event()
        try:
            return await self._fetch(namespace, chain, pinned, tokens=tokens, continuation=continuation, deadline=deadline)
        finally:
            if self._loading.get(first_missing) is over:
                del self._loading[first_missing]
            over.set()

    async def _fetch(
        self, namespace: str, chain: Sequence[BlockRef], pinned: PinnedPrefix, *, tokens: int, continuation: bool, deadline: int
    ) -> FetchedRun:
        node = self._node
        local = len(pinned.block_ids)
        try:
            async with asyncio.timeout(_seconds_until(deadline)):
                acquired = await node.store.acquire_prefix(node.key_space(namespace), chain[local:])
        except TimeoutError:
            return FetchedRun(ended_by="deadline")
        async with acquired as lease:
            started = time.monotonic_ns()
            plan = plan_fetch(
                tokens=tokens,
                block_tokens=node.block_tokens,
                local_blocks=local,
                store_blocks=len(lease),
                room_blocks=node.engine.load().free_blocks,
                speeds=Speeds(fetch_blocks_per_s=self._speed.planned_with(), prefill_tokens_per_s=node.engine.load().prefill_tokens_per_s),
                continuation=continuation,
                policy=self._policy,
            )
            if not plan.fetch_blocks:
                return FetchedRun(left_for_room=plan.left_for_room, ended_by="no_room" if plan.left_for_room else "")
            block_ids = node.engine.allocate(pinned, plan.fetch_blocks)
            if block_ids is None:  # the engine took the room since
                return FetchedRun(left_for_room=len(lease), ended_by="no_room")
            wait = Nanos(max(0, min(deadline, started + plan.wait) - time.monotonic_ns()))
            run = await self._fill(lease, chain[local:], pinned, block_ids, first_position=local * node.block_tokens, wait=wait)
            if plan.left_for_room and not run.ended_by:
                run.left_for_room, run.ended_by = plan.left_for_room, "no_room"
            return run

    async def _fill(
        self,
        lease: PrefixLease,
        chain: Sequence[BlockRef],
        pinned: PinnedPrefix,
        block_ids: list[int],
        *,
        first_position: int,
        wait: Nanos,
    ) -> FetchedRun:
        node = self._node
        started = time.monotonic_ns()
        run = await fetch_run(
            node.store,
            lease,
            node.codec,
            node.executor,
            [node.engine.block_array(block_id) for block_id in block_ids],
            first=0,
            start_position=first_position,
            wait=wait,
        )
        node.engine.adopt(pinned, chain[: run.blocks], block_ids[: run.blocks])
        if run.ended_by in ("", "deadline"):
            self._speed.observe(blocks=run.blocks, took=Nanos(time.monotonic_ns() - started))
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
