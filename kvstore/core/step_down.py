"""Step-down: at which rung a block's copy on the SSD shall be, by its namespace, the time since its last use, and its place in its
chain."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.core.copies import Copy
from kvstore.core.index import Entry, Index
from kvstore.errors import ConfigError
from kvstore.ids import AS_SEALED, BEHIND_RECODED, Namespace, RungCode
from kvstore.units import Nanos

EVERYBODY = Namespace("*")
"""Whose rules are those of every namespace that is not named."""
MAX_KEEP_LAST = 4096
_SAMPLES = 64
"""An age is told to a 64th of the longest that the rules ask about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDownRule:
    """Blocks of which all of this is true are re-coded to `rung` when they are written to the SSD, or moved there."""

    rung: RungCode
    after: Nanos = Nanos(0)
    """Not used for so long; a restart counts as a use."""
    keep_last: int = 0
    """At least so many blocks of its chain have been put behind it: the recent end of a prompt stays as it is."""

    def __post_init__(self) -> None:
        if self.rung in (AS_SEALED, BEHIND_RECODED) or not 0 < self.rung < 1 << 16:
            raise ConfigError(f"step_down: nothing can be re-coded to rung {self.rung}")
        if self.after < 0 or not 0 <= self.keep_last <= MAX_KEEP_LAST:
            raise ConfigError(f"step_down: after must not be negative, keep_last from 0 to {MAX_KEEP_LAST}: {self}")


StepDownRules = Mapping[Namespace, Sequence[StepDownRule]]
"""The last rule that applies to a block counts, so coarser rungs come later. Empty: nothing steps down."""


class StepDownPolicy:
    """Cost: some 100 ns for each block of a use; with `keep_last` a look-up for each of so many blocks before one that is listed."""

    def __init__(self, rules: StepDownRules, index: Index) -> None:
        self._rules = rules
        self._index = index
        self._keep_last = max((rule.keep_last for of in rules.values() for rule in of), default=0)
        self._every = max((rule.after for of in rules.values() for rule in of), default=0) // _SAMPLES
        self._ranks: deque[tuple[Nanos, int]] = deque(maxlen=2 * _SAMPLES)
        """(a time, the rank of uses at that time), the oldest first."""

    def listed(self, entry: Entry, now: Nanos) -> None:
        """The entry is in the index, and has its rank."""
        self.used(entry, now)
        if self._keep_last:
            block = entry
            for _ in range(self._keep_last):
                before = self._index.get(block.key_space, block.parent)
                if before is None or before.far:
                    return
                block = before
            block.go_far()

    def used(self, entry: Entry, now: Nanos) -> None:
        """`Entry.last_used` has just been set."""
        if not self._ranks or now >= self._ranks[-1][0] + self._every:
            self._ranks.append((now, entry.last_used))

    def rung_for(self, entry: Entry, copy: Copy, now: Nanos) -> RungCode | None:
        """To which a copy made of this one shall be re-coded; None: not at all."""
        chosen = None
        for rule in self._rules.get(entry.key_space.namespace, self._rules.get(EVERYBODY, ())):
            if (entry.far or not rule.keep_last) and self._is_old(entry, rule.after, now):
                chosen = rule.rung
        return None if chosen == copy.rung else chosen

    def _is_old(self, entry: Entry, after: Nanos, now: Nanos) -> bool:
        if not after:
            return True
        rank = None
        for at, seen in self._ranks:
            if at > now - after:
                break
            rank = seen
        return rank is not None and entry.last_used <= rank
