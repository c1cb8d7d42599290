"""Streams on blocks that the store has stepped down: new prompts use them, and whoever has tokens from the numbers as sealed does not."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.view import Role
from prefill_node.engine.request import SamplingParams

ANSWER = 24
SEED = {"sampling": SamplingParams(temperature=0.9, top_k=50, seed=3), "max_tokens": ANSWER}


class Stepping:
    """One store that keeps everything as int4 on its SSD, and decode nodes, each with an empty pool."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self._cluster = cluster
        self._store = {"ssd_path": folder, "demote_above": 0.0, "step_down": {"*": "int4"}}
        self._nodes = 0

    async def new_store(self) -> None:
        """The next boot of the store: what it has is on its SSD alone."""
        for store in list(self._cluster.stores):
            await self._cluster.remove_store(store)
        await self._cluster.add_stores(1, **self._store)

    async def new_node(self) -> Any:
        self._nodes += 1
        return await self._cluster.add(f"decode-{self._nodes}", Role.DECODE)

    async def written(self, node: Any, *, blocks: int) -> None:
        """The node's blocks are on the store's SSD, stepped down but for the first: all its tokens are exact, so it has nothing to drop."""
        assert await node.publisher.flush(timeout=10**10)
        async with asyncio.timeout(60):
            while self._cluster.stores[0].status().counters.get("stepped_down:demote", 0) < blocks - 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert self._cluster.stores[0].status().counters["not_stepped_down:no_gain"] == 1


@pytest.fixture
def stepping(tmp_path: Path) -> Callable[[Any], Stepping]:
    return lambda cluster: Stepping(cluster, tmp_path / "ssd")


def test_new_prompts_use_re_coded_blocks_and_streams_as_sealed_do_not(
    cluster: Callable[..., Any], stepping: Callable[[Any], Stepping], seed: int
) -> None:
    prompt = [random.Random(seed).randrange(3, 500) for _ in range(61)]

    async def main() -> None:
        async with cluster(stores=0) as c:
            cast = stepping(c)
            await cast.new_store()
            first = await cast.new_node()
            undisturbed = await c.generate(first, c.call(prompt, **SEED))
            await cast.written(first, blocks=(len(prompt) + ANSWER - 1) // first.block_tokens)
            await cast.new_store()

            fresh = await c.generate(await cast.new_node(), c.call(prompt, **SEED))
            assert fresh.loaded is not None
            assert (fresh.loaded.store_blocks, fresh.loaded.recoded) == (len(prompt) // first.block_tokens, True)
            assert len(fresh.tokens) == ANSWER

            # Its own successor is told that it had such blocks, takes the same ones, and goes on with equal tokens.
            call = dataclasses.replace(c.call(prompt, generated=fresh.tokens[:9], **SEED), recoded=True)
            followed = await c.generate(await cast.new_node(), call)
            assert followed.loaded.recoded
            assert fresh.tokens[:9] + followed.tokens == fresh.tokens

            have = undisturbed.tokens[:9]
            successor = await cast.new_node()
            rest = await c.generate(successor, c.call(prompt, generated=have, **SEED))
            assert (rest.loaded.store_blocks, rest.loaded.recoded) == (1, False)
            assert have + rest.tokens == undisturbed.tokens

            # It has put what it computed: now the store has the blocks as sealed again.
            assert await successor.publisher.flush(timeout=10**10)
            again = await c.generate(await cast.new_node(), c.call(prompt, generated=have, **SEED))
            assert again.loaded.store_blocks >= len(prompt) // first.block_tokens
            assert not again.loaded.recoded
            assert have + again.tokens == undisturbed.tokens

    asyncio.run(main())
