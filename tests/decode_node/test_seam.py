"""Sessions of the gateway over real engines: whatever ends a stream, the next node goes on with the same tokens and logprobs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ANSWER = 20
PROMPTS = (11, 27, 44, 61)


@pytest.fixture
def kitchen(session_kitchen: ModuleType, tiny_folder: Path) -> Callable[..., Any]:
    """`async with kitchen(dtype="bfloat16") as k:`"""
    return lambda **options: session_kitchen.opened_kitchen(tiny_folder, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streams_struck_again_and_again_in_a_changing_batch_are_those_left_alone(
    kitchen: Callable[..., Any], session_kitchen: ModuleType, dtype: str, seed: int
) -> None:
    """Broken streams and steps that raise, which fail every stream in them; greedy and sampled side by side."""

    async def main() -> None:
        async with kitchen(dtype=dtype) as k:
            draw = random.Random(seed)
            prompts = [[draw.randrange(3, 500) for _ in range(tokens)] for tokens in PROMPTS]
            samplings = [session_kitchen.GREEDY, session_kitchen.SAMPLED] * 2
            asked = list(zip(prompts, samplings, strict=True))
            alone = [await k.stream(*request, "alone", tokens=ANSWER, top_logprobs=3) for request in asked]
            blows = [(set(draw.sample(range(ANSWER), 2)), set(draw.sample(range(ANSWER), 1))) for _ in prompts]
            struck = await asyncio.gather(
                *(
                    k.stream(*request, "struck", tokens=ANSWER, kill_at=breaks, fault_at=faults, top_logprobs=3)
                    for request, (breaks, faults) in zip(asked, blows, strict=True)
                )
            )
            assert k.killer.kills == 3 * len(prompts)
            assert all(streamed.story.failovers >= 2 for streamed in struck)  # a step may fail for one that has gone already
            for left, hit, blow in zip(alone, struck, blows, strict=True):
                assert hit.tokens == left.tokens, f"seed {seed}: {blow}"
                assert hit.logprobs == left.logprobs, f"seed {seed}: {blow}"
                assert all(found is not None and len(found.top) == 3 for found in hit.logprobs)

    asyncio.run(main())


def test_streams_of_a_draining_node_move_within_two_steps(kitchen: Callable[..., Any], session_kitchen: ModuleType, seed: int) -> None:
    """What the client waits for is the step in which the successor is, and one that computes the tail: it has every full block."""

    async def main() -> None:
        async with kitchen(dtype="bfloat16", names=("decode-1", "decode-2")) as k:
            draw = random.Random(seed)
            prompts = [[draw.randrange(3, 500) for _ in range(tokens)] for tokens in PROMPTS]
            samplings = [session_kitchen.GREEDY, session_kitchen.SAMPLED] * 2
            asked = list(zip(prompts, samplings, strict=True))
            alone = [await k.stream(*request, "alone", tokens=120) for request in asked]
            counts, grown = [0] * len(prompts), asyncio.Event()
            drained: list[str] = []

            def note(stream: int, count: int) -> None:
                counts[stream] = count
                grown.set()
                if count == 30 and max(counts) == 30:
                    drained.append(max(k.nodes, key=lambda name: k.nodes[name].engine.load().running))
                    k.drain(drained[0])

            slowed: set[int] = set()

            async def while_another_block_fills(token_ids: Sequence[int]) -> None:
                (stream,) = [number for number, prompt in enumerate(prompts) if list(token_ids[: len(prompt)]) == prompt]
                if stream not in slowed:
                    slowed.add(stream)
                    while len(prompts[stream]) + counts[stream] < len(token_ids) + 10:
                        grown.clear()
                        await grown.wait()

            for backend in k.backends.values():
                backend.preparing, backend.step_takes_s = while_another_block_fills, 0.005
            moved = await asyncio.gather(
                *(k.stream(*request, "moved", tokens=120, on_token=partial(note, number)) for number, request in enumerate(asked))
            )
            assert [streamed.tokens for streamed in moved] == [streamed.tokens for streamed in alone]
            assert sum(streamed.story.failovers for streamed in moved) == 0
            moves = sum(streamed.story.moves for streamed in moved)
            assert moves == sum(len(streamed.story.decode_nodes) == 2 for streamed in moved) >= 1
            (successor,) = k.nodes.keys() - drained
            arrived = [arrival for arrival in k.backends[successor].arrivals.values() if arrival.request_id.endswith("-2")]
            assert len(arrived) == moves
            for arrival in arrived:
                assert arrival.loaded.store_blocks == 0, "loaded while the old node went on"
                assert arrival.loaded.recomputed_tokens <= 8, "no more than the tail"
                assert arrival.steps_to_first_token <= 2

    asyncio.run(main())
