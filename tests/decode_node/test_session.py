"""One Generate call on its own: when it stops, the engine stops with it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from decode_node.session import Loaded
from kvstore.core.view import Role
from kvstore.errors import Unavailable


def counted_steps(engine: Any) -> list[int]:
    """Grows by one, the number of its rows, with every decode step."""
    steps: list[int] = []
    run_rows = engine._runner.run_rows

    def count(spans: Any) -> Any:
        steps.append(len(spans))
        return run_rows(spans)

    engine._runner.run_rows = count
    return steps


def random_prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(tokens)]


def test_a_stream_that_nobody_reads_any_more_ends_within_a_step(cluster: Callable[..., Any], idle: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster(stores=0) as c:
            node = await c.add("decode-1", Role.DECODE)
            steps = counted_steps(node.engine)
            for read in (1, 5):
                await c.generate(node, c.call(random_prompt(seed + read, 20), max_tokens=900), cut_after=read)
                left_at = len(steps)
                await idle(node)
                assert len(steps) - left_at <= 1, "the step under way, and no more"

    asyncio.run(main())


def test_a_stream_that_still_loads_when_its_node_drains_computes_nothing(
    cluster: Callable[..., Any], idle: Callable[..., Any], seed: int
) -> None:
    async def main() -> None:
        async with cluster(stores=0) as c:
            node = await c.add("decode-1", Role.DECODE)
            steps = counted_steps(node.engine)
            load, loading, go_on = c.loaders["decode-1"].load, asyncio.Event(), asyncio.Event()

            async def held(*arguments: Any, **options: Any) -> Any:
                loading.set()
                await go_on.wait()
                return await load(*arguments, **options)

            c.loaders["decode-1"].load = held
            session = c.session(node, c.call(random_prompt(seed, 20), max_tokens=900))
            loaded = asyncio.Event()

            async def follow() -> None:
                async with aclosing(session.events()) as events:
                    async for event in events:
                        if isinstance(event, Loaded):
                            loaded.set()

            following = asyncio.create_task(follow())
            await loading.wait()
            session.halt()
            go_on.set()
            await asyncio.wait_for(loaded.wait(), 20)
            await idle(node)
            session.end(Unavailable("draining"))
            with pytest.raises(Unavailable, match="draining"):
                await following
            assert len(steps) <= 1

    asyncio.run(main())
