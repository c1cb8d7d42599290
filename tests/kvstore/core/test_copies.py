from __future__ import annotations

import pytest

from kvstore.core.copies import TRANSITIONS, Copy, CopyEvent, CopyState, copy_at
from kvstore.core.extent import Extent, Tier
from kvstore.ids import Generation


def copy(state: CopyState) -> Copy:
    return copy_at(Extent(Tier.HOST, 0, 4096, 100, Generation(1)), state)


def test_nothing_leaves_free_and_everything_can_reach_it() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] is CopyState.FREE]
    for start in CopyState:
        reached, todo = {start}, [start]
        while todo:
            state = todo.pop()
            todo += [after for (before, _), after in TRANSITIONS.items() if before is state and after not in reached]
            reached.update(todo)
        assert CopyState.FREE in reached


def test_a_copy_is_readable_only_after_its_bytes_were_verified_or_filled() -> None:
    assert {pair for pair, after in TRANSITIONS.items() if after is CopyState.READABLE} == {
        (CopyState.VERIFYING, CopyEvent.VERIFIED),
        (CopyState.WRITING, CopyEvent.FILLED),
    }


def test_a_pair_without_a_row_stops_the_process() -> None:
    with pytest.raises(KeyError):
        copy(CopyState.RESERVED).on(CopyEvent.VERIFIED)


def test_a_hold_that_was_not_taken_cannot_be_given_back() -> None:
    held = copy(CopyState.READABLE)
    held.hold()
    held.unhold()
    with pytest.raises(AssertionError):
        held.unhold()
