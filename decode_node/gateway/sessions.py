"""A session: one answer from its first token to its last, on as many decode nodes as it takes.

Failover has no code of its own: an attempt is always prompt plus tokens so far, and the first attempt is the one with none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from decode_node.gateway.fleet import DecodeNode, Fleet
from decode_node.gateway.leaving import Leaving
from decode_node.gateway.metrics import GatewayMetrics
from decode_node.gateway.nodes import FinishedOut, FinishReason, GenerateCall, ModelIdentity, PrefixLoaded, Sampling, TokenOut
from decode_node.gateway.router import PrefixAffinity, RoutingPolicy, choose_decode
from decode_node.gateway.transcript import PositionFault, Transcript
from decode_node.gateway.watched_stream import AttemptFailed, FailoverReason, StreamPatience, WatchedStream
from decode_node.published import PublishedPrefix
from kvstore.clock import Clock
from kvstore.errors import InvalidRequest, LarderError, Overloaded, Unavailable
from kvstore.ids import BlockRef, Namespace, NodeId
from kvstore.units import Nanos, milliseconds, to_seconds

logger = logging.getLogger(__name__)

_FIRST_PAUSE = milliseconds(50)
_LONGEST_PAUSE = milliseconds(800)


class SessionState(StrEnum):
    PREPARING = "preparing"
    """Tokenized; asking the store and, if need be, a prefill node."""
    CONNECTING = "connecting"
    """Handed to a decode node that has not sent a token yet."""
    STREAMING = "streaming"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    request_id: str
    namespace: Namespace
    identity: ModelIdentity
    prompt_token_ids: Sequence[int]
    chain: Sequence[BlockRef]
    """Of the prompt's full blocks."""
    sampling: Sampling
    max_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int] = ()
    top_logprobs: int | None = None
    """None: no logprobs; else so many of the likeliest beside each token's own."""
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    patience: StreamPatience
    no_node: Nanos
    failures_in_a_row: int


@dataclass(slots=True)
class SessionStory:
    """What happened to a session, for its usage record."""

    loaded: PrefixLoaded | None = None
    """Where the first decode node found blocks; None until it said so."""
    recoded: bool = False
    """Some node had re-coded blocks for it."""
    failovers: int = 0
    moves: int = 0
    """From nodes that drained, with a successor prepared; no failovers."""
    decode_nodes: list[NodeId] = field(default_factory=list)
    """In order of use; a node that failed before its first event counts."""
    first_token_at: Nanos | None = None
    last_token_at: Nanos | None = None
    longest_gap: Nanos = Nanos(0)
    """Between two tokens."""
    longest_notice: Nanos = Nanos(0)
    """From the last sign of life of a node that failed until that was noticed: at least what noticing took."""
    longest_takeover: Nanos = Nanos(0)
    """From the end of one node's stream, failed or moved from, to the next token."""
    left_at: Nanos | None = None
    """When the last node's stream ended; None when a token came since."""


