"""Units. Durations and instants are integer nanoseconds, sizes are integer bytes; nothing else crosses an interface."""

from __future__ import annotations

import re
from typing import NewType

from kvstore.errors import ConfigError

Nanos = NewType("Nanos", int)
"""A duration, or an instant of a monotonic clock, in nanoseconds."""

Bytes = NewType("Bytes", int)

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]i?B?)?", re.IGNORECASE)
_SIZE_FACTOR = {"": 1, "B": 1, "K": KIB, "M": MIB, "G": GIB, "T": 1 << 40}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s|min|h)?")
_LARGEST = 1 << 63
"""Above what any size or duration of ours may be: a message field has 64 bits."""
_DURATION_FACTOR = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}


def seconds(value: float) -> Nanos:
    return Nanos(round(value * 1e9))


def milliseconds(value: float) -> Nanos:
    return Nanos(round(value * 1e6))


def to_seconds(value: Nanos) -> float:
    return value / 1e9


def to_milliseconds(value: Nanos) -> float:
    return value / 1e6


def parse_size(text: str | int) -> Bytes:
    """Bytes of "64k", "368KiB", "1.5GiB" or a plain number. K, M, G, T are powers of 1024. Raises ConfigError."""
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write for example 512MiB, 2GiB or a number of bytes")
    size = float(match[1]) * _SIZE_FACTOR[(match[2] or "")[:1].upper()]
    if size >= _LARGEST:
        raise ConfigError(f"{match[0]:.40} is too large for a size")
    return Bytes(int(size))


def parse_duration(text: str | float) -> Nanos:
    """Nanoseconds of "30s", "250ms" or a plain number of seconds. Raises ConfigError."""
    match = _DURATION.fullmatch(str(text).strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration; write for example 30s, 250ms or a number of seconds")
    duration = float(match[1]) * _DURATION_FACTOR[match[2] or "s"]
    if duration >= _LARGEST:
        raise ConfigError(f"{match[0]:.40} is too large for a duration")
    return Nanos(round(duration))
