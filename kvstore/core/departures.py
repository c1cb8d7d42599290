"""Why a block is no longer here: a bounded memory of what went last, for the operator who asks. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvstore.ids import BlockHash, KeySpace
from kvstore.units import Nanos


class Departure(NamedTuple):
    reason: str
    at: Nanos


class Departures:
    """The last `most`: some 250 bytes each."""

    def __init__(self, *, most: int) -> None:
        assert most >= 1, most
        self._most = most
        self._gone: OrderedDict[tuple[KeySpace, BlockHash], Departure] = OrderedDict()
        self.forgotten = 0
        """Departures that are no longer remembered: a block that is not found may have been one of them."""

    def gone(self, key_space: KeySpace, block: BlockHash, reason: str, now: Nanos) -> None:
        self._gone[key_space, block] = Departure(reason, now)
        self._gone.move_to_end((key_space, block))
        if len(self._gone) > self._most:
            self._gone.popitem(last=False)
            self.forgotten += 1

    def back(self, key_space: KeySpace, block: BlockHash) -> None:
        self._gone.pop((key_space, block), None)

    def find(self, key_space: KeySpace, block: BlockHash) -> Departure | None:
        return self._gone.get((key_space, block))
