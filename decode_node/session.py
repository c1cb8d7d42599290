"""One Generate call: load the prefix, join the batch, stream tokens, give a sign of life at least every 250 ms.

A successor's call is an ordinary one whose `generated` is not empty; there is no other code for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from decode_node import metrics
from decode_node.loader import LoadedPrefix, PrefixLoader
from decode_node.published import PublishedPrefix
from kvstore.errors import InvalidRequest, LarderError, Unavailable
from kvstore.units import Nanos, to_milliseconds, to_seconds
from prefill_node.compute_node import ComputeNode
from prefill_node.engine.request import (
    MAX_TOP_LOGPROBS,
    EngineEvent,
    EngineRequest,
    FailedOut,
    FinishedOut,
    FinishReason,
    Logprobs,
    PrefixWantedOut,
    SamplingParams,
    TokenOut,
)
from prefill_node.limits import Limits, check_namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    request_id: str
    """Unique among the calls of this process."""
    namespace: str
    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()
    """Tokens of the answer that the client already has."""
    sampling: SamplingParams
    top_logprobs: int | None = None
    """None: no logprobs; else so many of the likeliest beside each token's own."""
    max_tokens: int
    """Of the whole answer, `generated` included."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    recoded: bool = False
    """The tokens in `generated` come from re-coded blocks, at least in part: this node may use such too."""
    published: PublishedPrefix | None = None
    """How far a prefill node is that still publishes the prompt; None: none is at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    prompt_blocks: int
    local_blocks: int
    store_blocks: int
    recomputed_tokens: int
    load_ms: float
    recoded: bool = False
    """Some of these blocks are not as sealed."""


