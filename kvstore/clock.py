"""The clock, as an argument: the core takes `now`, the shell takes a `Clock`, tests hand in one that they turn."""

from __future__ import annotations

import time
from typing import Protocol

from kvstore.units import Nanos


class Clock(Protocol):
    def now(self) -> Nanos:
        """Monotonic; comparable inside one process only."""
        ...


class SystemClock:
    def now(self) -> Nanos:
        return Nanos(time.monotonic_ns())


class ManualClock:
    """Stands still until turned."""

    def __init__(self, start: Nanos = Nanos(0)) -> None:
        self._now = start

    def now(self) -> Nanos:
        return self._now

    def advance(self, by: Nanos) -> None:
        assert by >= 0
        self._now = Nanos(self._now + by)
