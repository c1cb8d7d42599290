from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from kvstore.node.garbage import collect_garbage
from kvstore.units import milliseconds

OFTEN = milliseconds(10)


class Link:
    """Refers to itself: only the collector finds it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    """No collection but those of the test."""
    gc.disable()
    yield
    gc.enable()


def end_of(link: Link) -> asyncio.Event:
    gone = asyncio.Event()
    weakref.finalize(link, gone.set)
    return gone


async def until_new_one_goes() -> None:
    await asyncio.wait_for(end_of(Link()).wait(), 60)


def test_new_cycles_go_and_what_lives_is_looked_at_once() -> None:
    async def main() -> None:
        collecting = asyncio.create_task(collect_garbage(every=OFTEN))
        await until_new_one_goes()
        lives = Link()
        await until_new_one_goes()
        assert not any(each is lives for each in gc.get_objects()), "it is put aside"
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
        assert any(each is lives for each in gc.get_objects())

    asyncio.run(main())


def test_a_cycle_that_ends_after_it_was_put_aside_goes_with_the_next_whole_look() -> None:
    async def main() -> None:
        collecting = asyncio.create_task(collect_garbage(every=OFTEN, all_of_it_every=milliseconds(30)))
        lives = Link()
        await until_new_one_goes()
        gone = end_of(lives)
        del lives
        await asyncio.wait_for(gone.wait(), 60)
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)

    asyncio.run(main())
