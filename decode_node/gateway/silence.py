"""How long a node has been silent, by what this process could have heard of it. Pure: the clock is fed.

On a busy machine the gateway itself may not run for a while, and what a node sent meanwhile lies unread. So time counts only as far as
this process was demonstrably there: it looks in every `LOOK_EVERY`, and an interval that took more than twice as long is its own lateness.
And a node that hardly gets to run itself answers late before it answers never: it is held against its own pace.
"""

from __future__ import annotations

from kvstore.units import Nanos, milliseconds

LOOK_EVERY = milliseconds(100)

_SLOWER = 3
"""A silence this much longer than the longest of the last ones means something."""
_MOST = 5
"""Times the limit: the longest that a slow node is waited for."""
_KEPT = 0.8
"""Of the longest silence, at each later sign of life: at the rate of tokens a slow moment is soon forgotten."""


class Pace:
    """How long one node let others wait for a sign of life lately, on its streams and when it was polled."""

    def __init__(self) -> None:
        self._longest = 0.0

    def note(self, waited: Nanos) -> None:
        self._longest = max(float(waited), self._longest * _KEPT)

    def limit(self, least: Nanos) -> Nanos:
        """`least`, and more for a node that was slow lately."""
        return Nanos(min(_MOST * least, max(least, round(_SLOWER * self._longest))))


class Silence:
    """Of one node, from `now` on, until something is heard."""

    def __init__(self, limit: Nanos, *, now: Nanos) -> None:
        self._limit = limit
        self._silent = Nanos(0)
        self._looked_at = now

    @property
    def next_look(self) -> Nanos:
        """Time until `look` is due: a silence is noticed when it is over the limit, not at the next full period."""
        return Nanos(max(0, min(LOOK_EVERY, self._limit - self._silent)))

    def look(self, now: Nanos) -> bool:
        """True: the node is to be given up. A late look counts one period, and gives nobody up before twice the limit has been counted:
        what waits to be read is read first, and still the wait has an end when every look is late."""
        elapsed = Nanos(now - self._looked_at)
        self._looked_at = now
        late = elapsed > 2 * LOOK_EVERY
        self._silent = Nanos(self._silent + (LOOK_EVERY if late else elapsed))
        return self._silent >= (2 * self._limit if late else self._limit)
