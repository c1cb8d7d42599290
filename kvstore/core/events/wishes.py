"""Wishes of an operator: pins and quotas."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvstore.ids import BlockHash, KeySpace, Namespace, RequestId
from kvstore.units import Bytes, Nanos


class PinKind(IntEnum):
    SOFT = 1
    """Goes only when nothing else can."""
    HARD = 2
    """Is not evicted. Deletes, the block's own end and bad bytes still end it."""


class PinStatus(IntEnum):
    PINNED = 1
    ABSENT = 2
    """Not here: nothing was pinned."""
    NO_SHARE = 3
    """Hard pins have all of the room that they may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRequested:
    """Pins blocks that are here, or gives the pins that they have another kind and end. Comes back: AnswerPin, at once."""

    request_id: RequestId
    key_space: KeySpace
    hashes: tuple[BlockHash, ...]
    kind: PinKind
    ttl: Nanos
    """Above 0; MAX_PIN_TTL at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPin:
    request_id: RequestId
    statuses: tuple[PinStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpinRequested:
    """Comes back: AnswerUnpin, at once."""

    request_id: RequestId
    key_space: KeySpace
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerUnpin:
    request_id: RequestId
    unpinned: tuple[bool, ...]
    """False: it had none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRequested:
    """What a namespace has and may have; with `change` it may have `limit` from now on, and gives back what is above it, some with each
    tick. Comes back: AnswerQuota, at once."""

    request_id: RequestId
    namespace: Namespace
    change: bool = False
    limit: Bytes | None = None
    """None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerQuota:
    request_id: RequestId
    used: Bytes
    limit: Bytes | None
