"""What a full block goes through: canonical in place, its payload queued, its failures counted and survived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvstore.client import Acknowledge, BlockPut, PutOutcome, PutReport
from kvstore.codec import BlockCodec, Rung, read_header
from kvstore.core.layout import Layout
from kvstore.ids import BEHIND_RECODED, BlockHash, BlockRef, KeySpace, Namespace, RungCode, StripeId
from kvstore.units import seconds
from prefill_node import metrics
from prefill_node.publish import PublishConfig, Publisher
from prefill_node.sealer import PublishingSealer

LAYOUT = Layout(layers=2, kv_heads=2, head_dim=16, dtype="float32", block_tokens=8)
DIGEST = bytes(range(32))
KEY_SPACE = KeySpace(Namespace("n"), LAYOUT.fingerprint)
REF = BlockRef(BlockHash(b"h" * 32), BlockHash(b"p" * 32), StripeId(b"s" * 32), 1)


class Shelf:
    def __init__(self) -> None:
        self.payloads: list[bytes | memoryview] = []
        self.rungs: list[RungCode] = []

    async def put(self, key_space: KeySpace, blocks: Sequence[BlockPut], *, acknowledge: Acknowledge = Acknowledge.QUORUM) -> PutReport:
        assert key_space == KEY_SPACE
        self.payloads += [block.payload for block in blocks]
        self.rungs += [block.rung for block in blocks]
        return PutReport(tuple(PutOutcome.STORED for _ in blocks))


def codec(rung: Rung = Rung.INT8) -> BlockCodec:
    return BlockCodec(LAYOUT, model_digest=DIGEST, rung=rung)


def block(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, 2, 2, 8, 16)).astype(np.float32)


@asynccontextmanager
async def sealing() -> AsyncIterator[tuple[PublishingSealer, Publisher, Shelf]]:
    shelf = Shelf()
    publisher = Publisher(shelf, config=PublishConfig())
    async with asyncio.TaskGroup() as group:
        task = group.create_task(publisher.run())
        await asyncio.sleep(0)
        yield PublishingSealer(codec(), publisher, exact=codec(Rung.RAW), wait_for_room=False), publisher, shelf
        task.cancel()


def test_a_sealed_block_holds_what_its_payload_gives_back(seed: int) -> None:
    async def main() -> None:
        async with sealing() as (sealer, publisher, shelf):
            sealer.open("r", KEY_SPACE)
            publication = publisher.watch(KEY_SPACE, [REF])
            array = block(seed)
            raw = array.copy()
            await asyncio.to_thread(sealer.seal, REF, array, 8, "r", behind_recoded=True)
            assert await publisher.flush(timeout=seconds(5))
            assert shelf.rungs == [BEHIND_RECODED], "a store must be able to tell its numbers from those of an undisturbed sequence"
            assert not np.array_equal(array, raw)
            decoded = np.empty_like(array)
            codec().decode_into(shelf.payloads[0], decoded, start_position=8)
            np.testing.assert_array_equal(decoded, array)
            publication.complete()
            assert publication.done

    asyncio.run(main())


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_block_that_cannot_be_encoded_is_counted_and_stays_unpublished(seed: int, poison: float) -> None:
    async def main() -> None:
        async with sealing() as (sealer, publisher, shelf):
            sealer.open("r", KEY_SPACE)
            publication = publisher.watch(KEY_SPACE, [REF])
            counted = metrics.codec_failures.labels(reason="not_finite")._value
            before = counted.get()
            array = block(seed)
            array[1, 1, 1, 7, 15] = poison
            raw = array.copy()
            sealer.seal(REF, array, 8, "r", behind_recoded=False)
            assert await publisher.flush(timeout=seconds(5))
            np.testing.assert_array_equal(array, raw)
            assert counted.get() == before + 1
            assert shelf.payloads == []
            assert publication.degraded

    asyncio.run(main())


def test_a_block_sealed_after_its_request_is_canonical_and_unpublished(seed: int) -> None:
    async def main() -> None:
        async with sealing() as (sealer, publisher, shelf):
            sealer.open("r", KEY_SPACE)
            sealer.close("r")
            array, raw = block(seed), block(seed)
            sealer.seal(REF, array, 8, "r", behind_recoded=False)
            assert await publisher.flush(timeout=seconds(5))
            assert not np.array_equal(array, raw)
            assert shelf.payloads == []

    asyncio.run(main())


def test_a_republished_block_gives_back_exactly_the_pool_s_numbers(seed: int) -> None:
    async def main() -> None:
        async with sealing() as (sealer, publisher, shelf):
            sealer.open("r", KEY_SPACE)
            for number in range(8):
                array = block(seed + number)
                if number % 2:
                    codec(Rung.INT4).encode_canonical(array, start_position=8)
                before = array.copy()
                await asyncio.to_thread(sealer.republish, REF, array, 8, "r")
                assert await publisher.flush(timeout=seconds(5))
                np.testing.assert_array_equal(array, before)
                decoded = np.empty_like(array)
                codec().decode_into(shelf.payloads[-1], decoded, start_position=8)
                np.testing.assert_array_equal(decoded, before)
            assert {read_header(payload).rung for payload in shelf.payloads} >= {Rung.RAW}

    asyncio.run(main())
