"""The gRPC side of nodes.py: the only file of the gateway that knows stubs, channels and status codes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from kvpb.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, store_pb2, store_pb2_grpc

from decode_node.gateway.nodes import (
    DecodeLoad,
    FinishedOut,
    FinishReason,
    GenerateCall,
    GenerateEvent,
    Heartbeat,
    Logprobs,
    ModelIdentity,
    PrefillLoad,
    PrefillProgress,
    PrefixLoaded,
    TokenOut,
)
from decode_node.published import PublishedPrefix
from kvstore.errors import Unavailable
from kvstore.ids import HASH_BYTES, LayoutFingerprint, Namespace, NodeId
from kvstore.rpc.errors import error_of
from kvstore.units import Nanos, to_seconds

_CHANNEL_OPTIONS = (
    # A node that restarts is used again after a second, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # The gateway decides about a second attempt; a transparent one could double a token.
    ("grpc.enable_retries", 0),
    # A host that vanished without a FIN is noticed although nothing is sent to it.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

_FINISH_REASONS = {
    decode_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    decode_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


class GrpcBackends:
    """Opens nodes by address."""

    def decode(self, node_id: NodeId, address: str) -> GrpcDecodeBackend:
        return GrpcDecodeBackend(node_id, address)

    def prefill(self, node_id: NodeId, address: str) -> GrpcPrefillBackend:
        return GrpcPrefillBackend(node_id, address)

    def store(self, node_id: NodeId, address: str) -> GrpcStoreBackend:
        return GrpcStoreBackend(node_id, address)


class GrpcDecodeBackend:
    def __init__(self, node_id: NodeId, address: str) -> None:
        self._node_id = node_id
        self._channel = _channel(address)
        self._stub = decode_pb2_grpc.DecodeServiceStub(self._channel)

    async def load(self, *, timeout: Nanos) -> DecodeLoad:
        answer = await _unary(self._stub.Load(decode_pb2.DecodeLoadRequest(), timeout=to_seconds(timeout)))
        if answer.block_tokens == 0 or answer.max_positions == 0:
            raise Unavailable(f"decode node {self._node_id} does not say its block size and context limit")
        return DecodeLoad(
            identity=_identity(answer),
            model=answer.model,
            block_tokens=answer.block_tokens,
            max_positions=answer.max_positions,
            sequences=answer.running + answer.queued,
        )

    @asynccontextmanager
    async def generate(self, call: GenerateCall) -> AsyncIterator[AsyncIterator[GenerateEvent]]:
        request = decode_pb2.GenerateRequest(
            request_id=call.request_id,
            namespace=call.namespace,
            prompt_token_ids=call.prompt_token_ids,
            generated_token_ids=call.generated_token_ids,
            sampling=decode_pb2.Sampling(
                temperature=call.sampling.temperature,
                top_k=call.sampling.top_k,
                top_p=call.sampling.top_p,
                min_p=call.sampling.min_p,
                presence_penalty=call.sampling.presence_penalty,
                frequency_penalty=call.sampling.frequency_penalty,
                repetition_penalty=call.sampling.repetition_penalty,
                logit_bias=call.sampling.logit_bias,
                seed=call.sampling.seed,
            ),
            max_tokens=call.max_tokens,
            stop_token_ids=call.stop_token_ids,
            ignore_eos=call.ignore_eos,
            top_logprobs=call.top_logprobs,
            priority=call.priority,
            recoded=call.recoded,
        )
        stream = self._stub.Generate(_inputs(request, call.published))
        try:
            yield self._events(stream)
        finally:
            stream.cancel()

    async def prepare(self, *, namespace: Namespace, token_ids: Sequence[int], recoded: bool, timeout: Nanos) -> int:
        request = decode_pb2.PrepareRequest(namespace=namespace, token_ids=token_ids, recoded=recoded)
        return int((await _unary(self._stub.Prepare(request, timeout=to_seconds(timeout)))).blocks)

    async def _events(self, stream: Any) -> AsyncIterator[GenerateEvent]:
        async for message in _messages(stream):
            kind = message.WhichOneof("event")
            if kind == "token":
                yield TokenOut(token_id=message.token.token_id, position=message.token.position, logprobs=_logprobs(message.token))
            elif kind == "heartbeat":
                yield Heartbeat()
            elif kind == "prefix_loaded":
                found = message.prefix_loaded
                yield PrefixLoaded(pool_blocks=found.local_blocks, store_blocks=found.store_blocks, recoded=found.recoded)
            elif kind == "finished" and message.finished.reason in _FINISH_REASONS:
                yield FinishedOut(reason=_FINISH_REASONS[message.finished.reason])
            else:
                raise Unavailable(f"decode node {self._node_id} sent an event that means nothing here: {kind}")

    async def close(self) -> None:
        await self._channel.close()


async def _inputs(request: decode_pb2.GenerateRequest, published: PublishedPrefix | None) -> AsyncIterator[decode_pb2.GenerateInput]:
    """The end of it half-closes the call: nothing more will be published."""
    yield decode_pb2.GenerateInput(request=request)
    blocks = 0
    while published is not None and await published.beyond(blocks):
        blocks = published.blocks
        yield decode_pb2.GenerateInput(published=decode_pb2.PublishedPrefix(blocks=blocks))


class GrpcPrefillBackend:
    def __init__(self, node_id: NodeId, address: str) -> None:
        self._node_id = node_id
        self._channel = _channel(address)
        self._stub = prefill_pb2_grpc.PrefillServiceStub(self._channel)

    async def load(self, *, timeout: Nanos) -> PrefillLoad:
        answer = await _unary(self._stub.Load(prefill_pb2.PrefillLoadRequest(), timeout=to_seconds(timeout)))
        return PrefillLoad(
            identity=_identity(answer),
            queued_tokens=answer.queued_tokens,
            tokens_per_s=answer.tokens_per_s,
        )

    @asynccontextmanager
    async def prefill(
        self, *, request_id: str, namespace: Namespace, token_ids: Sequence[int], priority: int
    ) -> AsyncIterator[AsyncIterator[PrefillProgress]]:
        request = prefill_pb2.PrefillRequest(request_id=request_id, namespace=namespace, token_ids=token_ids, priority=priority)
        stream = self._stub.Prefill(request)
        try:
            yield self._progress(stream)
        finally:
            stream.cancel()

    async def _progress(self, stream: Any) -> AsyncIterator[PrefillProgress]:
        async for message in _messages(stream):
            yield PrefillProgress(cached_blocks=message.cached_blocks, published_blocks=message.published_blocks, done=message.done)

    async def close(self) -> None:
        await self._channel.close()


class GrpcStoreBackend:
    def __init__(self, node_id: NodeId, address: str) -> None:
        self._channel = _channel(address)
        self._stub = store_pb2_grpc.StoreServiceStub(self._channel)

    async def hello(self, *, timeout: Nanos) -> bool:
        await _unary(self._stub.Hello(store_pb2.HelloRequest(), timeout=to_seconds(timeout)))
        return True

    async def close(self) -> None:
        await self._channel.close()


def _logprobs(token: Any) -> Logprobs | None:
    if not token.HasField("logprobs"):
        return None
    found = token.logprobs
    return Logprobs(logprob=found.logprob, top=tuple(zip(found.top_token_ids, found.top_logprobs, strict=True)))


def _channel(address: str) -> Any:
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


def _identity(answer: Any) -> ModelIdentity:
    if len(answer.layout_fingerprint) != HASH_BYTES or len(answer.model_digest) != HASH_BYTES:
        raise Unavailable(f"node {answer.node_id} does not say which model and layout it serves")
    return ModelIdentity(LayoutFingerprint(answer.layout_fingerprint), answer.model_digest)


async def _unary(call: Any) -> Any:
    try:
        return await call
    except grpc.RpcError as error:
        raise error_of(error) from None
    except asyncio.CancelledError:
        raise _cancelled() from None


async def _messages(stream: Any) -> AsyncIterator[Any]:
    try:
        async for message in stream:
            yield message
    except grpc.RpcError as error:
        raise error_of(error) from None
    except asyncio.CancelledError:
        raise _cancelled() from None


def _cancelled() -> BaseException:
    """What a CancelledError out of gRPC means: grpc.aio also raises it when the *peer* ends the call with CANCELLED, or the channel
    closed, and then nobody has cancelled this task."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        return asyncio.CancelledError()
    return Unavailable("the call was cancelled over there (CANCELLED)")
