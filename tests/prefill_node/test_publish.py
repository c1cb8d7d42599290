"""The queue between an engine thread and a store: order, bounds, what a request learns of its blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvstore.client import Acknowledge, BlockPut, PutOutcome, PutReport
from kvstore.ids import BlockHash, BlockRef, KeySpace, LayoutFingerprint, Namespace, StripeId
from kvstore.units import Bytes, milliseconds, seconds
from prefill_node.publish import PublishConfig, Publisher, SealedPayload

KEY_SPACE = KeySpace(Namespace("n"), LayoutFingerprint(bytes(32)))


def ref(index: int) -> BlockRef:
    def digest(number: int) -> bytes:
        return number.to_bytes(32, "big")

    return BlockRef(BlockHash(digest(index + 1)), BlockHash(digest(index)), StripeId(digest(index // 8)), index)


CHAIN = [ref(index) for index in range(20)]


def sealed(index: int, *, size: int = 100, key_space: KeySpace = KEY_SPACE) -> SealedPayload:
    return SealedPayload(key_space, ref(index), bytes(size))


class Shelf:
    """Takes batches when its gate is open, and answers what it was told to."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.batches: list[tuple[KeySpace, list[int]]] = []
        self.outcome_of: dict[int, PutOutcome] = {}
        self.raises: Exception | None = None

    async def put(self, key_space: KeySpace, blocks: Sequence[BlockPut], *, acknowledge: Acknowledge = Acknowledge.QUORUM) -> PutReport:
        self.batches.append((key_space, [block.ref.index for block in blocks]))
        self.entered.set()
        await self.gate.wait()
        if self.raises is not None:
            raise self.raises
        return PutReport(tuple(self.outcome_of.get(block.ref.index, PutOutcome.STORED) for block in blocks))


@asynccontextmanager
async def running(shelf: Shelf, **options: object) -> AsyncIterator[Publisher]:
    publisher = Publisher(shelf, config=PublishConfig(**options))  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as group:
        task = group.create_task(publisher.run())
        await asyncio.sleep(0)
        try:
            yield publisher
        finally:
            task.cancel()


def test_offers_from_another_thread_arrive_in_order_and_are_followed_to_the_end() -> None:
    async def main() -> None:
        shelf = Shelf()
        async with running(shelf, batch_blocks=4, batches_in_flight=1) as publisher:
            publication = publisher.watch(KEY_SPACE, CHAIN)
            engine = threading.Thread(target=lambda: [publisher.offer(sealed(index), wait=True) for index in range(10)])
            engine.start()
            while publication.readable_blocks < 10:
                await publication.changed()
            engine.join()
            assert [index for _, batch in shelf.batches for index in batch] == list(range(10))
            assert max(len(batch) for _, batch in shelf.batches) <= 4
            assert not publication.done
            publication.complete()
            assert publication.done
            assert not publication.degraded
            assert publisher.held_bytes == 0

    asyncio.run(main())


def test_a_failed_block_ends_the_readable_run_and_nothing_else() -> None:
    async def main() -> None:
        shelf = Shelf()
        shelf.outcome_of = {2: PutOutcome.FAILED, 3: PutOutcome.DEGRADED}
        async with running(shelf) as publisher:
            publication = publisher.watch(KEY_SPACE, CHAIN)
            for index in range(6):
                assert publisher.offer(sealed(index), wait=False)
            assert await publisher.flush(timeout=seconds(5))
            publication.complete()
            assert publication.readable_blocks == 2
            assert publication.degraded
            assert publication.done

    asyncio.run(main())


def test_blocks_found_in_the_store_join_the_run() -> None:
    async def main() -> None:
        async with running(Shelf()) as publisher:
            publication = publisher.watch(KEY_SPACE, CHAIN)
            publisher.offer(sealed(3), wait=False)
            assert await publisher.flush(timeout=seconds(5))
            assert publication.readable_blocks == 0
            publication.note_readable(3)
            assert publication.readable_blocks == 4

    asyncio.run(main())


def test_a_block_that_another_request_sealed_counts_for_every_chain_it_is_in() -> None:
    async def main() -> None:
        shelf = Shelf()
        shelf.gate.clear()
        async with running(shelf) as publisher:
            early = publisher.watch(KEY_SPACE, CHAIN[:2])
            publisher.offer(sealed(0), wait=False)
            await shelf.entered.wait()
            assert publisher.is_on_its_way((KEY_SPACE, CHAIN[0].hash))
            late = publisher.watch(KEY_SPACE, CHAIN[:5])
            late.complete()
            assert not late.done
            shelf.gate.set()
            assert await publisher.flush(timeout=seconds(5))
            assert late.done
            assert early.readable_blocks == late.readable_blocks == 1
            assert not publisher.is_on_its_way((KEY_SPACE, CHAIN[0].hash))
            publisher.forget(late)
            publisher.offer(sealed(1), wait=False)
            assert await publisher.flush(timeout=seconds(5))
            assert (early.readable_blocks, late.readable_blocks) == (2, 1)

    asyncio.run(main())


