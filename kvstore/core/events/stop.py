"""A graceful stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvstore.ids import RequestId
from kvstore.units import Bytes, Nanos


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Graceful stop: no reservation is granted from now on; host copies are demoted, those of the hottest chains first and heads before
    tails, and the open region is sealed. Comes back: AnswerStop when nothing is left to do or the time is over."""

    request_id: RequestId
    within: Nanos | None = None
    """Of which an eighth is kept for the sealing. None: no bound. A hung disk can outlast it: the shell has a timer of its own."""


class StopReport(NamedTuple):
    """Of blocks that were in the host tier alone when the stop began."""

    kept_blocks: int
    """On the SSD now."""
    kept_bytes: Bytes
    left_blocks: int
    """Still in the host tier alone: lost with it."""
    left_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStop:
    request_id: RequestId
    report: StopReport
