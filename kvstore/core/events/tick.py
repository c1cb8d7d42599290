"""Time that passes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Hand in at least every second, whether or not anything else happens: expiries and background work hang on it. No answer."""
