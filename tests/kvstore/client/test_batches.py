from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.batches import batches, shares
from kvstore.client.byte_budget import ByteBudget
from kvstore.units import Bytes


@given(st.lists(st.integers(0, 20)), st.integers(1, 5), st.integers(1, 30))
def test_batches_keep_order_and_both_bounds(sizes: list[int], most_items: int, most_bytes: int) -> None:
    cut = list(batches(list(enumerate(sizes)), most_items=most_items, most_bytes=Bytes(most_bytes)))
    assert [item for batch in cut for item in batch] == list(range(len(sizes)))
    for batch in cut:
        assert 1 <= len(batch) <= most_items
        assert len(batch) == 1 or sum(sizes[item] for item in batch) <= most_bytes


@given(st.lists(st.integers(1, 20), min_size=1), st.integers(1, 5), st.integers(1, 30))
def test_shares_keep_order_and_none_has_more_than_its_part_and_one_item(sizes: list[int], most: int, least_bytes: int) -> None:
    cut = shares(list(enumerate(sizes)), most=most, least_bytes=Bytes(least_bytes))
    assert [item for share in cut for item in share] == list(range(len(sizes)))
    assert 1 <= len(cut) <= max(1, min(most, sum(sizes) // least_bytes))
    assert all(share for share in cut)
    if sum(sizes) >= most * least_bytes:
        assert max(sum(sizes[item] for item in share) for share in cut) <= sum(sizes) / most + max(sizes)


def test_a_budget_makes_others_wait_and_lets_one_that_is_larger_than_all_pass_alone() -> None:
    async def test() -> None:
        budget = ByteBudget(10)
        await budget.take(25)
        waiting = asyncio.create_task(budget.take(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        budget.give_back(25)
        await waiting
        assert budget.taken == 1
        assert budget.fits(9)
        assert not budget.fits(10)

    asyncio.run(test())


def test_a_budget_lets_in_those_behind_one_that_gave_up() -> None:
    async def test() -> None:
        budget = ByteBudget(10)
        await budget.take(8)
        large, small = asyncio.create_task(budget.take(9)), asyncio.create_task(budget.take(2))
        await asyncio.sleep(0)
        assert not small.done(), "in order of arrival"
        large.cancel()
        await asyncio.wait([large, small])
        assert budget.taken == 10
        budget.give_back(10)
        assert budget.taken == 0

    asyncio.run(test())
