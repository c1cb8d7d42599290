"""A sequence that gave its blocks up gets them back from the store, and its tokens are those it would have had."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

from kvstore.core.view import Role
from prefill_node.engine.request import PinnedPrefix, SamplingParams

SAMPLED = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=11)


def test_preempted_sequences_take_their_sealed_blocks_from_the_store(
    cluster: Callable[..., Any], idle: Callable[..., Any], seed: int
) -> None:
    async def main() -> None:
        async with cluster(stores=2) as c:
            roomy = await c.add("decode-1", Role.DECODE)
            small = await c.add("decode-2", Role.DECODE, pool_blocks=20)
            draw = random.Random(seed)
            prompts = [[draw.randrange(3, 500) for _ in range(60)] for _ in range(4)]
            alone = [await c.generate(roomy, c.call(prompt, max_tokens=40, sampling=SAMPLED)) for prompt in prompts]
            await roomy.publisher.flush(timeout=10**10)
            load, resume = c.loaders["decode-2"].load, small.engine.resume
            loads: list[Any] = []
            resumed: list[PinnedPrefix] = []

            async def counted_load(*arguments: Any, **options: Any) -> Any:
                loads.append(await load(*arguments, **options))
                return loads[-1]

            def counted_resume(request_id: str, pinned: PinnedPrefix) -> None:
                resumed.append(pinned)
                resume(request_id, pinned)

            c.loaders["decode-2"].load, small.engine.resume = counted_load, counted_resume
            together = await asyncio.gather(*(c.generate(small, c.call(prompt, max_tokens=40, sampling=SAMPLED)) for prompt in prompts))
            assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
            fetched = sum(loaded.store_blocks for loaded in loads if any(loaded.pinned is pinned for pinned in resumed))
            assert fetched > 0
            await idle(small)

    asyncio.run(main())


def test_a_prefix_for_which_there_was_no_room_is_fetched_when_there_is(cluster: Callable[..., Any], seed: int) -> None:
    """The engine stands still while the second one loads, so the first has its blocks until then."""

    async def main() -> None:
        async with cluster(stores=2) as c:
            roomy = await c.add("decode-1", Role.DECODE)
            small = await c.add("decode-2", Role.DECODE, pool_blocks=20)
            draw = random.Random(seed)
            long, other = ([draw.randrange(3, 500) for _ in range(tokens)] for tokens in (100, 70))
            alone = await c.generate(roomy, c.call(other, sampling=SAMPLED))
            await roomy.publisher.flush(timeout=10**10)
            stands, go_on = threading.Event(), threading.Event()
            run_rows, submit, resume = small.engine._runner.run_rows, small.engine.submit, small.engine.resume
            resumed: list[int] = []

            def held_rows(spans: Any) -> Any:
                stands.set()
                assert go_on.wait(30)
                return run_rows(spans)

            def noted_submit(request: Any, sink: Any) -> None:
                submit(request, sink)
                if list(request.token_ids) == other:
                    go_on.set()

            def noted_resume(request_id: str, pinned: PinnedPrefix) -> None:
                resumed.append(len(pinned.block_ids))
                resume(request_id, pinned)

            small.engine._runner.run_rows, small.engine.submit, small.engine.resume = held_rows, noted_submit, noted_resume
            first = asyncio.create_task(c.generate(small, c.call(long, max_tokens=2)))  # it needs no block more
            assert await asyncio.to_thread(stands.wait, 30)
            second = await c.generate(small, c.call(other, sampling=SAMPLED))
            await first
            assert second.loaded.store_blocks < 8
            assert resumed == [8]
            assert second.tokens == alone.tokens

    asyncio.run(main())


def test_a_stream_that_is_cut_while_its_blocks_come_back_leaves_nothing_behind(
    cluster: Callable[..., Any], idle: Callable[..., Any], seed: int
) -> None:
    async def main() -> None:
        async with cluster(stores=2) as c:
            node = await c.add("decode-1", Role.DECODE, pool_blocks=20)
            draw = random.Random(seed)
            prompts = [[draw.randrange(3, 500) for _ in range(60)] for _ in range(4)]
            load = c.loaders["decode-1"].load
            coming_back = asyncio.Event()

            async def stuck_when_it_comes_back(namespace: str, token_ids: Any, **options: Any) -> Any:
                if len(token_ids) > 60:
                    coming_back.set()
                    await asyncio.Event().wait()
                return await load(namespace, token_ids, **options)

            c.loaders["decode-1"].load = stuck_when_it_comes_back
            streams = [asyncio.create_task(c.generate(node, c.call(prompt, max_tokens=90))) for prompt in prompts]
            async with asyncio.timeout(30):
                await coming_back.wait()
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            await idle(node)

    asyncio.run(main())
