"""The metadata of one forward pass: made once, read by every layer."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from prefill_node.engine.scheduler import Span

GROUP_ROWS = 8
"""Rows of one sequence that share the conversion of a K or V vector to float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """T rows, one for each token to compute; a row attends to the first `lengths[t]` tokens of its sequence, itself the last."""

    token_ids: np.ndarray
    """int64 [T]"""
    positions: np.ndarray
    """int64 [T]"""
    lengths: np.ndarray
    """int32 [T]; 0: a padding row, which attends to nothing."""
    tables: np.ndarray
    """int32 [sequences, most blocks]"""
    table_of: np.ndarray
    """int32 [T]: row of `tables`."""
    write_blocks: np.ndarray
    """int32 [T]: pool block that takes this row's K and V; -1: none (padding)."""
    write_offsets: np.ndarray
    """int32 [T]: token slot in that block."""
    groups: np.ndarray
    """int32 [G, 2]: (first row, rows), neighbours of one sequence, those that attend to most first."""
    spans: tuple[tuple[int, int], ...]
    """(first row, rows) of each span, in the order given."""

    @property
    def rows(self) -> int:
        return len(self.token_ids)


def make_batch(spans: Items[Span], *, block_tokens: int, row_multiple: int = 1) -> Batch:
    """One batch of the spans' tokens one after the other, padded to `row_multiple` rows.

    Cost: O(tokens + blocks of the sequences), numpy.
    """
    total = sum(span.count for span in spans)
    padded = -(-total // row_multiple) * row_multiple
    token_ids = np.zeros(padded, np.int64)
    positions = np.zeros(padded, np.int64)
    table_of = np.zeros(padded, np.int32)
    lengths = np.zeros(padded, np.int32)
    write_blocks = np.full(padded, -1, np.int32)
    tables = np.zeros((len(spans), max(len(span.sequence.blocks) for span in spans)), np.int32)
    groups: list[tuple[int, int]] = []
    places: list[tuple[int, int]] = []
    row = 0
    for index, span in enumerate(spans):
        end = row + span.count
        where = np.arange(span.start, span.start + span.count)
        token_ids[row:end] = span.sequence.tokens[span.start : span.start + span.count]
        positions[row:end] = where
        lengths[row:end] = where + 1
        table_of[row:end] = index
        blocks = np.asarray(span.sequence.blocks, np.int32)
        tables[index, : len(blocks)] = blocks
        write_blocks[row:end] = blocks[where // block_tokens]
        groups += [(first, min(GROUP_ROWS, end - first)) for first in range(row, end, GROUP_ROWS)]
        places.append((row, span.count))
        row = end
    # The longest first: a thread that takes one of them last would keep the others waiting.
    groups.sort(key=lambda group: -lengths[sum(group) - 1])
    return Batch(
        token_ids=token_ids,
        positions=positions,
        lengths=lengths,
        tables=tables,
        table_of=table_of,
        write_blocks=write_blocks,
        write_offsets=(positions % block_tokens).astype(np.int32),
        groups=np.asarray(groups, np.int32).reshape(-1, 2),
        spans=tuple(places),
    )
