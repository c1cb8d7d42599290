"""The network of a simulated cluster: delays, loses, repeats, reorders and spoils messages, and is cut."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from sim.timeline import Timeline

from kvstore.units import milliseconds


class Weather(NamedTuple):
    """Of every link, until it changes."""

    lost: float = 0.0
    """Chance of a message; the sender hears nothing."""
    repeated: float = 0.0
    """Chance that a request arrives a second time, later."""
    spoiled: float = 0.0
    """Chance that a payload arrives with another byte in it."""
    slow: float = 0.0
    """Chance of a delay of up to two seconds instead of up to two milliseconds."""


CALM = Weather()


class Network:
    """Messages pass each other at will: each has its own delay."""

    def __init__(self, timeline: Timeline, rng: Random) -> None:
        self._timeline = timeline
        self._rng = rng
        self.weather = CALM
        self._cut: dict[tuple[str, str], int] = {}

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """A message whose link is cut when it is sent, or when it would arrive, is lost."""
        if self._rng.random() < self.weather.lost or (source, target) in self._cut:
            return

        def arrive() -> None:
            if (source, target) not in self._cut:
                deliver()

        self._timeline.after(self._delay(), arrive)

    def send_request(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        self.send(source, target, deliver)
        if self._rng.random() < self.weather.repeated:
            self._timeline.after(self._delay(), lambda: self.send(source, target, deliver))

    def spoil(self, payload: bytes) -> bytes:
        """The payload as it arrives."""
        if not payload or self._rng.random() >= self.weather.spoiled:
            return payload
        at = self._rng.randrange(len(payload))
        return payload[:at] + bytes([payload[at] ^ 0x40]) + payload[at + 1 :]

    def cut(self, source: str, target: str) -> None:
        """One way; cuts add up."""
        self._cut[source, target] = self._cut.get((source, target), 0) + 1

    def heal(self, source: str, target: str) -> None:
        left = self._cut.pop((source, target)) - 1
        if left:
            self._cut[source, target] = left

    def _delay(self) -> int:
        if self._rng.random() < self.weather.slow:
            return self._rng.randrange(milliseconds(2000))
        return self._rng.randrange(50_000, milliseconds(2))
