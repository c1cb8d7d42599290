"""A medium that fails on demand: for tests and the chaos runs, wrapped around a real one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.tiers.tier import FailureReason, Tier, TierFailure


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong next. Each number is how many of the coming calls are hit; it counts down to 0."""

    failing_reads: int = 0
    failing_writes: int = 0
    full_writes: int = 0
    """Writes refused as on a full disk."""
    failing_syncs: int = 0
    short_reads: int = 0
    """Reads that get one byte less than asked for."""
    flipped_reads: int = 0
    """Reads that return with the lowest bit of their middle byte flipped: rot that no length check sees."""
    torn_writes: int = 0
    """Writes of which only the first half gets down, reported as done."""
    before_read: Callable[[], None] = field(default=lambda: None)
    """Called in the reading thread before each read: a slow medium waits in here for the test's event."""
    before_write: Callable[[], None] = field(default=lambda: None)


class FaultyTier:
    """The wrapped tier, minus its reliability. Faults are taken in the order of the fields above."""

    def __init__(self, tier: Tier, faults: Faults) -> None:
        self._tier = tier
        self._faults = faults
        self._lock = threading.Lock()

    def write(self, place: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        self._faults.before_write()
        if self._takes("failing_writes"):
            raise TierFailure(FailureReason.IO_ERROR, "injected write error")
        if self._takes("full_writes"):
            raise TierFailure(FailureReason.NO_SPACE, "injected full disk")
        if self._takes("torn_writes"):
            whole = b"".join(parts)
            self._tier.write(place, offset, [whole[: len(whole) // 2]])
            return
        self._tier.write(place, offset, parts)

    def sync(self, place: int) -> None:
        if self._takes("failing_syncs"):
            raise TierFailure(FailureReason.IO_ERROR, "injected sync error")
        self._tier.sync(place)

    def read_into(self, place: int, offset: int, out: memoryview) -> None:
        self._faults.before_read()
        if self._takes("failing_reads"):
            raise TierFailure(FailureReason.IO_ERROR, "injected read error")
        if self._takes("short_reads"):
            self._tier.read_into(place, offset, out[:-1])
            raise TierFailure(FailureReason.SHORT_READ, f"{len(out) - 1} of {len(out)} bytes")
        self._tier.read_into(place, offset, out)
        if self._takes("flipped_reads"):
            out[len(out) // 2] ^= 1

    def close(self) -> None:
        self._tier.close()

    def _takes(self, fault: str) -> bool:
        with self._lock:
            left: int = getattr(self._faults, fault)
            if left:
                setattr(self._faults, fault, left - 1)
            return left > 0
