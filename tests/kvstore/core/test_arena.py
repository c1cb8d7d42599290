from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvstore.core.arena import Arena
from kvstore.core.extent import ALIGNMENT, Extent, Tier
from kvstore.ids import Generation

PAGES = 64


class ArenaAgainstAMap(RuleBasedStateMachine):
    """The model is a list with the owner of each page."""

    extents = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(tier=Tier.HOST, capacity=PAGES * ALIGNMENT + 17)
        self.owner: list[Generation | None] = [None] * PAGES
        self.seen: set[Generation] = set()

    def longest_run(self) -> int:
        longest = run = 0
        for owner in self.owner:
            run = run + 1 if owner is None else 0
            longest = max(longest, run)
        return longest

    @rule(target=extents, length=st.integers(0, 20 * ALIGNMENT))
    def allocate(self, length: int) -> Extent | None:
        pages = max(1, -(-length // ALIGNMENT))
        fits = pages <= self.longest_run()
        extent = self.arena.allocate(length)
        assert (extent is not None) == fits, "refused although a free run is long enough, or the other way round"
        if extent is None:
            return None
        assert extent.generation not in self.seen
        self.seen.add(extent.generation)
        first = extent.offset // ALIGNMENT
        assert extent.offset % ALIGNMENT == 0
        assert extent.length == length
        assert self.owner[first : first + pages] == [None] * pages, "overlaps a live extent"
        self.owner[first : first + pages] = [extent.generation] * pages
        return extent

    @rule(extent=consumes(extents))
    def free(self, extent: Extent | None) -> None:
        if extent is None:
            return
        self.arena.free(offset=extent.offset, length=extent.length)
        self.owner = [None if owner == extent.generation else owner for owner in self.owner]

    @invariant()
    def used_bytes_are_the_bytes_owned(self) -> None:
        assert self.arena.used == sum(owner is not None for owner in self.owner) * ALIGNMENT
        assert self.arena.largest_free == self.longest_run() * ALIGNMENT


ArenaAgainstAMap.TestCase.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestArenaAgainstAMap = ArenaAgainstAMap.TestCase


def test_everything_freed_is_one_span_again() -> None:
    arena = Arena(tier=Tier.HOST, capacity=1000 * ALIGNMENT)
    random = Random(3)
    live: list[Extent] = []
    for _ in range(3000):
        if live and random.random() < 0.5:
            extent = live.pop(random.randrange(len(live)))
            arena.free(offset=extent.offset, length=extent.length)
        else:
            extent = arena.allocate(random.randrange(30 * ALIGNMENT))
            if extent is not None:
                live.append(extent)
    for extent in live:
        arena.free(offset=extent.offset, length=extent.length)
    assert arena.used == 0
    assert arena.largest_free == arena.capacity


def test_fragmentation_stays_bounded_when_sizes_vary_by_half() -> None:
    """Random replacement of payloads between 40 and 60 pages: at the first refusal more than 80 % is in use."""
    arena = Arena(tier=Tier.HOST, capacity=20_000 * ALIGNMENT)
    random = Random(5)
    live: list[Extent] = []
    lowest = 1.0
    for _ in range(8000):
        extent = arena.allocate(random.randint(40, 60) * ALIGNMENT)
        if extent is not None:
            live.append(extent)
            continue
        lowest = min(lowest, arena.used / arena.capacity)
        victim = live.pop(random.randrange(len(live)))
        arena.free(offset=victim.offset, length=victim.length)
    assert lowest > 0.8


def test_room_comes_back_under_a_new_generation_and_is_freed_once() -> None:
    arena = Arena(tier=Tier.HOST, capacity=4 * ALIGNMENT)
    old = arena.allocate(ALIGNMENT)
    assert old is not None
    arena.free(offset=old.offset, length=old.length)
    new = arena.allocate(ALIGNMENT)
    assert new is not None
    assert (new.offset, new.generation) == (old.offset, old.generation + 1)
    arena.free(offset=new.offset, length=new.length)
    with pytest.raises(AssertionError, match="no live extent"):
        arena.free(offset=new.offset, length=new.length)
