"""Blocks come into the pool while prefill still publishes and while the batch goes on; a slow tier costs no more than its credit."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from decode_node.published import PublishedPrefix
from decode_node.session import NextToken
from kvstore.core.view import Role
from kvstore.tiers.faulty import Faults, FaultyTier
from kvstore.units import seconds


def random_prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(tokens)]


async def until_in_pool(node: Any, prompt: list[int], blocks: int) -> None:
    chain = node.chain("n", prompt)
    found = -1
    async with asyncio.timeout(20):
        while found < blocks:
            await asyncio.sleep(0.002)
            pinned = node.engine.pin_local(chain)
            found = len(pinned.block_ids)
            node.engine.release(pinned)


class GrowingStore:
    """A whole prompt is in the store, and this client of it finds only what was let out so far."""

    def __init__(self, node: Any) -> None:
        self._acquire = node.store.acquire_prefix
        self.published = PublishedPrefix()
        self.first_index_of_parts: list[int] = []
        node.store.acquire_prefix = self.acquire

    async def acquire(self, key_space: Any, chain: Any, **options: Any) -> Any:
        self.first_index_of_parts.append(chain[0].index)
        return await self._acquire(key_space, [ref for ref in chain if ref.index < self.published.blocks], **options)


@pytest.mark.parametrize("ends", ["all published", "prefill gives up"])
def test_blocks_are_fetched_as_they_are_published_while_the_batch_goes_on(
    cluster: Callable[..., Any], idle: Callable[..., Any], seed: int, ends: str
) -> None:
    async def main() -> None:
        async with cluster() as c:
            first, second = await c.add("decode-1", Role.DECODE), await c.add("decode-2", Role.DECODE)
            prompt = random_prompt(seed, 100)
            whole = await c.generate(first, c.call(prompt))
            await first.publisher.flush(timeout=10**10)
            beside = await c.generate(first, c.call(random_prompt(seed + 1, 10), max_tokens=120, namespace="beside"))
            store = GrowingStore(second)
            running = c.session(second, c.call(random_prompt(seed + 1, 10), max_tokens=120, namespace="beside"))
            waiting = asyncio.create_task(c.generate(second, c.call(prompt, published=store.published)))
            tokens = []
            async with aclosing(running.events()) as events:
                async for event in events:
                    if isinstance(event, NextToken):
                        tokens.append(event.token_id)
                        if len(tokens) in (20, 40, 60):  # 3, 6, 9 blocks, one part after the other
                            store.published.note(len(tokens) * 3 // 20)
                            await until_in_pool(second, prompt, store.published.blocks)
            assert tokens == beside.tokens
            assert not waiting.done()
            if ends == "all published":
                store.published.note(12)
            store.published.end()
            answer = await waiting
            found = 12 if ends == "all published" else 9
            assert (answer.loaded.store_blocks, answer.loaded.recomputed_tokens) == (found, 100 - 8 * found)
            assert [index for index in store.first_index_of_parts if index] == [3, 6, 9][: found // 3 - 1]
            assert answer.tokens == whole.tokens
            await idle(second)

    asyncio.run(main())


def test_a_stream_cut_while_it_waits_for_prefill_leaves_nothing_behind(
    cluster: Callable[..., Any], idle: Callable[..., Any], seed: int
) -> None:
    async def main() -> None:
        async with cluster() as c:
            first, second = await c.add("decode-1", Role.DECODE), await c.add("decode-2", Role.DECODE)
            prompt = random_prompt(seed, 100)
            await c.generate(first, c.call(prompt))
            await first.publisher.flush(timeout=10**10)
            store = GrowingStore(second)
            store.published.note(5)
            waiting = asyncio.create_task(c.generate(second, c.call(prompt, published=store.published)))
            await until_in_pool(second, prompt, 5)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await idle(second)

    asyncio.run(main())


def test_a_published_block_that_is_gone_again_ends_the_wait(cluster: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            node = await c.add("decode-1", Role.DECODE)
            published = PublishedPrefix()
            published.note(4)  # and it is never over
            async with asyncio.timeout(30):
                answer = await c.generate(node, c.call(random_prompt(seed, 50), published=published))
            assert (answer.loaded.store_blocks, answer.loaded.recomputed_tokens) == (0, 50)

    asyncio.run(main())


def test_a_slow_tier_is_given_up_within_its_credit_and_left_alone_afterwards(
    cluster: Callable[..., Any], idle: Callable[..., Any], tmp_path: Path, seed: int
) -> None:
    """The disk gives nothing while the test holds it: only the pace can end the load."""

    async def main() -> None:
        async with cluster(stores=0) as c:
            asked, release, faults = threading.Event(), threading.Event(), Faults()

            def hold() -> None:
                asked.set()
                release.wait(60)

            await c.add_stores(1, ssd_path=tmp_path / "store")
            prompt = random_prompt(seed, 400)
            first = await c.add("decode-1", Role.DECODE, replicas=1)
            whole = await c.generate(first, c.call(prompt))
            await first.publisher.flush(timeout=10**10)
            await c.remove_store(c.stores[0])  # what it had in memory went to its disk
            await c.add_stores(1, ssd_path=tmp_path / "store", wrap_ssd=lambda regions: FaultyTier(regions, faults))
            slow = await c.add("decode-2", Role.DECODE, replicas=1, load_max_wait=seconds(60))
            await c.generate(slow, c.call(random_prompt(seed + 1, 400), namespace="other"))  # now it knows what computing costs
            assert slow.engine.load().prefill_tokens_per_s > 0
            faults.before_read = hold
            try:
                answer = await c.generate(slow, c.call(prompt))
                assert asked.is_set()
                assert answer.tokens == whole.tokens
                assert answer.loaded.store_blocks == 0
                # It waited for its credit and not for the disk, 60 s away.
                assert answer.loaded.load_ms < 30_000
                asked.clear()
                slow.engine.forget_local()
                again = await c.generate(slow, c.call(prompt))
                assert again.tokens == whole.tokens
                assert not asked.is_set(), "a tier that is known to be slow is not asked"
            finally:
                release.set()
            await idle(slow)

    asyncio.run(main())
