"""Blocks on their way into the pool: no worker is left at one that is let go, and none counts whose bytes may have been another's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.client.answers import ReadBlock
from kvstore.core.extent import Tier
from kvstore.errors import Unavailable
from kvstore.ids import NodeId
from kvstore.units import Nanos, milliseconds, seconds
from prefill_node.prefix import FetchedRun, fetch_run

BLOCKS = 3


class Codec:
    """Its numbers are the payload's bytes; it is as slow as the test wants."""

    layout = SimpleNamespace(block_tokens=4)

    def __init__(self, before_end: Callable[[], None] = lambda: None) -> None:
        self.before_end = before_end

    def decode_into(self, payload: memoryview, out: np.ndarray, *, start_position: int) -> None:
        self.before_end()
        out[:] = np.frombuffer(payload, np.uint8)


class Store:
    """Gives the payloads, and then does what `then` does."""

    def __init__(self, payloads: Sequence[bytes], *, good: Callable[[int], bool] = lambda index: True, then: Any = None) -> None:
        self._payloads, self._good, self._then = payloads, good, then

    async def read(self, lease: Any, *, indices: Any, in_place: bool) -> AsyncIterator[ReadBlock]:
        for index, payload in enumerate(self._payloads):
            yield ReadBlock(index, memoryview(payload), Tier.HOST, NodeId("s"), "ok", still_good=lambda index=index: self._good(index))
        if self._then is not None:
            await self._then()


async def fetch(store: Store, codec: Codec, arrays: Sequence[np.ndarray], *, allowed: Nanos = seconds(60)) -> FetchedRun:
    lease = SimpleNamespace(copies=[SimpleNamespace(tier=Tier.HOST)] * len(arrays))
    with ThreadPoolExecutor(2) as executor:
        return await fetch_run(
            store,  # type: ignore[arg-type]
            lease,  # type: ignore[arg-type]
            codec,  # type: ignore[arg-type]
            executor,
            arrays,
            first=0,
            start_position=0,
            allowed=lambda blocks: allowed,
        )


@pytest.mark.parametrize("way_out", ["deadline", "cancelled", "the read fails"])
def test_whatever_ends_a_fetch_it_waits_for_the_workers_at_its_blocks(way_out: str) -> None:
    """The block is another sequence's as soon as the fetch has ended."""
    begun, go_on, arrays = threading.Event(), threading.Event(), [np.zeros(4, np.uint8) for _ in range(2)]

    def hold() -> None:
        begun.set()
        go_on.wait(60)

    async def then() -> None:
        if way_out == "the read fails":
            raise Unavailable("gone")
        await asyncio.Event().wait()

    async def scenario() -> None:
        allowed = milliseconds(20) if way_out == "deadline" else seconds(60)
        fetching = asyncio.create_task(fetch(Store([b"1111"], then=then), Codec(hold), arrays, allowed=allowed))
        assert await asyncio.to_thread(begun.wait, 60)
        if way_out == "cancelled":
            fetching.cancel()
        done, _ = await asyncio.wait([fetching], timeout=0.2)
        assert not done, "a worker is at its block"
        go_on.set()
        await asyncio.wait([fetching])
        assert fetching.cancelled() == (way_out == "cancelled")
        assert bytes(arrays[0]) == b"1111"

    try:
        asyncio.run(scenario())
    finally:
        go_on.set()


@pytest.mark.parametrize("ends_at", range(BLOCKS + 1))
def test_a_block_whose_lease_ended_while_it_was_decoded_in_place_ends_the_run(ends_at: int) -> None:
    """Its memory may have been another block's by then, whatever its checksum said before."""
    payloads = [bytes([index]) * 4 for index in range(BLOCKS)]
    arrays = [np.full(4, 99, np.uint8) for _ in payloads]
    run = asyncio.run(fetch(Store(payloads, good=lambda index: index != ends_at), Codec(), arrays))
    assert (run.blocks, run.canonical) == (ends_at, ends_at)
    assert run.ended_by == ("bad_payload" if ends_at < BLOCKS else "")
    assert [bytes(array) for array in arrays[:ends_at]] == payloads[:ends_at]
