"""Cutting work into batches that fit in memory and in one call. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from kvstore.units import Bytes

Item = TypeVar("Item")


def batches(items: Iterable[tuple[Item, int]], *, most_items: int, most_bytes: Bytes) -> Iterator[list[Item]]:
    """Runs of the items, in order, each within both bounds; an item larger than `most_bytes` makes a batch of its own."""
    batch: list[Item] = []
    batch_bytes = 0
    for item, size in items:
        if batch and (len(batch) == most_items or batch_bytes + size > most_bytes):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += size
    if batch:
        yield batch


def shares(items: Sequence[tuple[Item, int]], *, most: int, least_bytes: Bytes) -> list[list[Item]]:
    """The items, in order, in at most `most` runs of about the same bytes, and in no more than one for each `least_bytes` of them."""
    total = sum(size for _, size in items)
    count = max(1, min(most, total // least_bytes))
    cut: list[list[Item]] = [[]]
    before = 0
    for item, size in items:
        if cut[-1] and before >= total * len(cut) // count:
            cut.append([])
        cut[-1].append(item)
        before += size
    return cut
