from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.batches import batches, shares
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
