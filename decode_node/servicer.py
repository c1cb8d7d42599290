"""DecodeService on the wire: messages to a DecodeSession and back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from kvpb.v1 import decode_pb2, decode_pb2_grpc

from decode_node.loader import PrefixLoader
from decode_node.published import PublishedPrefix
from decode_node.session import DecodeSession, Finished, GenerateCall, Loaded, NextToken, SessionEvent
from kvstore.errors import InvalidRequest
from kvstore.rpc.server import guarded
from kvstore.units import Nanos
from prefill_node.compute_node import ComputeNode
from prefill_node.engine.request import FinishReason, Logprobs, SamplingParams
from prefill_node.limits import check_namespace

_REASON = {FinishReason.STOP: decode_pb2.FINISH_REASON_STOP, FinishReason.LENGTH: decode_pb2.FINISH_REASON_LENGTH}


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):  # type: ignore[misc]  # generated code has no types
    def __init__(self, node: ComputeNode, loader: PrefixLoader, *, heartbeat_every: Nanos) -> None:
        self._node = node
        self._loader = loader
        self._heartbeat_every = heartbeat_every
        self._calls = itertools.count()

    @guarded
    async def Generate(self, inputs: AsyncIterator[decode_pb2.GenerateInput], context: Any) -> None:
        first = await anext(inputs, None)
        if first is None or not first.HasField("request"):
            raise InvalidRequest("the first input of Generate is the request")
        published = PublishedPrefix()
        following = asyncio.ensure_future(_follow(inputs, published))
        try:
            await self._generate(first.request, published, context)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    @guarded
    async def Prepare(self, request: decode_pb2.PrepareRequest, context: Any) -> decode_pb2.PrepareResponse:
        check_namespace(request.namespace)
        self._node.limits.check_prompt(request.token_ids, room_for=1)
        loaded = await self._loader.load(request.namespace, tuple(request.token_ids), continuation=True, as_sealed=not request.recoded)
        # Kept in the pool until it needs the room: long after the stream has come.
        self._node.engine.release(loaded.pinned)
        return decode_pb2.PrepareResponse(blocks=loaded.local_blocks + loaded.store_blocks)

    async def _generate(self, request: decode_pb2.GenerateRequest, published: PublishedPrefix, context: Any) -> None:
        call = GenerateCall(
            # A stream may come back to a node that still tears down its first try: the number tells them apart.
            request_id=f"{request.request_id}/{next(self._calls)}",
            namespace=request.namespace,
            prompt=tuple(request.prompt_token_ids),
            generated=tuple(request.generated_token_ids),
            sampling=_sampling(request.sampling),
            top_logprobs=request.top_logprobs if request.HasField("top_logprobs") else None,
            max_tokens=request.max_tokens,
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            priority=request.priority,
            recoded=request.recoded,
            published=published,
        )
        session = DecodeSession(call, self._node, self._loader, heartbeat_every=self._heartbeat_every)
        async with aclosing(session.events()) as events:
            async for event in events:
                await context.write(_to_proto(event))

    @guarded
    async def Load(self, request: decode_pb2.DecodeLoadRequest, context: Any) -> decode_pb2.DecodeLoadResponse:
        node = self._node
        load = node.engine.load()
        return decode_pb2.DecodeLoadResponse(
            node_id=node.config.node_id,
            model=node.model.name,
            layout_fingerprint=node.model.layout.fingerprint,
            running=load.running,
            queued=load.queued,
            free_pool_blocks=load.free_blocks,
            total_pool_blocks=load.total_blocks,
            tokens_per_s=load.prefill_tokens_per_s,
            itl_ms=load.itl_ms,
            model_digest=node.model.model_digest,
            block_tokens=node.block_tokens,
            max_positions=node.limits.max_tokens,
        )


async def _follow(inputs: AsyncIterator[decode_pb2.GenerateInput], published: PublishedPrefix) -> None:
    """Until the caller half-closes, or the call ends."""
    try:
        async for message in inputs:
            published.note(message.published.blocks)
    finally:
        published.end()


def _sampling(asked: Any) -> SamplingParams:
    return SamplingParams(
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty or 1.0,
        logit_bias=tuple(sorted(asked.logit_bias.items())),
        seed=asked.seed,
    )


def _logprobs(found: Logprobs | None) -> decode_pb2.Logprobs | None:
    if found is None:
        return None
    return decode_pb2.Logprobs(
        logprob=found.logprob,
        top_token_ids=[token_id for token_id, _ in found.top],
        top_logprobs=[logprob for _, logprob in found.top],
    )


def _to_proto(event: SessionEvent) -> decode_pb2.GenerateEvent:
    if isinstance(event, NextToken):
        return decode_pb2.GenerateEvent(
            token=decode_pb2.Token(token_id=event.token_id, position=event.position, logprobs=_logprobs(event.logprobs))
        )
    if isinstance(event, Loaded):
        return decode_pb2.GenerateEvent(
            prefix_loaded=decode_pb2.PrefixLoaded(
                prompt_blocks=event.prompt_blocks,
                local_blocks=event.local_blocks,
                store_blocks=event.store_blocks,
                recomputed_tokens=event.recomputed_tokens,
                load_ms=event.load_ms,
                recoded=event.recoded,
            )
        )
    if isinstance(event, Finished):
        return decode_pb2.GenerateEvent(finished=decode_pb2.Finished(reason=_REASON[event.reason]))
    return decode_pb2.GenerateEvent(heartbeat=decode_pb2.Heartbeat())
