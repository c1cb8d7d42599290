"""What pool and store have is used; what they lack, give wrong or give late is computed; nothing leaks."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from decode_node.session import Heartbeat, NextToken
from kvstore.client import Acknowledge, BlockPut, PutOutcome
from kvstore.codec import BlockCodec, Rung
from kvstore.core.view import Role
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.units import milliseconds


def random_prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(tokens)]


def test_a_second_node_takes_the_prefix_from_the_store_and_the_first_from_its_pool(cluster: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            first, second = await c.add("decode-1", Role.DECODE), await c.add("decode-2", Role.DECODE)
            prompt = random_prompt(seed, 100)
            cold = await c.generate(first, c.call(prompt))
            assert (cold.loaded.local_blocks, cold.loaded.store_blocks, cold.loaded.recomputed_tokens) == (0, 0, 100)
            assert cold.loaded.prompt_blocks == 12
            await first.publisher.flush(timeout=10**10)
            hit = await c.generate(second, c.call(prompt))
            assert (hit.loaded.local_blocks, hit.loaded.store_blocks, hit.loaded.recomputed_tokens) == (0, 12, 4)
            local = await c.generate(first, c.call(prompt))
            assert (local.loaded.local_blocks, local.loaded.store_blocks, local.loaded.recomputed_tokens) == (12, 0, 4)
            assert cold.tokens == hit.tokens == local.tokens

    asyncio.run(main())


def test_another_namespace_finds_nothing(cluster: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            node = await c.add("decode-1", Role.DECODE)
            prompt = random_prompt(seed, 50)
            await c.generate(node, c.call(prompt, namespace="a"))
            await node.publisher.flush(timeout=10**10)
            other = await c.generate(node, c.call(prompt, namespace="b"))
            assert other.loaded.local_blocks == other.loaded.store_blocks == 0

    asyncio.run(main())


def test_nodes_of_another_precision_share_no_block(cluster: Callable[..., Any], seed: int) -> None:
    """What a sequence attends to must not depend on who wrote a block first."""

    async def main() -> None:
        async with cluster() as c:
            first = await c.add("decode-1", Role.DECODE)
            others = [await c.add("decode-2", Role.DECODE, rung=Rung.INT4), await c.add("decode-3", Role.DECODE, exact_tokens=0)]
            prompt = random_prompt(seed, 50)
            await c.generate(first, c.call(prompt))
            await first.publisher.flush(timeout=10**10)
            assert await first.store.probe_prefix(first.key_space("n"), first.chain("n", prompt)) == 6
            for other in others:
                assert (await c.generate(other, c.call(prompt))).loaded.store_blocks == 0
                assert other.model.layout.fingerprint != first.model.layout.fingerprint

    asyncio.run(main())


@pytest.mark.parametrize("missing", [0, 3, 7])
def test_a_missing_block_ends_the_run_and_the_rest_is_computed(
    cluster: Callable[..., Any], idle: Callable[..., Any], seed: int, missing: int
) -> None:
    async def main() -> None:
        async with cluster() as c:
            first, second = await c.add("decode-1", Role.DECODE), await c.add("decode-2", Role.DECODE)
            prompt = random_prompt(seed, 70)
            whole = await c.generate(first, c.call(prompt))
            await first.publisher.flush(timeout=10**10)
            chain = first.chain("n", prompt)
            assert await first.store.delete(first.key_space("n"), chain[missing : missing + 1]) == 1
            answer = await c.generate(second, c.call(prompt))
            assert answer.loaded.store_blocks == missing
            assert answer.tokens == whole.tokens
            await idle(second)

    asyncio.run(main())


def test_a_payload_of_another_model_is_refused_and_computed(cluster: Callable[..., Any], idle: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            first, second = await c.add("decode-1", Role.DECODE), await c.add("decode-2", Role.DECODE)
            prompt = random_prompt(seed, 70)
            whole = await c.generate(first, c.call(prompt))
            await first.publisher.flush(timeout=10**10)
            key_space, chain = first.key_space("n"), first.chain("n", prompt)
            assert await first.store.delete(key_space, chain[5:6]) == 1
            foreign = BlockCodec(first.model.layout, model_digest=b"x" * 32, rung=Rung.RAW)
            block = np.ones((3, 2, 2, 8, 16), np.float32)
            put = BlockPut(chain[5], foreign.encode(block, start_position=40))
            assert (await first.store.put(key_space, [put])).outcomes == (PutOutcome.STORED,)
            answer = await c.generate(second, c.call(prompt))
            assert answer.loaded.store_blocks == 5
            assert answer.tokens == whole.tokens
            await idle(second)

    asyncio.run(main())


@pytest.mark.parametrize("wait_ms", [0.01, 1, 3])
def test_a_load_that_takes_too_long_uses_what_is_there(
    cluster: Callable[..., Any], idle: Callable[..., Any], seed: int, wait_ms: float
) -> None:
    async def main() -> None:
        async with cluster() as c:
            first = await c.add("decode-1", Role.DECODE)
            hasty = await c.add("decode-2", Role.DECODE, load_max_wait=milliseconds(wait_ms))
            prompt = random_prompt(seed, 400)
            whole = await c.generate(first, c.call(prompt))
            await first.publisher.flush(timeout=10**10)
            answer = await c.generate(hasty, c.call(prompt))
            assert answer.loaded.store_blocks * 8 + answer.loaded.recomputed_tokens == 400
            assert answer.tokens == whole.tokens
            await idle(hasty)

    asyncio.run(main())


def test_a_store_that_is_gone_entirely_costs_no_request(cluster: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            prefill, decode = await c.add("prefill-1", Role.PREFILL), await c.add("decode-1", Role.DECODE)
            prompt = random_prompt(seed, 60)
            expected = await c.generate(decode, c.call(prompt, namespace="before"))
            for store in list(c.stores):
                await store.stop()
                c.stores.remove(store)
            steps = await c.prefill(prefill, prompt)
            assert steps[-1].done
            assert steps[-1].degraded
            assert steps[-1].published_blocks == 0
            answer = await c.generate(decode, c.call(prompt))
            assert answer.tokens == expected.tokens

    asyncio.run(main())


def test_no_store_at_all_is_no_error(cluster: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster(stores=0) as c:
            prefill, decode = await c.add("prefill-1", Role.PREFILL), await c.add("decode-1", Role.DECODE)
            prompt = random_prompt(seed, 40)
            assert (await c.prefill(prefill, prompt))[-1].done
            assert len((await c.generate(decode, c.call(prompt))).tokens) == 8

    asyncio.run(main())


def test_one_store_of_three_gone_is_still_a_whole_hit(cluster: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            first, second = await c.add("decode-1", Role.DECODE, acknowledge=Acknowledge.ALL), await c.add("decode-2", Role.DECODE)
            prompt = random_prompt(seed, 200)
            whole = await c.generate(first, c.call(prompt))
            await first.publisher.flush(timeout=10**10)
            store = c.stores[0]
            c.stores.remove(store)
            await store.stop()
            answer = await c.generate(second, c.call(prompt))
            assert answer.loaded.store_blocks == 24
            assert answer.tokens == whole.tokens

    asyncio.run(main())


def test_a_stream_cut_while_it_loads_or_runs_gives_every_block_back(
    cluster: Callable[..., Any], idle: Callable[..., Any], seed: int
) -> None:
    async def main() -> None:
        async with cluster() as c:
            first, second = await c.add("decode-1", Role.DECODE), await c.add("decode-2", Role.DECODE)
            prompt = random_prompt(seed, 300)
            await c.generate(first, c.call(prompt))
            await first.publisher.flush(timeout=10**10)
            for wait in (0.0, 0.002, 0.005, 0.01, 0.02, 0.05):
                stream = asyncio.create_task(c.generate(second, c.call(prompt, max_tokens=1000)))
                await asyncio.sleep(wait)
                stream.cancel()
                await asyncio.gather(stream, return_exceptions=True)
                await idle(second)

    asyncio.run(main())


def test_loads_of_the_same_prefix_at_once_fetch_it_once(cluster: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            first, second = await c.add("decode-1", Role.DECODE), await c.add("decode-2", Role.DECODE)
            prompt = random_prompt(seed, 160)
            whole = await c.generate(first, c.call(prompt))
            await first.publisher.flush(timeout=10**10)
            answers = await asyncio.gather(*(c.generate(second, c.call(prompt)) for _ in range(4)))
            assert sorted(answer.loaded.store_blocks for answer in answers) == [0, 0, 0, 19]
            assert sorted(answer.loaded.local_blocks for answer in answers) == [0, 19, 19, 19]
            assert all(answer.tokens == whole.tokens for answer in answers)

    asyncio.run(main())


def test_a_full_pool_shortens_no_answer(cluster: Callable[..., Any], idle: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            first = await c.add("decode-1", Role.DECODE)
            small = await c.add("decode-2", Role.DECODE, pool_blocks=24, load_max_wait=milliseconds(200))
            prompts = [random_prompt(seed + number, 100) for number in range(4)]
            whole = [await c.generate(first, c.call(prompt, max_tokens=24)) for prompt in prompts]
            await first.publisher.flush(timeout=10**10)
            answers = await asyncio.gather(*(c.generate(small, c.call(prompt, max_tokens=24)) for prompt in prompts))
            assert [len(answer.tokens) for answer in answers] == [len(answer.tokens) for answer in whole]
            await idle(small)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "fields", "says"),
    [
        ([], {}, "empty"),
        ([5] * 1100, {}, "1023"),
        ([5, 512], {}, "token id 512"),
        ([5], {"max_tokens": 0}, "max_tokens"),
        ([5], {"namespace": ""}, "namespace"),
        ([5], {"generated": [1] * 9}, "generated_token_ids"),
        ([5], {"generated": [999]}, "token id 999"),
    ],
)
def test_a_wrong_call_is_refused_before_any_work(
    cluster: Callable[..., Any], prompt: list[int], fields: dict[str, object], says: str
) -> None:
    async def main() -> None:
        async with cluster(stores=0) as c:
            node = await c.add("decode-1", Role.DECODE)
            with pytest.raises(InvalidRequest, match=says):
                await c.generate(node, c.call(prompt, **fields))

    asyncio.run(main())


def test_a_drain_ends_streams_after_their_blocks_are_published(cluster: Callable[..., Any], idle: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            first, second = await c.add("decode-1", Role.DECODE), await c.add("decode-2", Role.DECODE)
            prompt = random_prompt(seed, 30)
            whole = await c.generate(second, c.call(prompt, max_tokens=60, namespace="whole"))
            call = c.call(prompt, max_tokens=60)
            tokens: list[int] = []

            async def follow() -> None:
                async with aclosing(c.session(first, call).events()) as events:
                    async for event in events:
                        if isinstance(event, NextToken):
                            tokens.append(event.token_id)
                        if len(tokens) == 20:
                            draining.set()

            draining = asyncio.Event()
            stream = asyncio.create_task(follow())
            await draining.wait()
            await first.drain()
            with pytest.raises(Unavailable, match="draining"):
                await stream
            assert 20 <= len(tokens) < 60
            with pytest.raises(Unavailable, match="draining"):
                await c.generate(first, c.call(prompt))
            rest = await c.generate(second, c.call(prompt, generated=tokens, max_tokens=60))
            assert rest.loaded.store_blocks == (30 + len(tokens) - 1) // 8
            assert tokens + rest.tokens == whole.tokens
            await idle(first)

    asyncio.run(main())


def test_a_slow_load_gives_signs_of_life(cluster: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster(stores=0) as c:
            node = await c.add("decode-1", Role.DECODE)
            gate = asyncio.Event()
            acquire = node.store.acquire_prefix

            async def slow(*arguments: Any, **options: Any) -> Any:
                await gate.wait()
                return await acquire(*arguments, **options)

            node.store.acquire_prefix = slow  # type: ignore[method-assign]
            beats = 0
            async with aclosing(c.session(node, c.call(random_prompt(seed, 40))).events()) as events:
                async for event in events:
                    beats += isinstance(event, Heartbeat)
                    if beats == 2:
                        gate.set()
            assert beats >= 2

    asyncio.run(main())


def test_a_step_that_takes_long_leaves_room_for_signs_of_life(cluster: Callable[..., Any], seed: int) -> None:
    """The engine computes in a thread of its own, and its kernels without the GIL: a slow node is not taken for a frozen one."""

    async def main() -> None:
        async with cluster(stores=0) as c:
            node = await c.add("decode-1", Role.DECODE)
            over = threading.Event()
            run_rows = node.engine._runner.run_rows

            def slow(spans: Any) -> Any:
                over.wait(60)
                return run_rows(spans)

            node.engine._runner.run_rows = slow
            beats = 0
            async with aclosing(c.session(node, c.call(random_prompt(seed, 10), max_tokens=3)).events()) as events:
                async for event in events:
                    beats += isinstance(event, Heartbeat)
                    if beats == 3:
                        over.set()
            assert beats >= 3

    asyncio.run(main())
