"""Pauses between attempts: they double up to a bound, and jitter keeps a herd from coming back in step. Pure."""

from __future__ import annotations

import random

from kvstore.units import Nanos, milliseconds


class Backoff:
    def __init__(self, *, longest: Nanos, rng: random.Random, first: Nanos = milliseconds(50)) -> None:
        self._first = first
        self._longest = longest
        self._rng = rng
        self._pause = first

    def next_pause(self) -> Nanos:
        """Between half of the pause and the whole of it; the next one is twice as long."""
        pause = min(self._pause, self._longest)
        self._pause = Nanos(pause * 2)
        return Nanos(round(pause * (0.5 + self._rng.random() / 2)))

    def reset(self) -> None:
        self._pause = self._first
