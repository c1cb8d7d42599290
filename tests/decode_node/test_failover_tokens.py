"""A stream cut anywhere goes on elsewhere with the tokens it would have had."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.core.view import Role
from prefill_node.engine.request import SamplingParams

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=11)
PENALIZED = SamplingParams(
    temperature=0.7, min_p=0.02, presence_penalty=0.5, frequency_penalty=0.6, repetition_penalty=1.3, logit_bias=((7, 3.0),), seed=12
)
"""What it takes off depends on prompt and answer so far: the successor must count what its predecessor drew."""
ANSWER = 20


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalized"])
def test_a_successor_goes_on_with_equal_tokens_at_every_cut(
    cluster: Callable[..., Any], idle: Callable[..., Any], sampling: SamplingParams, seed: int
) -> None:
    async def main() -> None:
        async with cluster(stores=3) as c:
            first = await c.add("decode-1", Role.DECODE)
            second = await c.add("decode-2", Role.DECODE)
            prompt = [random.Random(seed).randrange(3, 500) for _ in range(27)]
            whole = await c.generate(first, c.call(prompt, max_tokens=ANSWER, sampling=sampling, namespace="whole"))
            for cut in range(ANSWER):
                # A namespace for each cut: nothing of an earlier one helps.
                namespace = f"cut-{cut}"
                begun = await c.generate(
                    first, c.call(prompt, max_tokens=ANSWER, sampling=sampling, namespace=namespace), cut_after=cut or 1
                )
                have = begun.tokens[:cut]
                await first.publisher.flush(timeout=10**10)
                rest = await c.generate(second, c.call(prompt, generated=have, max_tokens=ANSWER, sampling=sampling, namespace=namespace))
                assert have + rest.tokens == whole.tokens, f"cut at {cut}"
                assert rest.positions == list(range(cut, ANSWER)), f"cut at {cut}"
            await idle(first)
            await idle(second)

    asyncio.run(main())


@pytest.mark.parametrize("tokens", [12, 27, 61])
def test_a_successor_that_finds_nothing_computes_equal_tokens(cluster: Callable[..., Any], seed: int, tokens: int) -> None:
    async def main() -> None:
        async with cluster(stores=0) as c:
            first, second = await c.add("decode-1", Role.DECODE), await c.add("decode-2", Role.DECODE)
            prompt = [random.Random(seed + 3).randrange(3, 500) for _ in range(tokens)]
            whole = await c.generate(first, c.call(prompt, max_tokens=40, sampling=SAMPLED))
            for cut in (1, 7, 18, 33, 39):
                call = c.call(prompt, generated=whole.tokens[:cut], max_tokens=40, sampling=SAMPLED, namespace=f"cut-{cut}")
                assert whole.tokens[:cut] + (await c.generate(second, call)).tokens == whole.tokens, f"cut at {cut}"

    asyncio.run(main())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_successor_computes_what_no_replica_has_any_more(cluster: Callable[..., Any], seed: int, dtype: str) -> None:
    async def main() -> None:
        async with cluster(stores=2) as c:
            c.dtype = dtype
            first, second = await c.add("decode-1", Role.DECODE), await c.add("decode-2", Role.DECODE)
            prompt = [random.Random(seed + 4).randrange(3, 500) for _ in range(45)]
            whole = await c.generate(first, c.call(prompt, max_tokens=ANSWER, sampling=SAMPLED, namespace="whole"))
            have = whole.tokens[: ANSWER - 3]
            for lost in (2, 6):  # of the prompt, of the answer
                namespace = f"without {lost}"
                await c.generate(first, c.call(prompt, max_tokens=ANSWER, sampling=SAMPLED, namespace=namespace), cut_after=len(have))
                await first.publisher.flush(timeout=10**10)
                refs = first.chain(namespace, [*prompt, *have])
                assert await first.store.delete(first.key_space(namespace), [refs[lost]]) == 1
                rest = await c.generate(second, c.call(prompt, generated=have, max_tokens=ANSWER, sampling=SAMPLED, namespace=namespace))
                assert rest.loaded is not None
                assert rest.loaded.store_blocks == lost
                assert have + rest.tokens == whole.tokens

    asyncio.run(main())


def test_a_long_prompt_prefilled_elsewhere_survives_several_failovers(cluster: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster(stores=3) as c:
            prefill = await c.add("prefill-1", Role.PREFILL)
            nodes = [await c.add(f"decode-{number}", Role.DECODE) for number in (1, 2, 3)]
            prompt = [random.Random(seed + 1).randrange(3, 500) for _ in range(203)]
            steps = await c.prefill(prefill, prompt)
            assert steps[-1].done
            assert steps[-1].published_blocks == steps[-1].prompt_blocks == 25
            whole = await c.generate(nodes[2], c.call(prompt, max_tokens=40, sampling=SAMPLED))
            assert whole.loaded is not None
            assert whole.loaded.store_blocks == 25
            have: list[int] = []
            for turn, cut in enumerate((5, 9, 17)):
                part = await c.generate(nodes[turn % 2], c.call(prompt, generated=have, max_tokens=40, sampling=SAMPLED), cut_after=cut)
                have += part.tokens
            rest = await c.generate(nodes[1], c.call(prompt, generated=have, max_tokens=40, sampling=SAMPLED))
            assert have + rest.tokens == whole.tokens

    asyncio.run(main())


def test_equal_tokens_in_a_changing_batch(cluster: Callable[..., Any], seed: int) -> None:
    async def main() -> None:
        async with cluster(stores=3) as c:
            prefill = await c.add("prefill-1", Role.PREFILL)
            first = await c.add("decode-1", Role.DECODE)
            second = await c.add("decode-2", Role.DECODE)
            draw = random.Random(seed + 2)
            prompts = [[draw.randrange(3, 500) for _ in range(draw.randrange(5, 60))] for _ in range(6)]
            for namespace in ("alone", "many"):
                for prompt in prompts:
                    await c.prefill(prefill, prompt, namespace=namespace)
            alone = [await c.generate(first, c.call(prompt, max_tokens=16, sampling=SAMPLED, namespace="alone")) for prompt in prompts]

            async def with_failover(prompt: list[int], cut: int) -> list[int]:
                begun = await c.generate(first, c.call(prompt, max_tokens=16, sampling=SAMPLED, namespace="many"), cut_after=cut)
                call = c.call(prompt, generated=begun.tokens, max_tokens=16, sampling=SAMPLED, namespace="many")
                return begun.tokens + (await c.generate(second, call)).tokens

            together = await asyncio.gather(*(with_failover(prompt, draw.randrange(1, 16)) for prompt in prompts))
            assert together == [answer.tokens for answer in alone]

    asyncio.run(main())


def test_a_stream_that_had_all_its_tokens_only_ends(cluster: Callable[..., Any]) -> None:
    async def main() -> None:
        async with cluster(stores=0) as c:
            node = await c.add("decode-1", Role.DECODE)
            prompt = list(range(3, 20))
            whole = await c.generate(node, c.call(prompt, max_tokens=4))
            rest = await c.generate(node, c.call(prompt, generated=whole.tokens, max_tokens=4))
            assert rest.tokens == []
            assert rest.finished == whole.finished
            stopped = await c.generate(node, c.call(prompt, generated=whole.tokens[:2], max_tokens=4, stop_token_ids=[whole.tokens[1]]))
            assert stopped.tokens == []
            assert stopped.finished is not None
            assert stopped.finished.reason == "stop"
            small = await c.add("decode-2", Role.DECODE, pool_blocks=4)
            full = await c.generate(small, c.call(prompt, max_tokens=50))
            assert len(full.tokens) == 4 * 8 - len(prompt)
            ended = await c.generate(small, c.call(prompt, generated=full.tokens, max_tokens=50))
            assert (ended.tokens, ended.finished) == ([], full.finished)

    asyncio.run(main())
