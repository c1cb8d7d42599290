from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.core.copies import Copy, CopyEvent, CopyState, copy_at
from kvstore.core.index import Entry
from kvstore.core.manifest import encode_footer
from kvstore.core.region import TRANSITIONS, RegionState, RegionTable
from kvstore.ids import Generation

PAGE = 4096


def table(count: int = 4, pages: int = 16) -> RegionTable:
    return RegionTable(count=count, region_bytes=pages * PAGE, nonce_seed=b"seed")


def open_region(regions: RegionTable, *, last_resort: bool = False):
    region = regions.choose_to_open(last_resort=last_resort)
    if region is not None:
        regions.opened(region, ok=True)
    return region


def fill_region(regions: RegionTable, space, block, *, length: int = PAGE) -> list[tuple[Entry, Copy]]:
    """Fills the open region with READABLE copies."""
    filled = []
    while regions.has_room(space, length):
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
