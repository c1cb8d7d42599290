from __future__ import annotations

from kvstore.core.operations import OperationIds, Operations
from kvstore.ids import OperationId


def test_an_outcome_reaches_its_operation_once_and_only_it() -> None:
    ids = OperationIds(first=1)
    reads: Operations[str] = Operations(ids)
    writes: Operations[str] = Operations(ids)
    seen: list[str] = []
    one, two = reads.start(seen.append), reads.start(seen.append)
    assert len({one, two, writes.start(seen.append)}) == 3
    writes.finish(one, "of another kind")
    reads.finish(OperationId(99), "of another boot")
    reads.finish(two, "two")
    reads.finish(two, "two again")
    assert seen == ["two"]
    assert len(reads) == 1
