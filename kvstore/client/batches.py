"""Cutting work into batches that fit in memory and in one call. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
