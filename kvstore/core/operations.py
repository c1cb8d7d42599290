"""Operations: I/O under way, and what to do with each one's outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvstore.ids import OperationId

Outcome = TypeVar("Outcome")


class OperationIds:
    """One sequence for all operations of a boot."""

    def __init__(self, *, first: int) -> None:
        self._next = first

    def next(self) -> OperationId:
        operation = OperationId(self._next)
        self._next += 1
        return operation


class Operations(Generic[Outcome]):
    """Those of one kind of outcome. An outcome that comes twice, or from an earlier boot, matches nothing and is dropped."""

    def __init__(self, ids: OperationIds) -> None:
        self._ids = ids
        self._under_way: dict[OperationId, Callable[[Outcome], None]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def start(self, on_outcome: Callable[[Outcome], None]) -> OperationId:
        operation = self._ids.next()
        self._under_way[operation] = on_outcome
        return operation

    def finish(self, operation: OperationId, outcome: Outcome) -> None:
        on_outcome = self._under_way.pop(operation, None)
        if on_outcome is not None:
            on_outcome(outcome)
