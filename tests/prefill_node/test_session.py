"""A prompt is computed once: what store or pool have is taken, the rest is computed and published."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvstore.core.view import Role
from kvstore.errors import CodecFailure, InvalidRequest, Unavailable
from prefill_node.session import PrefillCall, PrefillSession, Progress


@pytest.fixture(scope="module")
def compute_cluster() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compute_cluster", Path(__file__).parents[1] / "compute_cluster.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cluster(compute_cluster: ModuleType, tiny_folder: Callable[[], Path]) -> Callable[..., Any]:
    return partial(compute_cluster.opened_cluster, tiny_folder())


@pytest.fixture
def idle(compute_cluster: ModuleType) -> Callable[..., Any]:
    wait: Callable[..., Any] = compute_cluster.wait_until_idle
    return wait


def random_prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(tokens)]


def last(steps: list[Progress]) -> tuple[int, int, int, bool]:
    assert steps[-1].done
    assert all(not step.done for step in steps[:-1])
    published = [step.published_blocks for step in steps]
    assert published == sorted(published)
    return steps[-1].cached_blocks, steps[-1].published_blocks, steps[-1].prompt_blocks, steps[-1].degraded


def test_a_new_prompt_is_computed_and_every_full_block_published(cluster: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            node = await c.add("prefill-1", Role.PREFILL)
            prompt = random_prompt(seed, 100)
            steps = await c.prefill(node, prompt)
            assert steps[0].published_blocks == 0
            assert last(steps) == (0, 12, 12, False)
            assert await node.store.probe_prefix(node.key_space("n"), node.chain("n", prompt)) == 12

    asyncio.run(main())


def test_what_another_node_published_is_fetched_and_only_the_rest_computed(
    cluster: Callable[..., Any], idle: Callable[..., Any], seed: int
) -> None:
    async def main() -> None:
        async with cluster() as c:
            first, second = await c.add("prefill-1", Role.PREFILL), await c.add("prefill-2", Role.PREFILL)
            prompt = random_prompt(seed, 120)
            await c.prefill(first, prompt[:70])
            assert last(await c.prefill(second, prompt)) == (8, 15, 15, False)
            assert last(await c.prefill(first, prompt)) == (15, 15, 15, False)
            for node in (first, second):
                for array, other in zip(_blocks(first, prompt), _blocks(node, prompt), strict=False):
                    np.testing.assert_array_equal(array, other)
                await idle(node)

    asyncio.run(main())


def _blocks(node: Any, prompt: list[int]) -> list[np.ndarray]:
    """Copies of what the pool of a node holds of a prompt."""
    pinned = node.engine.pin_local(node.chain("n", prompt))
    try:
        return [node.engine.block_array(block_id).copy() for block_id in pinned.block_ids]
    finally:
        node.engine.release(pinned)


def test_blocks_that_the_store_lost_are_published_again_from_the_pool(
    cluster: Callable[..., Any], idle: Callable[..., Any], seed: int
) -> None:
    async def main() -> None:
        async with cluster() as c:
            node, other = await c.add("prefill-1", Role.PREFILL), await c.add("prefill-2", Role.PREFILL)
            prompt = random_prompt(seed, 80)
            await c.prefill(node, prompt)
            chain = node.chain("n", prompt)
            assert await node.store.delete(node.key_space("n"), chain[4:]) == 6
            before = _blocks(node, prompt)
            assert last(await c.prefill(node, prompt)) == (10, 10, 10, False)
            assert last(await c.prefill(other, prompt + [5] * 8)) == (10, 11, 11, False)
            for array, again in zip(before, _blocks(other, prompt), strict=True):
                np.testing.assert_array_equal(array, again)
            await idle(node)

    asyncio.run(main())


def test_blocks_that_are_sealed_again_in_no_time_are_waited_for(
    cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    def done_at_once(work: Callable[..., Any], /, *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args))
        return done

    async def main() -> None:
        async with cluster() as c:
            node = await c.add("prefill-1", Role.PREFILL)
            prompt = random_prompt(seed, 80)
            await c.prefill(node, prompt)
            await node.store.delete(node.key_space("n"), node.chain("n", prompt)[4:])
            with monkeypatch.context() as patch:
                patch.setattr(node.executor, "submit", done_at_once)
                assert last(await c.prefill(node, prompt)) == (10, 10, 10, False)

    asyncio.run(main())


def test_a_prompt_shorter_than_a_block_is_done_at_once(cluster: Callable[..., Any]) -> None:
    async def main() -> None:
        async with cluster(stores=0) as c:
            node = await c.add("prefill-1", Role.PREFILL)
            assert last(await c.prefill(node, [5, 6, 7])) == (0, 0, 0, False)

    asyncio.run(main())


def test_prompts_at_once_are_all_published(cluster: Callable[..., Any], idle: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            node = await c.add("prefill-1", Role.PREFILL)
            shared = random_prompt(seed, 24)
            prompts = [shared + random_prompt(seed + number, 20 + 9 * number) for number in range(8)]
            for steps, prompt in zip(await asyncio.gather(*(c.prefill(node, prompt) for prompt in prompts)), prompts, strict=True):
                assert last(steps)[1:] == (len(prompt) // 8, len(prompt) // 8, False)
            await idle(node)

    asyncio.run(main())


def test_a_prompt_that_gave_its_blocks_up_takes_the_published_ones_from_the_store(
    cluster: Callable[..., Any], idle: Callable[..., Any], seed: int
) -> None:
    async def main() -> None:
        async with cluster(stores=2) as c:
            roomy, small = await c.add("prefill-1", Role.PREFILL), await c.add("prefill-2", Role.PREFILL, pool_blocks=20)
            # Somebody else has computed the first half of each.
            prompts = [random_prompt(seed + number, 110) for number in range(3)]
            for prompt in prompts:
                await c.prefill(roomy, prompt[:80])
            resume, submit, run_chunks = small.engine.resume, small.engine.submit, small.engine._runner.run_chunks
            came_back: list[int] = []
            submitted = threading.Semaphore(0)

            def counted_submit(*arguments: Any) -> None:
                submit(*arguments)
                submitted.release()

            def once_all_wait(spans: Any) -> None:
                small.engine._runner.run_chunks = run_chunks
                for _ in prompts:
                    assert submitted.acquire(timeout=60)
                run_chunks(spans)

            def counted(request_id: str, pinned: Any) -> None:
                came_back.append(len(pinned.block_ids))
                resume(request_id, pinned)

            small.engine.resume, small.engine.submit = counted, counted_submit
            small.engine._runner.run_chunks = once_all_wait
            ends = await asyncio.gather(*(c.prefill(small, prompt) for prompt in prompts))
            assert all(last(steps)[1:] == (13, 13, False) for steps in ends)
            assert came_back[-1] == 10, "the last one has the pool for itself"
            await idle(small)

    asyncio.run(main())


def test_a_call_that_goes_away_stops_its_work(cluster: Callable[..., Any], idle: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            node = await c.add("prefill-1", Role.PREFILL)
            call = PrefillCall(request_id="gone", namespace="n", token_ids=tuple(random_prompt(seed, 900)))
            run_chunks, passes, go_on = node.engine._runner.run_chunks, [], threading.Event()

            def held_after_8_blocks(spans: Any) -> None:
                passes.append(len(spans))
                assert len(passes) <= 8 or go_on.wait(30)
                run_chunks(spans)

            node.engine._runner.run_chunks = held_after_8_blocks
            async with aclosing(PrefillSession(call, node).progress()) as progress:
                async for step in progress:
                    if step.published_blocks:
                        break
            go_on.set()
            await idle(node)
            assert len(passes) <= 8 + 4, "the step under way of four blocks, and no more"
            assert await node.publisher.flush(timeout=10**10)
            assert await node.store.probe_prefix(node.key_space("n"), node.chain("n", call.token_ids)) < 112

    asyncio.run(main())


def test_a_drain_ends_the_call_and_keeps_what_is_published(cluster: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            node, other = await c.add("prefill-1", Role.PREFILL), await c.add("prefill-2", Role.PREFILL)
            prompt = random_prompt(seed, 900)
            call = PrefillCall(request_id="gone", namespace="n", token_ids=tuple(prompt))
            steps: list[Progress] = []
            begun = asyncio.Event()

            async def follow() -> None:
                async with aclosing(PrefillSession(call, node).progress()) as progress:
                    async for step in progress:
                        steps.append(step)
                        if step.published_blocks:
                            begun.set()

            stream = asyncio.create_task(follow())
            await begun.wait()
            await node.drain()
            with pytest.raises(Unavailable, match="draining"):
                await stream
            published = steps[-1].published_blocks
            assert 0 < published < 112
            cached, *rest = last(await c.prefill(other, prompt))
            assert cached >= published
            assert rest == [112, 112, False]

    asyncio.run(main())


def test_a_block_that_cannot_be_encoded_stays_unpublished_and_the_prompt_is_done(cluster: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster() as c:
            node = await c.add("prefill-1", Role.PREFILL)
            encode = node.codec.encode_canonical

            def failing(block: np.ndarray, *, start_position: int) -> bytes:
                if start_position == 40:
                    raise CodecFailure("not_finite")
                return encode(block, start_position=start_position)

            node.codec.encode_canonical = failing
            assert last(await c.prefill(node, random_prompt(seed, 80))) == (0, 5, 10, True)

    asyncio.run(main())


@pytest.mark.parametrize(("prompt", "says"), [([], "empty"), ([5] * 1025, "1024"), ([512], "token id 512")])
def test_a_wrong_prompt_is_refused(cluster: Callable[..., Any], prompt: list[int], says: str) -> None:
    async def main() -> None:
        async with cluster(stores=0) as c:
            node = await c.add("prefill-1", Role.PREFILL)
            with pytest.raises(InvalidRequest, match=says):
                await c.prefill(node, prompt)

    asyncio.run(main())


def test_an_engine_that_broke_ends_the_node_and_its_streams_go_elsewhere(
    cluster: Callable[..., Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with cluster(stores=0) as c:
            node = await c.add("prefill-1", Role.PREFILL)

            def broken() -> bool:
                raise RuntimeError("a bug")

            monkeypatch.setattr(node.engine, "_turn", broken)
            with pytest.raises(Unavailable, match="engine"):
                await c.prefill(node, random_prompt(seed, 40))
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as ended:
        asyncio.run(main())
    assert ended.group_contains(RuntimeError, match="the engine thread has ended")
