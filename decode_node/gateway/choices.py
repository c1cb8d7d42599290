"""The answers to one request: its choices, told apart by their index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from decode_node.gateway.answer import Answer, Delta

_AHEAD = 4
"""Deltas of each choice that may wait for the client."""


class Choices:
    """One pass: `deltas` can be taken once."""

    def __init__(self, open_answer: Callable[[int, asyncio.Event], Answer], *, count: int) -> None:
        """`open_answer(index, begun)` makes the answer of a choice. All but choice 0 wait for `begun` before they ask a node: then the
        prompt's blocks are where choice 0 was sent, and are computed once."""
        self._begun = asyncio.Event()
        self._answers = [open_answer(index, self._begun) for index in range(count)]

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield (index, delta) as they come; each choice ends with a delta that has its finish reason. Closing it cancels the work on
        every node. Raises like Answer.deltas as soon as one choice does; the others are cancelled then."""
        if len(self._answers) == 1:
            async with aclosing(self._answers[0].deltas()) as deltas:
                async for delta in deltas:
                    yield 0, delta
            return
        arrived: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(_AHEAD * len(self._answers))
        takers = [asyncio.ensure_future(self._take(index, answer, arrived)) for index, answer in enumerate(self._answers)]
        try:
            running = len(takers)
            while running:
                index, item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield index, item
        finally:
            for taker in takers:
                taker.cancel()
            await asyncio.gather(*takers, return_exceptions=True)

    async def _take(self, index: int, answer: Answer, arrived: asyncio.Queue[tuple[int, Delta | Exception | None]]) -> None:
        try:
            async with aclosing(answer.deltas()) as deltas:
                async for delta in deltas:
                    self._begun.set()
                    await arrived.put((index, delta))
        except Exception as error:
            await arrived.put((index, error))
            return
        await arrived.put((index, None))

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object: the prompt counts once, the answers add up."""
        usage, *others = [answer.usage() for answer in self._answers]
        for other in others:
            usage["completion_tokens"] += other["completion_tokens"]
            usage["total_tokens"] += other["completion_tokens"]
            for count in ("failovers", "moves"):
                usage["larder"][count] += other["larder"][count]
            for longest in ("max_gap_ms", "notice_ms", "takeover_ms"):
                usage["larder"][longest] = max(usage["larder"][longest], other["larder"][longest])
            usage["larder"]["decode_nodes"] += other["larder"]["decode_nodes"]
        return usage


def seed_of_choice(seed: int, index: int) -> int:
    """Choice 0 has the request's seed, so n changes nothing in it. Unsigned, 64 bits."""
    return (seed + index * 0x9E3779B97F4A7C15) % (1 << 64)
