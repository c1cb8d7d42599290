from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.copies import Copy, CopyEvent, CopyState, copy_at
from kvstore.core.index import Entry
from kvstore.core.manifest import encode_footer
from kvstore.core.region import TRANSITIONS, RegionEvent, RegionState, RegionTable, record_of
from kvstore.ids import BlockHash, BlockRef, Generation, KeySpace, LayoutFingerprint, Namespace

PAGE = 4096


def table(count: int = 4, pages: int = 16) -> RegionTable:
    return RegionTable(count=count, region_bytes=pages * PAGE, nonce_seed=b"seed")


def open_region(regions: RegionTable, *, last_resort: bool = False):
    region = regions.choose_to_open(last_resort=last_resort)
    if region is not None:
        regions.opened(region, ok=True)
    return region


def fill_region(regions: RegionTable, space, block, *, length: int = PAGE, at_most: int = 1000) -> list[tuple[Entry, Copy]]:
    """Fills the open region with READABLE copies, or ends it after so many."""
    filled = []
    while regions.has_room(space, length) and len(filled) < at_most:
        entry = Entry(key_space=space, block=block, length=length, checksum=1)
        copy = copy_at(regions.allocate(space, length, generation=Generation(1)), CopyState.WRITING)
        copy.on(CopyEvent.FILLED)
        regions.add_live(copy, entry)
        regions.write_ended(copy)
        filled.append((entry, copy))
    regions.fill()
    return filled


def test_every_state_leads_back_to_free() -> None:
    for start in RegionState:
        reached, todo = {start}, [start]
        while todo:
            state = todo.pop()
            todo += [after for (before, _), after in TRANSITIONS.items() if before is state and after not in reached]
            reached.update(todo)
        assert RegionState.FREE in reached, start