@dataclass(frozen=True, slots=True)
class NextToken:
    token_id: int
    position: int
    """Index in the answer, from 0; `generated` counts."""
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    """STOP or LENGTH."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    pass


SessionEvent = Loaded | NextToken | Finished | Heartbeat


def check_call(call: GenerateCall, limits: Limits) -> None:
    """Raises InvalidRequest that says what would be right."""
    check_namespace(call.namespace)
    limits.check_prompt(call.prompt, room_for=1)
    limits.check_ids(call.generated)
    limits.check_ids(call.stop_token_ids)
    limits.check_ids([token_id for token_id, _ in call.sampling.logit_bias])
    if call.top_logprobs is not None and call.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be at most {MAX_TOP_LOGPROBS}, not {call.top_logprobs}")
    if call.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1")
    if len(call.generated) > call.max_tokens:
        raise InvalidRequest(f"generated_token_ids has {len(call.generated)} tokens, more than max_tokens ({call.max_tokens})")
    if len(call.prompt) + len(call.generated) > limits.max_tokens:
        raise InvalidRequest(
            f"prompt and answer have {len(call.prompt) + len(call.generated)} tokens; at most {limits.max_tokens} fit into the context"
        )


class DecodeSession:
    def __init__(self, call: GenerateCall, node: ComputeNode, loader: PrefixLoader, *, heartbeat_every: Nanos) -> None:
        self._call = call
        self._node = node
        self._loader = loader
        self._heartbeat_s = to_seconds(heartbeat_every)
        self._events: asyncio.Queue[EngineEvent | LarderError] = asyncio.Queue()
        self._submitted = False
        self._halted = False
        self._tokens = [*call.prompt, *call.generated]
        self._refetching: asyncio.Future[None] | None = None
        self._recoded = call.recoded

    async def events(self) -> AsyncGenerator[SessionEvent, None]:
        """Loaded first, then the tokens, then Finished, with heartbeats where nothing else comes in time.

        Raises InvalidRequest before any work, Unavailable when the engine fails or the node drains: another node can go on from the
        tokens so far. Closing the iterator stops the work within one step and frees every block.
        """
        call, node = self._call, self._node
        check_call(call, node.limits)
        started = time.monotonic_ns()
        with node.sessions.entered(self):
            if (reason := self._over_already()) is not None:
                yield Finished(reason)
                return
            # A fetched prefix and an engine event are both awaited as one more event, so that a heartbeat fits between.
            loading = asyncio.ensure_future(
                self._loader.load(
                    call.namespace,
                    tuple(self._tokens),
                    continuation=bool(call.generated),
                    as_sealed=bool(call.generated) and not call.recoded,
                    published=call.published,
                )
            )
            finished = False
            try:
                while not loading.done():
                    await asyncio.wait((loading,), timeout=self._heartbeat_s)
                    if not self._events.empty():
                        self._raise_end(self._events.get_nowait())
                    if not loading.done():
                        yield Heartbeat()
                loaded = loading.result()
                self._recoded |= loaded.recoded
                self._submit(loaded)
                yield Loaded(
                    prompt_blocks=len(call.prompt) // node.block_tokens,
                    local_blocks=loaded.local_blocks,
                    store_blocks=loaded.store_blocks,
                    recomputed_tokens=loaded.recompute_tokens,
                    load_ms=to_milliseconds(loaded.took),
                    recoded=loaded.recoded,
                )
                first = True
                async for event in self._stream():
                    if first and isinstance(event, NextToken):
                        metrics.first_token_seconds.observe((time.monotonic_ns() - started) / 1e9)
                        first = False
                    finished = isinstance(event, Finished)
                    yield event
            finally:
                await self._release(loading, finished=finished)

    def halt(self) -> None:
        self._halted = True
        if self._submitted:
            self._node.engine.cancel(self._call.request_id)

    def end(self, error: LarderError) -> None:
        self._events.put_nowait(error)

    def _stop_ids(self) -> frozenset[int]:
        eos = frozenset() if self._call.ignore_eos else self._node.model.eos_token_ids
        return eos | frozenset(self._call.stop_token_ids)

    def _over_already(self) -> FinishReason | None:
        """A predecessor may have died between its last token and the word that it was the last."""
        call = self._call
        if call.generated and call.generated[-1] in self._stop_ids():
            return FinishReason.STOP
        if self._new_tokens() == 0:
            return FinishReason.LENGTH
        return None

    def _new_tokens(self) -> int:
        call = self._call
        room = self._node.limits.max_tokens - len(call.prompt) - len(call.generated)
        return min(call.max_tokens - len(call.generated), room)

    def _submit(self, loaded: LoadedPrefix) -> None:
        call, node = self._call, self._node
        loop = asyncio.get_running_loop()

        def sink(event: EngineEvent) -> None:
            try:
                loop.call_soon_threadsafe(self._events.put_nowait, event)
            except RuntimeError:
                pass  # the loop is closed: the process ends, and nobody listens any more

        node.sealer.open(call.request_id, node.key_space(call.namespace))
        node.engine.submit(
            EngineRequest(
                request_id=call.request_id,
                token_ids=tuple(self._tokens),
                first_output=len(call.prompt),
                chain_root=node.root(call.namespace),
                prefix=loaded.pinned,
                max_new_tokens=self._new_tokens(),
                sampling=call.sampling,
                top_logprobs=call.top_logprobs,
                stop_token_ids=self._stop_ids(),
                priority=call.priority,
                refetch=True,
                fetchable=loaded.fetchable_blocks,
                as_sealed=bool(call.generated) and not call.recoded,
            ),
            sink,
        )
        self._submitted = True
        if self._halted:
            node.engine.cancel(call.request_id)

    async def _stream(self) -> AsyncGenerator[SessionEvent, None]:
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    event = await self._events.get()
            except TimeoutError:
                yield Heartbeat()
                continue
            self._raise_end(event)
            if isinstance(event, TokenOut):
                self._tokens.append(event.token_id)
                yield NextToken(event.token_id, event.position, event.logprobs)
            elif isinstance(event, PrefixWantedOut):
                self._refetching = asyncio.ensure_future(self._refetch())
            elif isinstance(event, FinishedOut) and event.reason is not FinishReason.CANCELLED:
                yield Finished(event.reason)
                return

    async def _refetch(self) -> None:
        """Another sequence needed this one's blocks, and now there is room again: they come back like a successor's."""
        loaded = await self._loader.load(self._call.namespace, tuple(self._tokens), continuation=True, as_sealed=not self._recoded)
        self._node.engine.resume(self._call.request_id, loaded.pinned)

    def _raise_end(self, event: EngineEvent | LarderError) -> None:
        if isinstance(event, LarderError):
            raise event
        if isinstance(event, FailedOut):
            raise Unavailable(f"the engine failed on this request: {event.message}")

    async def _release(self, loading: asyncio.Future[LoadedPrefix], *, finished: bool) -> None:
        self._node.sealer.close(self._call.request_id)
        if self._submitted:
            if not finished:
                self._node.engine.cancel(self._call.request_id)
            if self._refetching is not None:
                self._refetching.cancel()
                await asyncio.wait((self._refetching,))
            return
        # The callback, not the wait below, frees the blocks: a second cancel may cut the wait short.
        loading.add_done_callback(self._release_unused)
        loading.cancel()
        await asyncio.wait((loading,))

    def _release_unused(self, loading: asyncio.Future[LoadedPrefix]) -> None:
        if not loading.cancelled() and loading.exception() is None:
            self._node.engine.release(loading.result().pinned)
