"""Token bucket: a rate in bytes a second, with a burst. Time is an argument."""

from __future__ import annotations

from kvstore.units import Bytes, Nanos


class TokenBucket:
    def __init__(self, *, rate: Bytes, burst: Bytes, now: Nanos) -> None:
        """`rate`: bytes a second; `burst`: what may go at once after a pause."""
        assert rate > 0, rate
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._at = now

    def spend(self, size: int, now: Nanos) -> None:
        """What was sent; may overdraw."""
        self._refill(now)
        self._tokens -= size

    def wait(self, now: Nanos) -> Nanos:
        """How long until the next may be sent; 0: now."""
        self._refill(now)
        return Nanos(0) if self._tokens >= 0 else Nanos(int(-self._tokens * 1e9 / self._rate) + 1)

    def _refill(self, now: Nanos) -> None:
        self._tokens = min(float(self._burst), self._tokens + (now - self._at) * self._rate / 1e9)
        self._at = now
