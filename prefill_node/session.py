"""One Prefill call: take what the store has, compute the rest, tell how far the published run reaches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from kvstore.client import PrefixLease
from kvstore.errors import LarderError, Unavailable
from kvstore.ids import BlockRef, KeySpace
from prefill_node import metrics
from prefill_node.compute_node import ComputeNode
from prefill_node.engine.request import (
    EngineEvent,
    EngineRequest,
    FailedOut,
    FinishedOut,
    FinishReason,
    PinnedPrefix,
    PrefixWantedOut,
)
from prefill_node.limits import check_namespace
from prefill_node.prefix import fetch_run, give_back_reserved, settle
from prefill_node.publish import Publication

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCall:
    request_id: str
    """Unique among the calls of this process."""
    namespace: str
    token_ids: tuple[int, ...]
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    cached_blocks: int
    """Leading blocks that needed no compute."""
    published_blocks: int
    """Leading blocks now readable from the store."""
    prompt_blocks: int
    done: bool
    degraded: bool


class PrefillSession:
    _publication: Publication

    def __init__(self, call: PrefillCall, node: ComputeNode) -> None:
        self._call = call
        self._node = node
        self._error: LarderError | None = None
        self._submitted = False
        self._chain: tuple[BlockRef, ...] = ()
        self._stored = 0
        """Leading blocks that the store had at the start; there may have been no room for them."""
        self._refetching: asyncio.Future[None] | None = None

    async def progress(self) -> AsyncGenerator[Progress, None]:
        """Yield once at the start and once for each change; the last has `done`.

        Raises InvalidRequest before any work, Unavailable when the engine fails or the node drains. Closing the iterator stops the
        work within one step.
        """
        node, call = self._node, self._call
        check_namespace(call.namespace)
        node.limits.check_prompt(call.token_ids, room_for=0)
        chain = self._chain = node.chain(call.namespace, call.token_ids)
        key_space = node.key_space(call.namespace)
        self._publication = node.publisher.watch(key_space, chain)
        try:
            with node.sessions.entered(self):
                node.sealer.open(call.request_id, key_space)
                pinned = node.engine.pin_local(chain)
                try:
                    cached = await self._cached(pinned, chain, key_space)
                    if cached < len(chain):
                        self._submit(pinned, chain)
                    else:
                        self._publication.complete()
                finally:
                    if not self._submitted:
                        node.engine.release(pinned)
                async for progress in self._follow(cached, len(chain)):
                    yield progress
        finally:
            if self._submitted and not self._publication.is_complete:
                node.engine.cancel(call.request_id)
            if self._refetching is not None:
                self._refetching.cancel()
                await asyncio.wait((self._refetching,))
            node.sealer.close(call.request_id)
            node.publisher.forget(self._publication)

    def halt(self) -> None:
        if self._submitted:
            self._node.engine.cancel(self._call.request_id)

    def end(self, error: LarderError) -> None:
        self._error = error
        self._publication.complete()

    async def _cached(self, pinned: PinnedPrefix, chain: tuple[BlockRef, ...], key_space: KeySpace) -> int:
        """Bring pool and store to the same leading run as far as either has it; return its length in blocks."""
        node = self._node
        local = len(pinned.block_ids)
        async with await node.store.acquire_prefix(key_space, chain) as lease:
            stored = self._stored = len(lease)
            self._publication.note_readable(stored)
            if stored == len(chain):
                metrics.hit_tokens.labels(tier="pool").inc(local * node.block_tokens)
                return stored  # nothing to compute, so nothing to fetch either
            if stored > local:
                local += await self._fetch(pinned, chain, lease, first=local, end=stored)
        if local > stored and not pinned.recoded:
            await self._republish(pinned, chain, key_space, first=stored, end=local)
        return local

    async def _fetch(self, pinned: PinnedPrefix, chain: tuple[BlockRef, ...], lease: PrefixLease, *, first: int, end: int) -> int:
        """Blocks `first` to `end` of the lease into the pool; return how many of them made it."""
        node = self._node
        block_ids = node.engine.allocate(pinned, end - first)
        if block_ids is None:
            return 0
        run = await fetch_run(
            node.store,
            lease,
            node.codec,
            node.executor,
            [node.engine.block_array(block_id) for block_id in block_ids],
            first=first,
            start_position=first * node.block_tokens,
            allowed=lambda _: node.config.load_max_wait,
        )
        node.engine.adopt(pinned, chain[first : first + run.blocks], block_ids[: run.blocks], canonical=run.canonical)
        give_back_reserved(node.engine, pinned)
        for tier, blocks in run.tiers.items():
            metrics.hit_tokens.labels(tier=tier).inc(blocks * node.block_tokens)
        return run.blocks

    async def _republish(self, pinned: PinnedPrefix, chain: tuple[BlockRef, ...], key_space: KeySpace, *, first: int, end: int) -> None:
        """Put blocks `first` to `end` that the pool has and the store has lost."""
        node = self._node
        for index in range(first, end):
            if node.publisher.is_on_its_way((key_space, chain[index].hash)):
                continue  # another request has only just sealed it
            array = node.engine.block_array(pinned.block_ids[index])
            republish = node.executor.submit(node.sealer.republish, chain[index], array, index * node.block_tokens, self._call.request_id)
            await settle([republish])  # a cancel must not free the block while the worker still reads it
            republish.result()
        await asyncio.sleep(0)  # a turn of the loop lets offers that are already scheduled be counted; without it all may seem settled

    def _submit(self, pinned: PinnedPrefix, chain: tuple[BlockRef, ...]) -> None:
        node, call = self._node, self._call
        loop = asyncio.get_running_loop()

        def sink(event: EngineEvent) -> None:
            try:
                loop.call_soon_threadsafe(self._on_event, event)
            except RuntimeError:
                pass  # the loop is closed: the process ends, and nobody listens any more

        tokens = call.token_ids[: len(chain) * node.block_tokens]
        node.engine.submit(
            EngineRequest(
                request_id=call.request_id,
                token_ids=tokens,
                first_output=len(tokens),
                chain_root=node.root(call.namespace),
                prefix=pinned,
                max_new_tokens=0,
                priority=call.priority,
                refetch=True,
                fetchable=self._stored,
            ),
            sink,
        )
        self._submitted = True

    def _on_event(self, event: EngineEvent) -> None:
        if isinstance(event, FailedOut):
            self.end(Unavailable(f"the engine could not compute this prompt: {event.message}"))
        elif isinstance(event, FinishedOut) and event.reason is not FinishReason.CANCELLED:
            self._publication.complete()
        elif isinstance(event, PrefixWantedOut):
            self._refetching = asyncio.ensure_future(self._refetch())

    async def _refetch(self) -> None:
        """Another sequence needed this one's blocks, and now there is room again: what was published of them comes back, the rest is
        computed."""
        node, chain = self._node, self._chain
        pinned = node.engine.pin_local(chain)
        try:
            local = len(pinned.block_ids)
            async with await node.store.acquire_prefix(node.key_space(self._call.namespace), chain) as lease:
                if len(lease) > local:
                    await self._fetch(pinned, chain, lease, first=local, end=len(lease))
        except Exception:
            # Cache trouble: the engine waits for the word that it may go on.
            log.exception("fetching the blocks of a preempted prompt raised")
            give_back_reserved(node.engine, pinned)
        except asyncio.CancelledError:
            node.engine.release(pinned)
            raise
        node.engine.resume(self._call.request_id, pinned)

    async def _follow(self, cached: int, prompt_blocks: int) -> AsyncGenerator[Progress, None]:
        last: Progress | None = None
        while last is None or not last.done:
            if last is not None:
                await self._publication.changed()
            if self._error is not None:
                raise self._error
            progress = Progress(
                cached_blocks=cached,
                published_blocks=self._publication.readable_blocks,
                prompt_blocks=prompt_blocks,
                done=self._publication.done,
                degraded=self._publication.degraded,
            )
            if progress != last:
                yield progress
                last = progress
