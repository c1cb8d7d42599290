"""Decode, prefill and store nodes without a model, behind real gRPC: a token is a function of (prompt, seed, position), so every
stream can be checked to the token whoever served it. Each can be told to misbehave in the ways real ones do.

`python oracle_nodes.py` serves one decode node in a process of its own, so that it can be killed and stopped by signals.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import wraps
from typing import Any

import grpc
from kvpb.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, store_pb2, store_pb2_grpc

from kvstore.core.chain import chain_of, root_hash
from kvstore.errors import InvalidRequest, LarderError, Overloaded, Unavailable
from kvstore.ids import BlockHash, BlockRef, KeySpace, LayoutFingerprint, Namespace
from kvstore.rpc.errors import status_code_of
from kvstore.rpc.server import bind, make_server

LAYOUT = LayoutFingerprint(b"L" * 32)
DIGEST = b"D" * 32
BLOCK_TOKENS = 4
MAX_POSITIONS = 512
VOCABULARY = 256


def oracle_token(prompt: Sequence[int], seed: int, position: int) -> int:
    """An id in [97, 123): a lower-case letter to a tokenizer whose ids are bytes."""
    digest = hashlib.sha256(struct.pack(f"<QQ{len(prompt)}I", seed, position, *prompt)).digest()
    return 97 + digest[0] % 26


def oracle_logprobs(request: decode_pb2.GenerateRequest, token_id: int, position: int) -> decode_pb2.Logprobs | None:
    """A function of the position alone, exact in float32; the likeliest are the token and those after it."""
    if not request.HasField("top_logprobs"):
        return None
    top = range(request.top_logprobs)
    return decode_pb2.Logprobs(
        logprob=-position / 8, top_token_ids=[token_id + i for i in top], top_logprobs=[-position / 8 - i for i in top]
    )


def streaming(method: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncIterator[Any]]:
    """A LarderError of a servicer's generator becomes its status code."""

    @wraps(method)
    async def guarded(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(method(self, request, context)) as answers:
                async for answer in answers:
                    yield answer
        except LarderError as error:
            await context.abort(status_code_of(error), str(error))

    return guarded


class Shelf:
    """What the store holds, in memory: hashes of published blocks. Counts the probes."""

    def __init__(self) -> None:
        self.hashes: set[BlockHash] = set()
        self.probes = 0
        self.failure: Exception | None = None

    async def probe_prefix(self, key_space: KeySpace, chain: Sequence[BlockRef]) -> int:
        self.probes += 1
        if self.failure is not None:
            raise self.failure
        for index, ref in enumerate(chain):
            if ref.hash not in self.hashes:
                return index
        return len(chain)

    def publish(self, ref: BlockRef) -> None:
        self.hashes.add(ref.hash)


class Node:
    """A gRPC server on a free port that can die and come back."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.address = ""
        self._awake = asyncio.Event()
        self._awake.set()
        self.digest = DIGEST
        self.cancelled = asyncio.Event()
        """Set when a caller has cancelled a stream."""
        self._server: Any = None

    def _register(self, server: Any) -> None:
        raise AssertionError

    async def start(self, port: int = 0) -> None:
        self._server = make_server()
        self._register(self._server)
        self.address = f"127.0.0.1:{bind(self._server, host='127.0.0.1', port=port)}"
        await self._server.start()

    async def kill(self) -> None:
        """Connections break off, as after kill -9."""
        await self._server.stop(None)

    async def restart(self) -> None:
        await self.start(int(self.address.rpartition(":")[2]))

    def freeze(self) -> None:
        """Answers nothing at all, connections stay open: SIGSTOP as seen from outside."""
        self._awake.clear()

    def thaw(self) -> None:
        self._awake.set()

    async def while_frozen(self) -> None:
        await self._awake.wait()


class DecodeNode(Node, decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, node_id: str, *, shelf: Shelf | None = None) -> None:
        super().__init__(node_id)
        self.shelf = shelf or Shelf()
        self.prefiller: PrefillNode | None = None
        """Serves the other service of a node of both roles."""
        self.requests: list[decode_pb2.GenerateRequest] = []
        self.published: list[list[int]] = []
        """Of each stream: what it was told of the prefill beside it, until there was no more to come."""
        self.prepared: list[decode_pb2.PrepareRequest] = []
        self.preparing: Callable[[], Awaitable[None]] | None = None
        """Awaited by each Prepare; may raise."""
        self.prepares_all = True
        """Else no Prepare brings a single block."""
        self.streams = 0
        self.pool_blocks = 0
        """Of what it finds, so much it says to have had itself."""
        self.recoded = False
        """It says that some of that is not as sealed."""
        self.script: Sequence[int] | None = None
        """Tokens of the answer instead of the oracle's; it ends after them."""
        self.token_pause_s = 0.0
        self.before_token: Callable[[int], None] | None = None
        """Called before each token with its position."""
        self.fail_at: dict[int, Exception] = {}
        """Position -> what is raised instead of that token; once."""
        self.abort_at: dict[int, str] = {}
        """Position -> the name of the gRPC status that ends the stream instead of that token; once."""
        self.end_early_at: int | None = None
        self.shift_from: int | None = None
        """From this position on every position is sent one too low: that token comes twice."""
        self.skip_at: int | None = None
        self.beyond_max = False
        self.silent_from: int | None = None
        """From this position on nothing comes, not even a heartbeat, while Load still answers."""
        self.only_heartbeats_from: int | None = None
        """From this position on the node lives, but no token comes."""
        self.refusal: LarderError | None = None
        self.max_positions = MAX_POSITIONS
        """An answer ends where this is reached."""

    def _register(self, server: Any) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)
        if self.prefiller is not None:
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self.prefiller, server)

    @streaming
    async def Generate(self, inputs: AsyncIterator[decode_pb2.GenerateInput], context: Any) -> AsyncIterator[decode_pb2.GenerateEvent]:
        await self.while_frozen()
        request = (await anext(inputs)).request
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        self.streams += 1
        # A cancel arrives in here as CancelledError, or as GeneratorExit when gRPC was just sending.
        over = False
        try:
            self.published.append([])
            telling = asyncio.ensure_future(self._told(inputs, self.published[-1]))
            while not telling.done():
                await asyncio.wait((telling,), timeout=0.1)
                await self.while_frozen()
                yield decode_pb2.GenerateEvent(heartbeat=decode_pb2.Heartbeat())
            async with aclosing(self._events(request, context)) as events:
                async for event in events:
                    over = event.HasField("finished")
                    yield event
        finally:
            self.streams -= 1
            if not over:
                self.cancelled.set()

    async def _told(self, inputs: AsyncIterator[decode_pb2.GenerateInput], published: list[int]) -> None:
        async for message in inputs:
            published.append(message.published.blocks)

    async def _events(self, request: decode_pb2.GenerateRequest, context: Any) -> AsyncGenerator[decode_pb2.GenerateEvent, None]:
        prompt = tuple(request.prompt_token_ids)
        chain = chain_of(
            prompt, block_tokens=BLOCK_TOKENS, root=root_hash(namespace=Namespace(request.namespace), model_digest=DIGEST, layout=LAYOUT)
        )
        held = await self.shelf.probe_prefix(KeySpace(Namespace(request.namespace), LAYOUT), chain)
        local = min(self.pool_blocks, held)
        loaded = decode_pb2.PrefixLoaded(prompt_blocks=len(chain), local_blocks=local, store_blocks=held - local, recoded=self.recoded)
        yield decode_pb2.GenerateEvent(prefix_loaded=loaded)
        end = request.max_tokens + (5 if self.beyond_max else 0)
        for position in range(len(request.generated_token_ids), end):
            if self.script is not None and position >= len(self.script):
                yield decode_pb2.GenerateEvent(finished=decode_pb2.Finished(reason=decode_pb2.FINISH_REASON_STOP))
                return
            if len(prompt) + position >= self.max_positions:
                break
            if self.before_token is not None:
                self.before_token(position)
            if self.token_pause_s:
                await asyncio.sleep(self.token_pause_s)
                yield decode_pb2.GenerateEvent(heartbeat=decode_pb2.Heartbeat())
            if position in self.fail_at:
                raise self.fail_at.pop(position)
            if position in self.abort_at:
                await context.abort(grpc.StatusCode[self.abort_at.pop(position)], "told to")
            if position == self.end_early_at:
                self.end_early_at = None
                return
            while self.only_heartbeats_from is not None and position >= self.only_heartbeats_from:
                yield decode_pb2.GenerateEvent(heartbeat=decode_pb2.Heartbeat())
                await asyncio.sleep(0.02)
            if self.silent_from is not None and position >= self.silent_from:
                await asyncio.Event().wait()
            await self.while_frozen()
            sent = position
            if self.shift_from is not None and position >= self.shift_from:
                sent = position - 1
            if self.skip_at is not None and position >= self.skip_at:
                sent = position + 1
            token_id = oracle_token(prompt, request.sampling.seed, sent) if self.script is None else self.script[sent]
            yield decode_pb2.GenerateEvent(
                token=decode_pb2.Token(token_id=token_id, position=sent, logprobs=oracle_logprobs(request, token_id, sent))
            )
        yield decode_pb2.GenerateEvent(finished=decode_pb2.Finished(reason=decode_pb2.FINISH_REASON_LENGTH))

    async def Prepare(self, request: decode_pb2.PrepareRequest, context: Any) -> decode_pb2.PrepareResponse:
        await self.while_frozen()
        self.prepared.append(request)
        if self.preparing is not None:
            try:
                await self.preparing()
            except LarderError as error:
                await context.abort(status_code_of(error), str(error))
        return decode_pb2.PrepareResponse(blocks=len(request.token_ids) // BLOCK_TOKENS if self.prepares_all else 0)

    async def Load(self, request: decode_pb2.DecodeLoadRequest, context: Any) -> decode_pb2.DecodeLoadResponse:
        await self.while_frozen()
        return decode_pb2.DecodeLoadResponse(
            node_id=self.node_id,
            model="oracle",
            layout_fingerprint=LAYOUT,
            running=self.streams,
            model_digest=self.digest,
            block_tokens=BLOCK_TOKENS,
            max_positions=self.max_positions,
        )


class PrefillNode(Node, prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, node_id: str, *, shelf: Shelf) -> None:
        super().__init__(node_id)
        self.shelf = shelf
        self.requests: list[prefill_pb2.PrefillRequest] = []
        self.die_after_blocks: int | None = None
        """Publishes so many blocks of each prompt and then fails."""
        self.hang_after_blocks: int | None = None
        self.queued_tokens = 0
        self.refusal: LarderError | None = None

    def _register(self, server: Any) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    @streaming
    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[prefill_pb2.PrefillProgress]:
        await self.while_frozen()
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        root = root_hash(namespace=Namespace(request.namespace), model_digest=DIGEST, layout=LAYOUT)
        chain = chain_of(tuple(request.token_ids), block_tokens=BLOCK_TOKENS, root=root)
        cached = await self.shelf.probe_prefix(KeySpace(Namespace(request.namespace), LAYOUT), chain)
        counts = {"cached_blocks": cached, "prompt_blocks": len(chain)}
        yield prefill_pb2.PrefillProgress(published_blocks=cached, **counts)
        try:
            for published, ref in enumerate(chain[cached:], cached + 1):
                if self.die_after_blocks is not None and published > self.die_after_blocks:
                    raise Unavailable("the prefill node dies")
                if self.hang_after_blocks is not None and published > self.hang_after_blocks:
                    await asyncio.Event().wait()
                await self.while_frozen()
                self.shelf.publish(ref)
                yield prefill_pb2.PrefillProgress(published_blocks=published, **counts)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise
        yield prefill_pb2.PrefillProgress(published_blocks=len(chain), done=True, **counts)

    async def Load(self, request: prefill_pb2.PrefillLoadRequest, context: Any) -> prefill_pb2.PrefillLoadResponse:
        await self.while_frozen()
        return prefill_pb2.PrefillLoadResponse(
            node_id=self.node_id,
            model="oracle",
            layout_fingerprint=LAYOUT,
            model_digest=self.digest,
            tokens_per_s=1000.0,
            queued_tokens=self.queued_tokens,
        )


class StoreNode(Node, store_pb2_grpc.StoreServiceServicer):
    """Only says hello: what it holds is on the Shelf."""

    def _register(self, server: Any) -> None:
        store_pb2_grpc.add_StoreServiceServicer_to_server(self, server)

    async def Hello(self, request: store_pb2.HelloRequest, context: Any) -> store_pb2.HelloResponse:
        await self.while_frozen()
        return store_pb2.HelloResponse(node_id=self.node_id)


async def _serve_one() -> None:
    node = DecodeNode("process")
    node.token_pause_s = 0.01
    await node.start()
    print(node.address, flush=True)
    await asyncio.Event().wait()


__all__ = ["DecodeNode", "InvalidRequest", "Overloaded", "PrefillNode", "Shelf", "StoreNode", "oracle_token"]

if __name__ == "__main__":
    asyncio.run(_serve_one())
