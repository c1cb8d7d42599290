"""Rows of a measurement that has targets: what was measured, beside what, and whether that is as good as it should be. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Window = tuple[float, float]
"""From, to: seconds of the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    what: str
    value: float
    unit: str
    beside: float | None = None
    """What `value` is compared with, in the same unit; None: with nothing."""
    most: float | None = None
    """The target: of value / beside where there is one, else of the value. None: it only stands beside others."""

    @property
    def ratio(self) -> float | None:
        return None if self.beside is None else round(self.value / self.beside, 4)

    @property
    def met(self) -> bool | None:
        """None without a target."""
        judged = self.value if self.ratio is None else self.ratio
        return None if self.most is None else judged <= self.most

    def record(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in ("what", "value", "unit", "beside", "ratio", "most", "met")}
        return {name: value for name, value in named.items() if value is not None}


def percentile(values: Iterable[float], share: float) -> float:
    """The nearest rank of some values."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 2)


def parted_gaps_ms(streams: Iterable[Sequence[float]], windows: Sequence[Window]) -> tuple[list[float], list[float]]:
    """(inside, outside): the gaps between two arrivals of a stream that touch one of the windows, and those that touch none."""
    inside: list[float] = []
    outside: list[float] = []
    for arrivals in streams:
        for early, late in itertools.pairwise(arrivals):
            touched = any(early < end and begin < late for begin, end in windows)
            (inside if touched else outside).append((late - early) * 1e3)
    return inside, outside
