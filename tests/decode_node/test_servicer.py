"""Both compute services over real gRPC: what goes over the wire, and what a client's goodbye does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from kvpb.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

from decode_node.servicer import DecodeServicer
from kvstore.core.view import Role
from kvstore.rpc.server import bind, make_server
from kvstore.units import milliseconds
from prefill_node.engine.request import EngineRequest, EventSink, SamplingParams
from prefill_node.servicer import PrefillServicer


@asynccontextmanager
async def served(c: Any, node: Any) -> AsyncIterator[Any]:
    """A stub of the node's service."""
    server = make_server()
    if node.role is Role.DECODE:
        servicer = DecodeServicer(node, c.loaders[node.config.node_id], heartbeat_every=milliseconds(50))
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)
    else:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(node), server)
    port = bind(server, host="127.0.0.1", port=0)
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    try:
        yield decode_pb2_grpc.DecodeServiceStub(channel) if node.role is Role.DECODE else prefill_pb2_grpc.PrefillServiceStub(channel)
    finally:
        await channel.close()
        await server.stop(0)


def request(prompt: list[int], **fields: Any) -> decode_pb2.GenerateRequest:
    fields = {"request_id": "r", "namespace": "n", "max_tokens": 6, "ignore_eos": True, **fields}
    return decode_pb2.GenerateRequest(prompt_token_ids=prompt, **fields)


async def asking(request: decode_pb2.GenerateRequest) -> AsyncIterator[decode_pb2.GenerateInput]:
    yield decode_pb2.GenerateInput(request=request)


async def to_the_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


def random_prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(tokens)]


