"""What metrics, events of the cluster and repair are told."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvstore.core.extent import Tier
from kvstore.ids import BlockRef, KeySpace


class NoteKind(StrEnum):
    STORED = "stored"
    DEMOTED = "demoted"
    PROMOTED = "promoted"
    RELOCATED = "relocated"
    EVICTED = "evicted"
    EXPIRED = "expired"
    DELETED = "deleted"
    QUARANTINED = "quarantined"
    STEPPED_DOWN = "stepped_down"
    """A re-coded copy is on the SSD; `reason` is that of the move, `payload_bytes` what it saved."""
    NOT_STEPPED_DOWN = "not_stepped_down"
    """It was written as it is instead; `reason` says why."""
    RECOVERED = "recovered"
    COPY_FAILED = "copy_failed"
    REGION_FAILED = "region_failed"
    RESERVATION_EXPIRED = "reservation_expired"
    LEASE_EXPIRED = "lease_expired"


class Note(NamedTuple):
    """Something happened that metrics, events or the repair layer want to know. No outcome."""

    kind: NoteKind
    reason: str
    """Short and from a fixed set ("room", "delete", "operator", "checksum", ...): a metric label."""
    tier: Tier | None = None
    payload_bytes: int = 0
    key_space: KeySpace | None = None
    block: BlockRef | None = None
    """With key_space for QUARANTINED: what repair should fetch again."""
