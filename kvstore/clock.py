"""The clock, as an argument: the core takes `now`, the shell takes a `Clock`."""

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
