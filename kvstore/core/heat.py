"""Heat: which stripes many read, and for which of them one more replica is worth its room. Pure.

A node counts its own acquires only: what an extra replica is for is the load of this node, not the fame of the stripe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.core.chain import BLOCKS_PER_STRIPE
from kvstore.core.index import Entry
from kvstore.core.placement import place
from kvstore.core.view import View
from kvstore.ids import NodeId, StripeId

MOST_COUNTED = 1 << 14
"""Stripes of one window; those that are asked for first when it is full wait for the next."""


class StripeHeat:
    """Acquires by stripe since the last `take`. Cost of an acquire: one addition per stripe of the run."""

    def __init__(self) -> None:
        self._acquires: dict[StripeId, int] = {}

    def used(self, entries: Sequence[Entry]) -> None:
        """The blocks of one acquire, in the order of their chain."""
        acquires = self._acquires
        for entry in entries[::BLOCKS_PER_STRIPE]:
            if entry.stripe in acquires or len(acquires) < MOST_COUNTED:
                acquires[entry.stripe] = acquires.get(entry.stripe, 0) + 1

    def take(self) -> dict[StripeId, int]:
        """What was counted; counting starts anew."""
        taken, self._acquires = self._acquires, {}
        return taken


def hot_stripes(
    rates: Mapping[StripeId, float], view: View, *, node_id: NodeId, replicas: int, hot_rate: float, most_extra: int
) -> dict[StripeId, int]:
    """Stripes that this node owns and finds hot -> how many extra replicas each should have now; hottest first.

    `rates`: acquires a second of this node. A stripe becomes hot at `hot_rate`, and gets one replica more for as long as that is what each
    reader of it sees, up to `most_extra`; it stays as it is above a quarter of that, since every replica takes its part of the load away.
    Readers take turns among the replicas of a hot stripe, so the first step is of use even where no other store is left.
    """
    found: dict[StripeId, int] = {}
    for stripe, rate in sorted(rates.items(), key=lambda item: (-item[1], item[0])):
        known = view.hot.get(stripe)
        if rate < (hot_rate if known is None else hot_rate / 4) or node_id not in place(stripe, view, replicas=replicas):
            continue
        if known is None:
            found[stripe] = min(1, most_extra)
        else:
            found[stripe] = min(known + 1, most_extra) if rate >= hot_rate else known
    return found
