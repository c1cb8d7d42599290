"""One read under way: what the core allowed, how far it came, and its one outcome."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.core.events.gets import AnswerRead, ReadFinished, ReadOutcome


class OpenRead:
    """Its extents are the reader's until `finish`. Whoever streams asks `is_open` after every wait and before every byte."""

    def __init__(self, plan: AnswerRead, hand_in: Callable[[ReadFinished], None]) -> None:
        self.items = plan.items
        self.outcomes = [ReadOutcome.UNREAD] * len(plan.items)
        self.is_open = plan.operation != 0
        self.before_end: Callable[[], None] = _nothing
        """Called when the extents are given back, before they are: the last moment to take back what still reads them."""
        self._operation = plan.operation
        self._hand_in = hand_in

    def finish(self) -> None:
        """Gives the extents back. The second call does nothing: a read may be cancelled by the core and then ended by its stream."""
        if self.is_open:
            self.is_open = False
            self.before_end()
            self._hand_in(ReadFinished(operation=self._operation, outcomes=tuple(self.outcomes)))


def _nothing() -> None:
    pass
