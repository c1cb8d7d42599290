"""Extent: where one copy's payload lies."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from kvstore.ids import Generation


class Tier(IntEnum):
    """One medium of one node; the numbers are those of the protocol. A lower number is a faster tier."""

    GPU = 1
    HOST = 2
    SSD = 3


ALIGNMENT = 4096
"""Every extent starts at a multiple of this, so that direct I/O and page-wise mapping work without copying."""


MAX_PAYLOAD_BYTES = (1 << 32) - 1
MAX_SPAN_BYTES = ALIGNMENT << 32
"""16 TiB, of one arena or region: page numbers and lengths are kept in 32 bits each."""


class Extent(NamedTuple):
    """A span of one tier that holds, or will hold, exactly one payload.

    Two extents with the same place and different generations never mean the same payload.
    """

    tier: Tier
    region: int
    """Number of the SSD region; 0 for the one arena of the host or GPU tier."""
    offset: int
    """First byte of the payload, from the start of the region or arena; a multiple of ALIGNMENT."""
    length: int
    """Payload bytes. The room taken is this rounded up to ALIGNMENT (plus the record header on SSD)."""
    generation: Generation


make_extent: Callable[[tuple[Tier, int, int, int, int]], Extent] = partial(tuple.__new__, Extent)
"""From the five fields, in half the time of the constructor: each put makes several."""


def round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