def test_a_prompt_is_prefilled_published_fetched_and_answered(cluster: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            prefill, decode = await c.add("prefill-1", Role.PREFILL), await c.add("decode-1", Role.DECODE)
            prompt = random_prompt(seed, 100)
            async with served(c, prefill) as prefiller, served(c, decode) as decoder:
                steps = [
                    step async for step in prefiller.Prefill(prefill_pb2.PrefillRequest(request_id="r", namespace="n", token_ids=prompt))
                ]
                assert (steps[-1].done, steps[-1].published_blocks, steps[-1].prompt_blocks) == (True, 12, 12)
                sampling = decode_pb2.Sampling(temperature=0.8, top_p=0.9, seed=2**63)
                events = [event async for event in decoder.Generate(asking(request(prompt, sampling=sampling)))]
                events = [event for event in events if event.WhichOneof("event") != "heartbeat"]
                kinds = [event.WhichOneof("event") for event in events]
                assert kinds == ["prefix_loaded"] + ["token"] * 6 + ["finished"]
                assert events[0].prefix_loaded.store_blocks == 12
                assert [event.token.position for event in events[1:-1]] == list(range(6))
                assert events[-1].finished.reason == decode_pb2.FINISH_REASON_LENGTH
                tokens = [event.token.token_id for event in events[1:-1]]
                rest = decoder.Generate(asking(request(prompt, sampling=sampling, generated_token_ids=tokens[:2])))
                again = [event.token.token_id async for event in rest if event.WhichOneof("event") == "token"]
                assert tokens[:2] + again == tokens

    asyncio.run(main())


def noted(engine: Any) -> list[EngineRequest]:
    """What it is asked for from now on."""
    requests: list[EngineRequest] = []
    submit = engine.submit

    def note(asked: EngineRequest, sink: EventSink) -> None:
        requests.append(asked)
        submit(asked, sink)

    engine.submit = note
    return requests


def test_every_option_of_a_request_reaches_the_engine(cluster: Callable[..., Any]) -> None:
    async def main() -> None:
        async with cluster(stores=0) as c:
            prefill, decode = await c.add("prefill-1", Role.PREFILL), await c.add("decode-1", Role.DECODE)
            to_prefill, to_decode = noted(prefill.engine), noted(decode.engine)
            options = {
                "temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.125, "presence_penalty": 0.25, "frequency_penalty": -0.5,
                "repetition_penalty": 1.5, "seed": 2**63,
            }  # fmt: skip
            async with served(c, prefill) as prefiller, served(c, decode) as decoder:
                await to_the_end(prefiller.Prefill(prefill_pb2.PrefillRequest(namespace="n", token_ids=range(3, 20), priority=4)))
                sampling = decode_pb2.Sampling(logit_bias={9: -1.5, 7: 2.0}, **options)
                asked = request([5, 6, 7], generated_token_ids=[8], sampling=sampling, stop_token_ids=[11], top_logprobs=3, priority=-2)
                events = [event async for event in decoder.Generate(asking(asked))]
                await to_the_end(decoder.Generate(asking(request([5, 6], generated_token_ids=[7], ignore_eos=False, recoded=True))))
            first, second = to_decode
            assert first.sampling == SamplingParams(logit_bias=((7, 2.0), (9, -1.5)), **options)
            assert (list(first.token_ids), first.first_output, first.max_new_tokens) == ([5, 6, 7, 8], 3, 5)
            assert (first.stop_token_ids, first.top_logprobs, first.priority, first.as_sealed) == ({11}, 3, -2, True)
            assert second.sampling == SamplingParams(top_p=0.0)
            assert (second.stop_token_ids, second.top_logprobs, second.priority) == (decode.model.eos_token_ids, None, 0)
            assert not second.as_sealed
            assert [asked.priority for asked in to_prefill] == [4]
            tokens = [event.token for event in events if event.WhichOneof("event") == "token"]
            assert tokens
            for token in tokens:
                likeliest = list(token.logprobs.top_logprobs)
                assert likeliest == sorted(likeliest, reverse=True)
                assert len(set(token.logprobs.top_token_ids)) == len(likeliest) == 3
                assert token.logprobs.logprob <= likeliest[0] < 0

    asyncio.run(main())


def test_what_a_load_may_use_follows_from_the_tokens_that_the_client_has(cluster: Callable[..., Any]) -> None:
    async def main() -> None:
        async with cluster(stores=0) as c:
            decode = await c.add("decode-1", Role.DECODE)
            load, options = c.loaders["decode-1"].load, []

            async def note(*arguments: Any, continuation: bool, as_sealed: bool, **others: Any) -> Any:
                options.append((continuation, as_sealed))
                return await load(*arguments, continuation=continuation, as_sealed=as_sealed, **others)

            c.loaders["decode-1"].load = note
            prompt = list(range(3, 40))
            async with served(c, decode) as decoder:
                for fields in ({}, {"generated_token_ids": [7]}, {"generated_token_ids": [7], "recoded": True}):
                    await to_the_end(decoder.Generate(asking(request(prompt, **fields))))
                for recoded in (False, True):
                    prepared = await decoder.Prepare(decode_pb2.PrepareRequest(namespace="n", token_ids=prompt, recoded=recoded))
                    assert prepared.blocks == 4
            assert options == [(False, False), (True, True), (True, False), (True, True), (True, False)]

    asyncio.run(main())


def test_load_says_what_a_client_must_know(cluster: Callable[..., Any]) -> None:
    async def main() -> None:
        async with cluster(stores=0) as c:
            prefill, decode = await c.add("prefill-1", Role.PREFILL), await c.add("decode-1", Role.DECODE)
            async with served(c, prefill) as prefiller, served(c, decode) as decoder:
                here = await prefiller.Load(prefill_pb2.PrefillLoadRequest())
                there = await decoder.Load(decode_pb2.DecodeLoadRequest())
                assert (here.node_id, there.node_id) == ("prefill-1", "decode-1")
                assert here.layout_fingerprint == there.layout_fingerprint == decode.model.layout.fingerprint
                assert here.model_digest == there.model_digest == decode.model.model_digest
                assert (there.block_tokens, there.max_positions, there.total_pool_blocks) == (8, 1024, 128)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [5] * 2000}, "at most 1023"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"sampling": decode_pb2.Sampling(temperature=-1)}, "temperature"),
        ({"sampling": decode_pb2.Sampling(top_p=1.5)}, "top_p"),
    ],
)
def test_a_wrong_request_is_an_invalid_argument(cluster: Callable[..., Any], fields: dict[str, Any], says: str) -> None:
    async def main() -> None:
        async with cluster(stores=0) as c:
            decode = await c.add("decode-1", Role.DECODE)
            async with served(c, decode) as decoder:
                message = decode_pb2.GenerateRequest(**{"prompt_token_ids": [5, 6], "namespace": "n", "max_tokens": 4, **fields})
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await decoder.Generate(asking(message)).read()
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert says in refused.value.details()

    asyncio.run(main())


def test_a_client_that_goes_away_frees_every_block(cluster: Callable[..., Any], idle: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            prefill, decode = await c.add("prefill-1", Role.PREFILL), await c.add("decode-1", Role.DECODE)
            prompt = random_prompt(seed, 500)
            async with served(c, prefill) as prefiller, served(c, decode) as decoder:
                for reads in (0, 1, 3):
                    stream = decoder.Generate(asking(request(prompt, max_tokens=500)))
                    for _ in range(reads):
                        await stream.read()
                    stream.cancel()
                    await idle(decode)
                    prefilling = prefiller.Prefill(prefill_pb2.PrefillRequest(namespace="n", token_ids=prompt[reads:]))
                    await prefilling.read()
                    prefilling.cancel()
                    await idle(prefill)

    asyncio.run(main())


def test_a_drain_is_unavailable_to_running_and_new_calls(cluster: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            decode = await c.add("decode-1", Role.DECODE)
            async with served(c, decode) as decoder:
                running = decoder.Generate(asking(request(random_prompt(seed, 20), max_tokens=900)))
                await running.read()
                drain = asyncio.create_task(decode.drain())
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await asyncio.wait_for(to_the_end(running), 20)
                assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await decoder.Generate(asking(request([5, 6]))).read()
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                await drain

    asyncio.run(main())
