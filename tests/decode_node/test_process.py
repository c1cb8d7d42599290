"""Both roles as processes: they say READY, are members, and go when told to, streams handed over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from kvpb.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

from kvstore.admin.local_process import LocalProcess, wait_until_ready
from kvstore.core.view import MemberState, Role
from kvstore.ids import NodeId
from kvstore.registry import EmbeddedRedis, RedisRegistry
from kvstore.units import seconds

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as redis:
        yield redis.url


@pytest.fixture
def nodes(redis_url: str, tiny_folder: Path, tmp_path: Path) -> Iterator[dict[str, LocalProcess]]:
    """A prefill node and two decode nodes, without any store."""
    keys = {"redis_url": redis_url, "model": str(tiny_folder), "threads": 1, "pool_blocks": 64, "dtype": "float32", "drain_leave": "0s"}
    started = {
        name: LocalProcess(
            name=name,
            role=name.partition("-")[0],
            module=f"{name.partition('-')[0]}_node",
            settings={**keys, "node_id": name},
            folder=tmp_path,
        )
        for name in ("prefill-1", "decode-1", "decode-2")
    }
    try:
        for process in started.values():
            process.start()
        wait_until_ready(list(started.values()), timeout=seconds(120), on_ready=lambda _: None)
        yield started
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait(seconds(20))


def decoder(process: LocalProcess, channels: list[Any]) -> Any:
    channels.append(grpc.aio.insecure_channel(process.addresses["rpc"]))
    return decode_pb2_grpc.DecodeServiceStub(channels[-1])


async def tokens_of(stream: Any, *, into: list[int], stop_after: int | None = None) -> None:
    async for event in stream:
        if event.WhichOneof("event") == "token":
            assert event.token.position == len(into)
            into.append(event.token.token_id)
            if stop_after is not None and len(into) >= stop_after:
                return


def test_a_node_told_to_stop_hands_its_stream_over_and_one_killed_loses_nothing(
    nodes: dict[str, LocalProcess], redis_url: str, seed: int
) -> None:
    async def main() -> None:
        channels: list[Any] = []
        draw = random.Random(seed)
        prompt = [draw.randrange(3, 500) for _ in range(70)]

        async def request(generated: list[int]) -> AsyncIterator[decode_pb2.GenerateInput]:
            asked = decode_pb2.GenerateRequest(
                namespace="n",
                prompt_token_ids=prompt,
                generated_token_ids=generated,
                sampling=decode_pb2.Sampling(temperature=0.9, top_p=0.95, seed=5),
                max_tokens=1500,
                ignore_eos=True,
            )
            yield decode_pb2.GenerateInput(request=asked)

        async with RedisRegistry(redis_url) as registry:
            view = registry.view
            assert {member.node_id: member.role for member in view.members} == {
                "prefill-1": Role.PREFILL,
                "decode-1": Role.DECODE,
                "decode-2": Role.DECODE,
            }
            assert {member.state for member in view.members} == {MemberState.ACTIVE}
            channels.append(grpc.aio.insecure_channel(nodes["prefill-1"].addresses["rpc"]))
            prefiller = prefill_pb2_grpc.PrefillServiceStub(channels[-1])
            steps = [step async for step in prefiller.Prefill(prefill_pb2.PrefillRequest(namespace="n", token_ids=prompt))]
            assert steps[-1].done
            whole: list[int] = []
            await tokens_of(decoder(nodes["decode-2"], channels).Generate(request([])), into=whole)
            assert len(whole) == 1500

            # The first node is told to stop in the middle of a stream.
            got: list[int] = []
            stream = decoder(nodes["decode-1"], channels).Generate(request([]))
            await tokens_of(stream, into=got, stop_after=20)
            nodes["decode-1"].terminate()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await tokens_of(stream, into=got)
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            assert 20 <= len(got) < 1500
            assert await asyncio.to_thread(nodes["decode-1"].wait, seconds(20))
            assert nodes["decode-1"].exit_code == 0
            async with asyncio.timeout(5):
                while (member := registry.view.member(NodeId("decode-1"))) is not None and member.state is not MemberState.LEFT:
                    await registry.next_view(after=registry.view.epoch)

            # Its successor is killed in the middle of the rest.
            stream = decoder(nodes["decode-2"], channels).Generate(request(got))
            await tokens_of(stream, into=got, stop_after=len(got) + 15)
            await asyncio.to_thread(nodes["decode-2"].kill)
            with pytest.raises(grpc.aio.AioRpcError):
                await tokens_of(stream, into=got)
            assert got == whole[: len(got)]
            assert len(got) < 1500
        for channel in channels:
            await channel.close()

        # And the first one, started again, ends the answer.
        nodes["decode-1"].start()
        await asyncio.to_thread(wait_until_ready, [nodes["decode-1"]], timeout=seconds(120), on_ready=lambda _: None)
        last: list[Any] = []
        await tokens_of(decoder(nodes["decode-1"], last).Generate(request(got)), into=got)
        await last[0].close()
        assert got == whole

    asyncio.run(main())


def test_one_process_takes_both_roles(redis_url: str, tiny_folder: Path, tmp_path: Path, seed: int) -> None:
    settings = {"redis_url": redis_url, "model": str(tiny_folder), "threads": 1, "pool_blocks": 64, "dtype": "float32", "drain_leave": "0s"}
    settings |= {"roles": "both", "node_id": "both-1"}
    process = LocalProcess(name="both-1", role="both", module="decode_node", settings=settings, folder=tmp_path)
    prompt = [random.Random(seed).randrange(3, 500) for _ in range(70)]

    async def main() -> None:
        async with RedisRegistry(redis_url) as registry:
            member = registry.view.member(NodeId("both-1"))
            assert member is not None
            assert member.role is Role.BOTH
        async with grpc.aio.insecure_channel(process.addresses["rpc"]) as channel:
            prefiller = prefill_pb2_grpc.PrefillServiceStub(channel)
            asked = prefill_pb2.PrefillRequest(namespace="n", token_ids=prompt)
            steps = [step async for step in prefiller.Prefill(asked)]
            assert steps[-1].done
            request = decode_pb2.GenerateRequest(namespace="n", prompt_token_ids=prompt, max_tokens=5, ignore_eos=True)
            inputs = iter([decode_pb2.GenerateInput(request=request)])
            events = [event async for event in decode_pb2_grpc.DecodeServiceStub(channel).Generate(inputs)]
            loaded = next(event.prefix_loaded for event in events if event.WhichOneof("event") == "prefix_loaded")
            assert loaded.local_blocks == 2
            assert sum(event.WhichOneof("event") == "token" for event in events) == 5

    try:
        process.start()
        wait_until_ready([process], timeout=seconds(120), on_ready=lambda _: None)
        asyncio.run(main())
    finally:
        process.terminate()
        process.wait(seconds(20))