def test_a_full_queue_drops_what_may_not_wait_and_says_so() -> None:
    async def main() -> None:
        shelf = Shelf()
        shelf.gate.clear()
        async with running(shelf, queue_bytes=Bytes(250)) as publisher:
            publication = publisher.watch(KEY_SPACE, CHAIN)
            assert [publisher.offer(sealed(index), wait=False) for index in range(4)] == [True, True, False, False]
            shelf.gate.set()
            assert await publisher.flush(timeout=seconds(5))
            await asyncio.sleep(0)
            assert publication.readable_blocks == 2
            assert publication.degraded

    asyncio.run(main())


def test_a_full_queue_holds_up_who_may_wait_until_there_is_room() -> None:
    async def main() -> None:
        shelf = Shelf()
        shelf.gate.clear()
        async with running(shelf, queue_bytes=Bytes(250), batch_blocks=1, wait_for_room=seconds(20)) as publisher:
            publication = publisher.watch(KEY_SPACE, CHAIN)
            taken: list[bool] = []
            engine = threading.Thread(target=lambda: taken.extend(publisher.offer(sealed(index), wait=True) for index in range(6)))
            engine.start()
            await shelf.entered.wait()
            assert len(taken) <= 2
            shelf.gate.set()
            while publication.readable_blocks < 6:
                await publication.changed()
            await asyncio.to_thread(engine.join)
            assert taken == [True] * 6

    asyncio.run(main())


def test_waiting_for_room_has_a_bound() -> None:
    async def main() -> None:
        shelf = Shelf()
        shelf.gate.clear()
        async with running(shelf, queue_bytes=Bytes(150), wait_for_room=milliseconds(20)) as publisher:
            assert await asyncio.to_thread(publisher.offer, sealed(0), wait=True)
            assert not await asyncio.to_thread(publisher.offer, sealed(1), wait=True)
            shelf.gate.set()

    asyncio.run(main())


def test_a_payload_larger_than_the_queue_passes_through_an_empty_one() -> None:
    async def main() -> None:
        async with running(Shelf(), queue_bytes=Bytes(10)) as publisher:
            assert publisher.offer(sealed(0, size=1000), wait=False)
            assert await publisher.flush(timeout=seconds(5))
            assert publisher.held_bytes == 0

    asyncio.run(main())


def test_batches_never_mix_key_spaces() -> None:
    async def main() -> None:
        other = KeySpace(Namespace("other"), LayoutFingerprint(bytes(32)))
        shelf = Shelf()
        async with running(shelf) as publisher:
            for index in range(8):
                publisher.offer(sealed(index, key_space=other if index % 2 else KEY_SPACE), wait=False)
            assert await publisher.flush(timeout=seconds(5))
        assert all(len({index % 2 for index in batch}) == 1 for _, batch in shelf.batches)
        assert sum(len(batch) for _, batch in shelf.batches) == 8

    asyncio.run(main())


def test_a_put_that_raises_fails_its_blocks_and_the_publisher_goes_on() -> None:
    async def main() -> None:
        shelf = Shelf()
        shelf.raises = RuntimeError("broken")
        async with running(shelf) as publisher:
            publication = publisher.watch(KEY_SPACE, CHAIN)
            publisher.offer(sealed(0), wait=False)
            assert await publisher.flush(timeout=seconds(5))
            assert publication.degraded
            shelf.raises = None
            publisher.offer(sealed(0), wait=False)
            assert await publisher.flush(timeout=seconds(5))
            assert publication.readable_blocks == 1

    asyncio.run(main())


def test_a_flush_has_a_bound() -> None:
    async def main() -> None:
        shelf = Shelf()
        shelf.gate.clear()
        async with running(shelf) as publisher:
            publisher.offer(sealed(0), wait=False)
            assert not await publisher.flush(timeout=milliseconds(20))
            shelf.gate.set()

    asyncio.run(main())


def test_a_stopped_publisher_refuses_and_releases_who_waits() -> None:
    async def main() -> None:
        shelf = Shelf()
        shelf.gate.clear()
        async with running(shelf, queue_bytes=Bytes(100), wait_for_room=seconds(60)) as publisher:
            assert publisher.offer(sealed(0), wait=False)
            waiting = asyncio.create_task(asyncio.to_thread(publisher.offer, sealed(1), wait=True))
            await shelf.entered.wait()
        assert await waiting is False
        assert not publisher.offer(sealed(2), wait=False)

    asyncio.run(main())
