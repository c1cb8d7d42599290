"""The metadata of a pass."""

from __future__ import annotations

from types import SimpleNamespace

from prefill_node.engine.batch import GROUP_ROWS, make_batch
from prefill_node.engine.scheduler import Span


def test_the_groups_that_attend_to_most_come_first_and_every_row_is_in_one() -> None:
    lengths = (40, 7, 300, 9)
    spans = [Span(SimpleNamespace(tokens=[1] * length, blocks=list(range(40))), length - 1, 1) for length in lengths]  # type: ignore[arg-type]
    spans.append(Span(SimpleNamespace(tokens=[1] * 100, blocks=list(range(40))), 64, 2 * GROUP_ROWS + 3))  # type: ignore[arg-type]
    batch = make_batch(spans, block_tokens=8, row_multiple=4)
    attended = [int(batch.lengths[first + rows - 1]) for first, rows in batch.groups]
    assert attended == sorted(attended, reverse=True)
    assert attended[0] == 300
    covered = sorted(row for first, rows in batch.groups.tolist() for row in range(first, first + rows))
    assert covered == list(range(4 + 2 * GROUP_ROWS + 3))
