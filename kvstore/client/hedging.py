"""When to ask a second replica what the first has not answered yet. Pure.

A node's own answers say when one of them is late: later than the configured share of them. Second requests are paid from an account that
every first one fills by a little, so they stay a bounded share, also when a whole cluster is slow and everything seems late.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.client.config import HedgeConfig
from kvstore.ids import NodeId
from kvstore.units import Nanos

_WINDOW = 128
"""Answers of a node that are looked at: some seconds of a busy one."""
_RANK_EVERY = 8
_MOST_SAVED = 4.0
"""Second requests in a row, after quiet times: one slow node is asked for several stripes at once."""


class Asked(StrEnum):
    """What was asked: the times of one say nothing about those of the other."""

    ACQUIRE = "acquire"
    READ = "read"
    """To the first payload of a stream."""


@dataclass(slots=True)
class _Times:
    window: deque[Nanos] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    noted: int = 0
    late_after: Nanos | None = None


class Hedges:
    """Of one client."""

    def __init__(self, config: HedgeConfig) -> None:
        self._config = config
        self._times: dict[tuple[NodeId, Asked], _Times] = {}
        self._saved = 0.0

    def late_after(self, node_id: NodeId, asked: Asked) -> Nanos | None:
        """For a first request that is sent now: from when on it is late. None: too little is known of the node, or hedging is off."""
        if not self._config.most_share:
            return None
        self._saved = min(_MOST_SAVED, self._saved + self._config.most_share)
        times = self._times.get((node_id, asked))
        return None if times is None else times.late_after

    def take(self) -> bool:
        """Whether a second request may be sent now; it counts as sent."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True

    def answered(self, node_id: NodeId, asked: Asked, took: Nanos) -> None:
        """A request, first or second, was answered in this time. Cost: O(1), and a sort of 128 numbers every eighth time."""
        times = self._times.setdefault((node_id, asked), _Times())
        times.window.append(took)
        times.noted += 1
        if len(times.window) >= self._config.least_answers and (times.late_after is None or times.noted % _RANK_EVERY == 0):
            ordered = sorted(times.window)
            rank = min(len(ordered) - 1, int(len(ordered) * self._config.percentile))
            times.late_after = Nanos(max(ordered[rank], self._config.least_wait))

    def forget(self, node_id: NodeId) -> None:
        """It has started anew, or is gone."""
        for asked in Asked:
            self._times.pop((node_id, asked), None)
