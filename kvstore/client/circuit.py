"""A circuit per node: whether to ask it, and when to probe one that was given up. Pure.

A user's request is never the probe: while a circuit is open the node is not asked at all, and a Hello behind the scenes finds out
whether it is back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from kvstore.client.config import CircuitConfig
from kvstore.ids import BootId
from kvstore.units import Nanos


class CircuitState(StrEnum):
    CLOSED = "closed"
    """In use."""
    OPEN = "open"
    """Not asked until the pause is over."""
    PROBING = "probing"
    """Not asked; one probe is on its way."""


class CircuitEvent(Enum):
    SUCCEEDED = auto()
    """A user's call was answered; a refusal is an answer too."""
    GAVE_UP = auto()
    """A failure that reached the limit, or a passed deadline."""
    PROBE_STARTED = auto()
    PROBE_SUCCEEDED = auto()
    PROBE_FAILED = auto()
    RESTARTED = auto()
    """The view shows another boot id: what is known of the old process says nothing about the new one."""


TRANSITIONS: dict[tuple[CircuitState, CircuitEvent], CircuitState] = {
    (CircuitState.CLOSED, CircuitEvent.SUCCEEDED): CircuitState.CLOSED,
    (CircuitState.CLOSED, CircuitEvent.GAVE_UP): CircuitState.OPEN,
    (CircuitState.CLOSED, CircuitEvent.RESTARTED): CircuitState.CLOSED,
    (CircuitState.OPEN, CircuitEvent.PROBE_STARTED): CircuitState.PROBING,
    (CircuitState.OPEN, CircuitEvent.RESTARTED): CircuitState.CLOSED,
    (CircuitState.PROBING, CircuitEvent.PROBE_SUCCEEDED): CircuitState.CLOSED,
    (CircuitState.PROBING, CircuitEvent.PROBE_FAILED): CircuitState.OPEN,
    (CircuitState.PROBING, CircuitEvent.RESTARTED): CircuitState.CLOSED,
    # Calls that were on their way when the circuit opened prove nothing: what a dead node sent before it died may still arrive.
    (CircuitState.OPEN, CircuitEvent.SUCCEEDED): CircuitState.OPEN,
    (CircuitState.OPEN, CircuitEvent.GAVE_UP): CircuitState.OPEN,
    (CircuitState.PROBING, CircuitEvent.SUCCEEDED): CircuitState.PROBING,
    (CircuitState.PROBING, CircuitEvent.GAVE_UP): CircuitState.PROBING,
    # The probe of a circuit that a restart closed meanwhile, or closed and something opened again.
    (CircuitState.CLOSED, CircuitEvent.PROBE_SUCCEEDED): CircuitState.CLOSED,
    (CircuitState.CLOSED, CircuitEvent.PROBE_FAILED): CircuitState.CLOSED,
    (CircuitState.OPEN, CircuitEvent.PROBE_SUCCEEDED): CircuitState.CLOSED,
    (CircuitState.OPEN, CircuitEvent.PROBE_FAILED): CircuitState.OPEN,
}


@dataclass(slots=True)
class Circuit:
    """Of one node. `probe_at` says when an open one may be probed."""

    config: CircuitConfig
    boot_id: BootId
    state: CircuitState = CircuitState.CLOSED
    failures: int = 0
    pause: Nanos = Nanos(0)
    probe_at: Nanos = Nanos(0)

    @property
    def usable(self) -> bool:
        return self.state is CircuitState.CLOSED

    def succeeded(self) -> None:
        self._apply(CircuitEvent.SUCCEEDED)

    def seen(self, boot_id: BootId) -> None:
        """The view names this start of the node."""
        if boot_id != self.boot_id:
            self.boot_id = boot_id
            self._apply(CircuitEvent.RESTARTED)

    def failed(self, now: Nanos, *, deadline_passed: bool, jitter: float) -> bool:
        """One call failed; True when that opened the circuit. `jitter` in [0, 1) spreads the probes of many clients."""
        self.failures += 1
        if not deadline_passed and self.failures < self.config.failures_to_open:
            return False
        before = self.state
        self.state = TRANSITIONS[before, CircuitEvent.GAVE_UP]
        if before is not CircuitState.CLOSED:
            return False
        self.pause = self.config.first_probe_after
        self._wait(now, jitter)
        return True

    def start_probe(self) -> None:
        self.state = TRANSITIONS[self.state, CircuitEvent.PROBE_STARTED]

    def probe_succeeded(self) -> None:
        self._apply(CircuitEvent.PROBE_SUCCEEDED)

    def probe_failed(self, now: Nanos, *, jitter: float) -> None:
        before = self.state
        self.state = TRANSITIONS[before, CircuitEvent.PROBE_FAILED]
        if before is CircuitState.PROBING:
            self.pause = Nanos(min(self.pause * 2, self.config.longest_probe_after))
            self._wait(now, jitter)

    def _wait(self, now: Nanos, jitter: float) -> None:
        # Between three and five quarters of the pause.
        self.probe_at = Nanos(now + round(self.pause * (0.75 + jitter / 2)))

    def _apply(self, event: CircuitEvent) -> None:
        self.state = TRANSITIONS[self.state, event]
        if self.state is CircuitState.CLOSED:
            self.failures = 0