@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, 3 * PAGE])
def test_records_are_placed_front_to_back_and_leave_room_for_the_footer(chain: Callable, space, length: int) -> None:
    regions, block = table(), chain(1)[0]
    region = open_region(regions)
    filled = fill_region(regions, space, block, length=length)
    assert filled
    end = PAGE
    for _, copy in filled:
        assert copy.offset == end + PAGE
        end = copy.offset + -(-length // PAGE) * PAGE
    offset, _ = encode_footer(regions.footer_records(region), nonce=b"n" * 16, region_bytes=16 * PAGE)
    assert end <= offset


def test_one_free_region_is_kept_back_for_relocations(space) -> None:
    regions = table(count=3)
    for _ in range(2):
        assert open_region(regions) is not None
        regions.fill()
    assert open_region(regions) is None
    assert open_region(regions, last_resort=True) is not None


def test_a_region_that_could_not_be_opened_is_free_again(space) -> None:
    regions = table()
    region = regions.choose_to_open(last_resort=False)
    regions.opened(region, ok=False)
    assert regions.free_regions == 4
    assert regions.open is None


def test_the_victim_is_the_region_with_the_most_dead_bytes_if_it_is_worth_it(chain: Callable, space) -> None:
    regions, block = table(), chain(1)[0]
    filled = []
    for _ in range(2):
        open_region(regions)
        filled.append(fill_region(regions, space, block))
    assert regions.choose_victim(min_dead_share=0.1) is None
    for _, copy in filled[1][:2]:
        regions.remove_live(copy)
    for _, copy in filled[0][:1]:
        regions.remove_live(copy)
    assert regions.choose_victim(min_dead_share=0.9) is None
    victim = regions.choose_victim(min_dead_share=0.1)
    assert victim is regions[filled[1][0][1].region]
    assert victim.state is RegionState.EMPTYING


def test_a_short_region_that_is_dead_enough_is_a_victim_although_a_long_one_has_more_dead_bytes(chain: Callable, space) -> None:
    regions, block = table(pages=64), chain(1)[0]
    open_region(regions)
    long = fill_region(regions, space, block)
    open_region(regions)
    short = fill_region(regions, space, block, at_most=2)
    for _, copy in (*long[:2], short[0]):
        regions.remove_live(copy)
    assert regions.choose_victim(min_dead_share=0.4) is regions[short[0][1].region]


def test_dead_records_are_remembered_until_their_region_is_dropped(chain: Callable, space) -> None:
    regions, block = table(), chain(1)[0]
    region = open_region(regions)
    ((_, copy), *_) = fill_region(regions, space, block)
    regions.remove_live(copy)
    ((found, record),) = regions.take_dead(space, block.hash)
    assert (found, record.offset) == (region, copy.offset)
    assert regions.take_dead(space, block.hash) == []


def test_each_use_of_a_region_has_its_own_nonce_and_sequence() -> None:
    regions, seen = table(count=2), set()
    for _ in range(6):
        region = regions.choose_to_open(last_resort=False)
        seen.add((region.header.nonce, region.header.sequence))
        regions.opened(region, ok=False)
    assert len({nonce for nonce, _ in seen}) == len({sequence for _, sequence in seen}) == 6


def test_a_payload_larger_than_a_region_never_fits(space) -> None:
    assert table().fits_a_region(space, 13 * PAGE)
    assert not table().fits_a_region(space, 14 * PAGE)


class RegionsAgainstAList(RuleBasedStateMachine):
    """The model: of each region its state, how far it is written, and the records in it, each with what became of it."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = 12
        self.regions = table(count=4, pages=self.pages)
        self.space = KeySpace(Namespace("n"), LayoutFingerprint(b"l" * 32))
        self.free = [0, 1, 2, 3]  # longest free first
        self.open: int | None = None
        self.state = dict.fromkeys(range(4), RegionState.FREE)
        self.end = dict.fromkeys(range(4), 0)  # pages
        self.writing: list[tuple[Entry, Copy]] = []
        self.live: list[tuple[Entry, Copy]] = []
        self.unfreed: list[tuple[Entry, Copy]] = []
        self.dead: list[tuple[int, bytes, int]] = []  # (region, hash, offset)
        self.sequences: list[int] = []
        self.generation = 0

    def of(self, copies: list[tuple[Entry, Copy]], number: int) -> list[tuple[Entry, Copy]]:
        return [(entry, copy) for entry, copy in copies if copy.region == number]

    def seal_if_written(self, number: int) -> None:
        if self.state[number] is RegionState.FULL and not self.of(self.writing, number):
            self.state[number] = RegionState.SEALED

    @rule(last_resort=st.booleans(), ok=st.sampled_from([True, True, True, False]))
    def open_one(self, last_resort: bool, ok: bool) -> None:
        region = self.regions.choose_to_open(last_resort=last_resort)
        if self.open is not None or len(self.free) <= (0 if last_resort else 1):
            assert region is None
            return
        assert region is not None
        assert region.number == self.free.pop(0)
        assert region.state is RegionState.OPENING
        assert not self.regions.has_room(self.space, 1), "its header is not down yet"
        assert region.header.sequence > max(self.sequences, default=0)
        self.sequences.append(region.header.sequence)
        self.regions.opened(region, ok=ok)
        if ok:
            self.open = region.number
            self.state[region.number], self.end[region.number] = RegionState.OPEN, 1
        else:
            self.free.append(region.number)

    @rule(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), which=st.integers(0, 3))
    def allocate_some(self, sizes: list[int], which: int) -> None:
        for pages in sizes:
            self.allocate(pages, which)

    def allocate(self, pages: int, which: int) -> None:
        fits = self.open is not None and self.end[self.open] + 1 + pages + 1 <= self.pages  # header, payload; a page for the footer
        assert self.regions.has_room(self.space, pages * PAGE) == fits
        if not fits:
            return
        self.generation += 1
        hashed = BlockHash(bytes([which]) * 32)
        entry = Entry(
            key_space=self.space, block=BlockRef(hash=hashed, parent=hashed, stripe=hashed, index=0), length=pages * PAGE, checksum=1
        )
        copy = copy_at(self.regions.allocate(self.space, pages * PAGE, generation=Generation(self.generation)), CopyState.WRITING)
        assert copy.region == self.open
        assert copy.offset == (self.end[self.open] + 1) * PAGE, "front to back"
        self.end[self.open] += 1 + pages
        self.writing.append((entry, copy))

    @precondition(lambda self: self.writing)
    @rule(pick=st.integers(0, 99), ok=st.booleans())
    def end_write(self, pick: int, ok: bool) -> None:
        entry, copy = self.writing.pop(pick % len(self.writing))
        copy.on(CopyEvent.FILLED if ok else CopyEvent.FILL_FAILED)
        if ok:
            self.regions.add_live(copy, entry)
            self.live.append((entry, copy))
        self.regions.write_ended(copy)
        if not ok:
            self.regions.add_dead(record_of(entry, copy), region=copy.region)
            self.dead.append((copy.region, entry.hash, copy.offset))
            self.regions.freed(copy.region)
        self.seal_if_written(copy.region)

    @rule()
    def fill(self) -> None:
        self.regions.fill()
        if self.open is not None:
            self.state[self.open] = RegionState.FULL
            self.seal_if_written(self.open)
            self.open = None

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99))
    def die(self, pick: int) -> None:
        """Unlisted, but somebody still reads it."""
        entry, copy = self.live.pop(pick % len(self.live))
        self.regions.remove_live(copy)
        self.unfreed.append((entry, copy))
        self.dead.append((copy.region, entry.hash, copy.offset))

    @precondition(lambda self: self.unfreed)
    @rule(pick=st.integers(0, 99))
    def free_one(self, pick: int) -> None:
        _, copy = self.unfreed.pop(pick % len(self.unfreed))
        self.regions.freed(copy.region)

    @rule(share=st.sampled_from([0.1, 0.5, 0.9]))
    def choose_victim(self, share: float) -> None:
        def dead_pages(number: int) -> int:
            return self.end[number] - 1 - sum(1 + copy.length // PAGE for _, copy in self.of(self.live, number))

        sealed = [number for number in range(4) if self.state[number] is RegionState.SEALED]
        best = max(sealed, key=lambda number: (dead_pages(number), -number), default=None)
        worth = best is not None and dead_pages(best) > 0 and dead_pages(best) >= share * (self.end[best] - 1)
        victim = self.regions.choose_victim(min_dead_share=share)
        assert (victim is not None) == worth
        if victim is not None:
            assert victim.number == best
            self.state[best] = RegionState.EMPTYING

    @rule(number=st.integers(0, 3), ok=st.sampled_from([True, True, False]))
    def drop(self, number: int, ok: bool) -> None:
        """What the region writer does with one that is empty."""
        region = self.regions[number]
        empty = not self.of(self.live, number) and not self.of(self.unfreed, number)
        assert (not region.live and region.unfreed == 0) == (empty and not self.of(self.writing, number))
        if self.state[number] is not RegionState.EMPTYING or not empty:
            return
        region.on(RegionEvent.EMPTIED)
        self.regions.dropped(region, ok=ok)
        self.state[number] = RegionState.FREE if ok else RegionState.SEALED
        if ok:
            self.free.append(number)
            self.dead = [record for record in self.dead if record[0] != number]

    @rule(which=st.integers(0, 3))
    def take_dead(self, which: int) -> None:
        hashed = BlockHash(bytes([which]) * 32)
        other = KeySpace(Namespace("other"), self.space.layout)
        assert self.regions.take_dead(other, hashed) == []
        found = self.regions.take_dead(self.space, hashed)
        expected = sorted((number, offset) for number, block, offset in self.dead if block == hashed)
        assert sorted((region.number, record.offset) for region, record in found) == expected
        self.dead = [record for record in self.dead if record[1] != hashed]

    @invariant()
    def it_is_as_the_model_says(self) -> None:
        assert [region.state for region in self.regions] == list(self.state.values())
        assert self.regions.free_regions == len(self.free)
        assert self.regions.sealed_regions == list(self.state.values()).count(RegionState.SEALED)
        assert (None if self.regions.open is None else self.regions.open.number) == self.open
        assert self.regions.live_bytes == sum(PAGE + copy.length for _, copy in self.live)
        for number, region in enumerate(self.regions):
            live = self.of(self.live, number)
            assert region.live_bytes == sum(PAGE + copy.length for _, copy in live)
            assert [record.offset for record in self.regions.footer_records(region)] == sorted(copy.offset for _, copy in live)
            emptying = self.state[number] is RegionState.EMPTYING
            assert not (emptying and live) or self.regions.reclaim_under_way


RegionsAgainstAList.TestCase.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestRegionsAgainstAList = RegionsAgainstAList.TestCase
