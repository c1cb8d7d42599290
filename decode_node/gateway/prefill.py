"""The prefill stage of a request: have the blocks that the store lacks computed and published, while the decode node fetches along.

Whatever goes wrong here costs time and nothing else: the decode node computes what is missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from decode_node.gateway.fleet import Fleet, PrefillNode
from decode_node.gateway.nodes import ModelIdentity, PrefillProgress
from decode_node.gateway.router import RoutingPolicy, choose_prefill
from decode_node.published import PublishedPrefix
from kvstore.clock import Clock
from kvstore.core.view import Role
from kvstore.errors import LarderError, Unavailable
from kvstore.ids import Namespace, NodeId
from kvstore.units import Nanos, seconds, to_seconds

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
"""A second node continues from the blocks that the first one published; a third failure is left to the decode node."""

_LONGEST_WAIT = seconds(600)
_LIVENESS_CHECK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReport:
    attempted: bool
    """False: the uncached tail is short, or no prefill node can be used."""
    cached_blocks: int = 0
    """Leading blocks that were there before; known when a node said so."""


@dataclass(slots=True)
class _Progress:
    """How far one attempt got, whether or not it ended well."""

    published: PublishedPrefix
    cached_blocks: int = 0
    published_blocks: int = 0

    def note(self, message: PrefillProgress) -> None:
        self.cached_blocks = max(self.cached_blocks, message.cached_blocks)
        self.published_blocks = max(self.published_blocks, message.published_blocks)
        self.published.note(message.published_blocks)


class PrefillStage:
    def __init__(self, fleet: Fleet, *, policy: RoutingPolicy, stall: Nanos, clock: Clock) -> None:
        self._fleet = fleet
        self._policy = policy
        self._stall = stall
        self._clock = clock

    def decode_at(self, *, uncached_tokens: int, identity: ModelIdentity) -> NodeId | None:
        """The node of choice if it decodes as well: it computes the prompt as part of the answer, without the detour over the store."""
        candidates = self._fleet.prefill_candidates(identity)
        node_id = choose_prefill(candidates, uncached_tokens=uncached_tokens, policy=self._policy)
        return node_id if node_id is not None and self._fleet.prefill.nodes[node_id].member.role is Role.BOTH else None

    async def run(
        self,
        *,
        request_id: str,
        namespace: Namespace,
        token_ids: Sequence[int],
        cached_tokens: int,
        block_tokens: int,
        identity: ModelIdentity,
        published: PublishedPrefix,
        priority: int,
    ) -> PrefillReport:
        """Return when all full blocks of the prompt are in the store, or cannot get there; `published` follows, and is over then.

        `cached_tokens` are in the store already. A node that fails is replaced once by another.
        """
        try:
            return await self._run(
                request_id=request_id,
                namespace=namespace,
                token_ids=token_ids,
                cached_tokens=cached_tokens,
                block_tokens=block_tokens,
                identity=identity,
                published=published,
                priority=priority,
            )
        finally:
            published.end()

    async def _run(
        self,
        *,
        request_id: str,
        namespace: Namespace,
        token_ids: Sequence[int],
        cached_tokens: int,
        block_tokens: int,
        identity: ModelIdentity,
        published: PublishedPrefix,
        priority: int,
    ) -> PrefillReport:
        tried: list[NodeId] = []
        cached_blocks: int | None = None
        while len(tried) < MAX_ATTEMPTS:
            uncached = len(token_ids) // block_tokens * block_tokens - cached_tokens
            node_id = choose_prefill(
                self._fleet.prefill_candidates(identity), uncached_tokens=uncached, excluded=tried, policy=self._policy
            )
            if node_id is None:
                break
            node = self._fleet.prefill.nodes[node_id]
            if node.member.role is Role.BOTH:
                return PrefillReport(attempted=bool(tried), cached_blocks=cached_blocks or 0)
            tried.append(node_id)
            progress = _Progress(published)
            try:
                with node.busy(tokens=uncached):
                    opened = node.backend.prefill(
                        request_id=f"{request_id}-p{len(tried)}", namespace=namespace, token_ids=token_ids, priority=priority
                    )
                    await self._attempt(node, opened, progress)
                node.on_call_succeeded()
                return PrefillReport(attempted=True, cached_blocks=progress.cached_blocks if cached_blocks is None else cached_blocks)
            except LarderError as error:
                node.on_call_failed(self._clock.now())
                logger.warning(
                    "request %s: prefill node %s gave up after %d blocks: %s", request_id, node_id, progress.published_blocks, error
                )
            if cached_blocks is None:
                cached_blocks = progress.cached_blocks
            cached_tokens = max(cached_tokens, progress.published_blocks * block_tokens)
        return PrefillReport(attempted=bool(tried), cached_blocks=cached_blocks or 0)

    async def _attempt(
        self, node: PrefillNode, opened: AbstractAsyncContextManager[AsyncIterator[PrefillProgress]], progress: _Progress
    ) -> None:
        """One node's try. Raises Unavailable also when it stops answering polls, or stalls beyond what its load explains."""
        patience = self._patience(node)
        async with opened as stream:
            while True:
                message = await self._next_message(stream, node, patience)
                progress.note(message)
                if message.done:
                    return

    def _patience(self, node: PrefillNode) -> Nanos:
        assert node.load is not None
        speed = node.load.tokens_per_s or self._policy.assumed_prefill_tokens_per_s
        waiting = max(node.load.queued_tokens, node.in_flight_tokens)
        return Nanos(min(_LONGEST_WAIT, self._stall + seconds(3 * waiting / speed)))

    async def _next_message(self, stream: AsyncIterator[PrefillProgress], node: PrefillNode, patience: Nanos) -> PrefillProgress:
        deadline = self._clock.now() + patience
        pending = asyncio.ensure_future(anext(stream, None))
        try:
            while not pending.done():
                await asyncio.wait({pending}, timeout=_LIVENESS_CHECK_S)
                if not pending.done() and not node.answers:
                    raise Unavailable("it stopped answering polls")
                if not pending.done() and self._clock.now() >= deadline:
                    raise Unavailable(f"no progress for {to_seconds(patience):.0f} s")
            message = pending.result()
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        if message is None:
            raise Unavailable("the stream ended before it was done")
        return message
