"""What every medium can do, and how it says that it could not."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from kvstore.errors import LarderError


class FailureReason(StrEnum):
    """Label of counters and outcome events; the set is closed so that a dashboard can list it."""

    NO_SPACE = "no_space"
    IO_ERROR = "io_error"
    SHORT_READ = "short_read"
    SHORT_WRITE = "short_write"
    TIMEOUT = "timeout"
    """No answer yet: a stalled medium, which says nothing about the bytes."""


class TierFailure(LarderError):
    """The medium did not do what was asked. Nothing is known about the bytes of the extent asked for."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Tier(Protocol):
    """Spans of bytes, addressed by (place, offset): place is a region's number on SSD and 0 in an arena.

    Calls block and may come from several threads at once for spans that do not overlap. Whether a span may be read or
    overwritten now is the core's decision, not checked here.
    """

    def write(self, place: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        """Puts the parts one after another at the offset; the next read sees them. Raises TierFailure."""
        ...

    def sync(self, place: int) -> None:
        """What was written to the place before now survives a crash of the process and of the machine, on a medium that can
        promise it. Raises TierFailure: then nothing is known about the writes since the last sync."""
        ...

    def read_into(self, place: int, offset: int, out: memoryview) -> None:
        """Fills all of `out` or raises TierFailure; fewer bytes than asked are never passed on as full."""
        ...

    def close(self) -> None: ...