class Session:
    def __init__(
        self,
        request: SessionRequest,
        *,
        fleet: Fleet,
        affinity: PrefixAffinity,
        policy: RoutingPolicy,
        limits: SessionLimits,
        metrics: GatewayMetrics,
        clock: Clock,
    ) -> None:
        self.request = request
        self.transcript = Transcript(request.prompt_token_ids, max_tokens=request.max_tokens)
        self.story = SessionStory()
        self.state = SessionState.PREPARING
        self.decode_node: NodeId | None = None
        self.finish_reason: FinishReason | None = None
        self._fleet = fleet
        self._affinity = affinity
        self._policy = policy
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._leaving = Leaving(namespace=request.namespace, identity=request.identity, fleet=fleet, policy=policy)

    async def tokens(self, published: PublishedPrefix | None = None) -> AsyncGenerator[TokenOut, None]:
        """Yield each token of the answer once, in order; afterwards `finish_reason` is set. Closing it cancels the work everywhere.
        `published` follows the prefill stage that goes on meanwhile.

        Raises InvalidRequest (the node refuses the prompt), Overloaded or Unavailable (no node could serve, or go on with, the answer).
        """
        failed: list[NodeId] = []
        failures = 0
        try:
            while self.finish_reason is None:
                node = self._leaving.successor() or await self._choose(failed)
                tokens_before = len(self.transcript.generated_token_ids)
                try:
                    async with aclosing(self._attempt(node, published)) as attempt:
                        async for token in attempt:
                            yield token
                except AttemptFailed as failure:
                    if len(self.transcript.generated_token_ids) > tokens_before:
                        failed, failures = [], 0
                    failed.append(node.member.node_id)
                    failures += 1
                    self._note_failure(node, failure)
                    if self._ended_without_its_node():
                        break
                    if failures >= self._limits.failures_in_a_row and not self._has_time_to_go_on():
                        raise self._gave_up(failures, failure) from None
                    await self._pause_if_all_failed(failed, failures)
        finally:
            self._leaving.stop()
            self.state = SessionState.ENDED
            self.decode_node = None

    async def _attempt(self, node: DecodeNode, published: PublishedPrefix | None) -> AsyncGenerator[TokenOut, None]:
        request, node_id = self.request, node.member.node_id
        self.state = SessionState.CONNECTING
        self.decode_node = node_id
        self.story.decode_nodes.append(node_id)
        call = GenerateCall(
            request_id=f"{request.request_id}-{len(self.story.decode_nodes)}",
            namespace=request.namespace,
            prompt_token_ids=request.prompt_token_ids,
            generated_token_ids=tuple(self.transcript.generated_token_ids),
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
            stop_token_ids=request.stop_token_ids,
            top_logprobs=request.top_logprobs,
            priority=request.priority,
            recoded=self.story.recoded,
            published=published,
        )
        with node.busy():
            async with node.backend.generate(call) as stream:
                watched = WatchedStream(stream, patience=self._limits.patience, pace=node.pace, clock=self._clock, published=published)
                while True:
                    try:
                        event = await self._next_event(watched)
                    except AttemptFailed as failure:
                        self._note_loss(watched, failure)
                        raise
                    if isinstance(event, TokenOut):
                        if self.state is SessionState.CONNECTING:
                            self._affinity.remember(request.chain, node_id)
                        self._take(event)
                        node.on_call_succeeded()
                        yield event
                        if not node.is_open and self._leaving.is_prepared(self.transcript.token_ids, recoded=self.story.recoded):
                            self.story.moves += 1
                            self.story.left_at = self._clock.now()
                            self._metrics.moves.inc()
                            return
                    elif isinstance(event, FinishedOut):
                        if event.reason is FinishReason.LENGTH and self._could_be_longer():
                            raise AttemptFailed(FailoverReason.INCOMPLETE, Unavailable("no room for the rest of the answer"))
                        node.on_call_succeeded()
                        self.finish_reason = event.reason
                        return
                    else:
                        self.story.recoded |= event.recoded
                        self.story.loaded = self.story.loaded or event

    def _could_be_longer(self) -> bool:
        """A node of a smaller pool ends an answer where that is full; another one may go on."""
        asked = len(self.transcript.generated_token_ids) < self.request.max_tokens
        return asked and self._fleet.has_room_beyond(len(self.transcript), identity=self.request.identity)

    async def _next_event(self, watched: WatchedStream) -> PrefixLoaded | TokenOut | FinishedOut:
        try:
            return await watched.next()
        except InvalidRequest as error:
            if not self.transcript.generated_token_ids:
                raise
            # Another node took this very prompt: what this one refuses is its own smallness.
            raise AttemptFailed(FailoverReason.ERROR, error) from None

    def _take(self, event: TokenOut) -> None:
        try:
            self.transcript.take(token_id=event.token_id, position=event.position)
        except PositionFault as fault:
            raise AttemptFailed(FailoverReason.POSITION, Unavailable(str(fault))) from None
        now, story = self._clock.now(), self.story
        if story.first_token_at is None:
            story.first_token_at = now
        elif story.last_token_at is not None:
            gap = Nanos(now - story.last_token_at)
            story.longest_gap = max(story.longest_gap, gap)
            self._metrics.itl.observe(to_seconds(gap))
            if story.left_at is not None:
                takeover = Nanos(now - story.left_at)
                story.longest_takeover = max(story.longest_takeover, takeover)
                self._metrics.takeover.observe(to_seconds(takeover))
        story.last_token_at, story.left_at = now, None
        self.state = SessionState.STREAMING

    async def _choose(self, failed: Sequence[NodeId]) -> DecodeNode:
        """The next node. A session that has begun waits for one to appear; a new one is refused at once."""
        preferred = self._affinity.lookup(self.request.chain)
        deadline = self._clock.now() + self._limits.no_node
        while True:
            node_id = choose_decode(
                self._fleet.decode_candidates(self.request.identity), preferred=preferred, excluded=failed, policy=self._policy
            )
            if node_id is not None:
                return self._fleet.decode.nodes[node_id]
            if not self.transcript.generated_token_ids or self._clock.now() >= deadline:
                raise Unavailable("no decode node is there to serve this; try again later")
            await asyncio.sleep(to_seconds(_FIRST_PAUSE))

    def _note_loss(self, watched: WatchedStream, failure: AttemptFailed) -> None:
        now, story = self._clock.now(), self.story
        if story.left_at is None:
            story.left_at = now
        if failure.reason is not FailoverReason.OVERLOADED:
            notice = Nanos(now - watched.heard_at)
            story.longest_notice = max(story.longest_notice, notice)
            self._metrics.notice.labels(reason=failure.reason).observe(to_seconds(notice))

    def _note_failure(self, node: DecodeNode, failure: AttemptFailed) -> None:
        node_id = node.member.node_id
        if failure.reason is not FailoverReason.OVERLOADED:
            node.on_call_failed(self._clock.now(), silent=failure.reason is FailoverReason.SILENT)
            self.story.failovers += 1
        self._metrics.failovers.labels(reason=failure.reason).inc()
        logger.warning(
            "request %s: decode node %s failed at token %d (%s): %s",
            self.request.request_id,
            node_id,
            len(self.transcript.generated_token_ids),
            failure.reason,
            failure,
        )

    def _ended_without_its_node(self) -> bool:
        """The node died between the last token and saying so: nothing is left to hand over."""
        if len(self.transcript.generated_token_ids) >= self.request.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason is not None

    def _has_time_to_go_on(self) -> bool:
        """A client that has read half an answer cannot ask again: nodes that died are given the time to come back that `no_node` gives to
        one that is not even listed. Until Redis calls a dead node dead, it is a candidate, and six refused connections take 3 s."""
        last_token_at = self.story.last_token_at
        return last_token_at is not None and self._clock.now() - last_token_at < self._limits.no_node

    async def _pause_if_all_failed(self, failed: Sequence[NodeId], failures: int) -> None:
        """Going back to a node that has just failed, give it time to come back; another one is asked at once."""
        candidates = self._fleet.decode_candidates(self.request.identity)
        if all(candidate.node_id in failed for candidate in candidates):
            await asyncio.sleep(to_seconds(Nanos(min(_LONGEST_PAUSE, _FIRST_PAUSE << failures))))

    def _gave_up(self, failures: int, failure: AttemptFailed) -> LarderError:
        if failure.reason is FailoverReason.OVERLOADED:
            return Overloaded("all decode nodes are busy; try again later")
        where = f"after {len(self.transcript.generated_token_ids)} tokens" if self.transcript.generated_token_ids else "at its start"
        return Unavailable(f"{failures} attempts at this answer failed in a row {where}; the last one: {failure.reason}")


class SessionTable:
    """The live sessions, for admission and for operators."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    @contextmanager
    def admitted(self, session: Session) -> Iterator[None]:
        """Lists the session while it lives. Raises Overloaded when there are too many."""
        if len(self._sessions) >= self._limit:
            raise Overloaded(f"{self._limit} answers are in progress, as many as this gateway takes; try again later")
        self._sessions[session.request.request_id] = session
        try:
            yield
        finally:
            del self._sessions[session.request.request_id]
